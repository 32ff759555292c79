"""Bits per byte, each number computed a second way."""

import lzma
import math
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from sferic.config import ModelConfig
from sferic.data import Document, Tokenizer, TokenStore, tokenize, write_store
from sferic.evals import Compression, compression, unigram_nats
from sferic.nn import HybridModel

TRAIN = ["the quick brown fox jumps over the lazy dog\n" * 3, "pack my box with jugs\n" * 2]
HELDOUT = [
    "the lazy fox — früh am Morgen 🦊\n" * 4,
    "a",
    "\r\n".join(f"jug {i} jumps over {i * i} quick dogs" for i in range(60)),
]
SEQ_LEN = 24


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TRAIN, 280)


@pytest.fixture(scope="module")
def stores(
    tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TokenStore, TokenStore]:
    folder = tmp_path_factory.mktemp("stores")

    def store(name: str, texts: list[str]) -> TokenStore:
        documents = [Document(str(i), text) for i, text in enumerate(texts)]
        return write_store(
            folder / name,
            tokenize(documents, tokenizer),
            tokenizer_hash=tokenizer.hash,
            vocab_size=tokenizer.vocab_size,
        )

    return store("train", TRAIN), store("heldout", HELDOUT)


@pytest.fixture(scope="module")
def model(
    make_model: Callable[..., HybridModel], make_config: Callable[..., ModelConfig]
) -> HybridModel:
    return make_model(make_config(vocab_size=300))


@pytest.fixture(scope="module")
def found(
    model: HybridModel, tokenizer: Tokenizer, stores: tuple[TokenStore, TokenStore]
) -> Compression:
    model.train()  # scoring must not drop tokens all the same
    return compression(model, tokenizer, *stores, SEQ_LEN)


def cost(tokenizer: Tokenizer) -> Callable[[int], float]:
    """Bits of a token by the unigram model."""
    counts = Counter(t for text in TRAIN for t in [*tokenizer.encode(text), tokenizer.end_id])
    total = sum(counts.values()) + tokenizer.vocab_size
    return lambda token: -math.log2((counts[token] + 1) / total)


def test_unigram_costs_by_hand(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [[0, 2, 2], [2]], tokenizer_hash="x", vocab_size=4)
    # counts 1 0 3 0, plus one each: 2 1 4 1 of 8
    np.testing.assert_allclose(np.exp(-unigram_nats(store, 4)), [2 / 8, 1 / 8, 4 / 8, 1 / 8])


def test_bytes_and_tokens_are_those_of_the_texts(found: Compression, tokenizer: Tokenizer) -> None:
    assert found.heldout_bytes == len("".join(HELDOUT).encode())
    assert found.heldout_tokens == sum(len(tokenizer.encode(t)) + 1 for t in HELDOUT)


def test_compressors_see_the_same_bytes(found: Compression) -> None:
    content = "".join(HELDOUT).encode()
    xz = lzma.compress(content, preset=9 | lzma.PRESET_EXTREME)
    assert found.zlib == 8 * len(zlib.compress(content, 9)) / len(content)
    assert found.xz == 8 * len(xz) / len(content)


def test_unigram_bits_are_the_sum_over_all_tokens_and_ends(
    found: Compression, tokenizer: Tokenizer
) -> None:
    of = cost(tokenizer)
    bits = sum(of(t) for text in HELDOUT for t in [*tokenizer.encode(text), tokenizer.end_id])
    assert found.unigram == pytest.approx(bits / found.heldout_bytes, rel=1e-12)


def test_model_bits_are_the_sum_over_pieces_with_first_tokens_at_unigram_cost(
    found: Compression, model: HybridModel, tokenizer: Tokenizer
) -> None:
    of = cost(tokenizer)
    bits, pieces = 0.0, 0
    for text in HELDOUT:
        ids = [*tokenizer.encode(text), tokenizer.end_id]
        for start in range(0, len(ids), SEQ_LEN):
            piece = ids[start : start + SEQ_LEN]
            pieces += 1
            with torch.no_grad():
                logp = model.eval()(torch.tensor([piece]))[0].log_softmax(-1)
            bits += of(piece[0])
            bits -= sum(float(logp[i, t]) for i, t in enumerate(piece[1:])) / math.log(2)
    assert pieces > len(HELDOUT)
    assert found.model == pytest.approx(bits / found.heldout_bytes, rel=1e-10)
