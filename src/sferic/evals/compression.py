"""Held-out text in bits per byte, the model beside general compressors and a unigram model."""

import lzma
import math
import zlib
from dataclasses import dataclass

import numpy as np
import torch

from sferic.data import Tokenizer, TokenStore, heldout_packs
from sferic.nn import Batch, HybridModel


@dataclass(frozen=True)
class Compression:
    """Bits per byte of the same held-out bytes."""

    model: float
    unigram: float
    zlib: float
    xz: float
    heldout_bytes: int
    heldout_tokens: int


def unigram_nats(train: TokenStore, vocab_size: int) -> np.ndarray:
    """-log p of each token, from its count in the training store plus one; [vocab]."""
    counts = np.ones(vocab_size)
    for i in range(len(train)):
        counts += np.bincount(train.document(i), minlength=vocab_size)
    return -np.log(counts / counts.sum())


@torch.no_grad()
def compression(
    model: HybridModel,
    tokenizer: Tokenizer,
    train: TokenStore,
    heldout: TokenStore,
    seq_len: int,
) -> Compression:
    """Score the held-out store.

    Every token counts, the end of each document too.  The model reads pieces of at most `seq_len`
    tokens; a piece's first token has nothing before it and is charged the unigram model's cost.

    Args:
        model: any model over the tokenizer's ids.
        tokenizer: turns the store's ids back into the bytes that zlib and xz see.
        train: the store that the unigram model is counted on.
        heldout: the store to score.
        seq_len: tokens of a pack.
    """
    nats = unigram_nats(train, tokenizer.vocab_size)
    ids = np.concatenate([heldout.document(i) for i in range(len(heldout))])
    text = tokenizer.decode(ids.tolist()).encode()
    model.eval()
    device = model.embed_tokens.weight.device
    total = 0.0
    for pack in heldout_packs(heldout, seq_len, tokenizer.fill_id):
        starts = pack.cu_seqlens[:-1]
        firsts = pack.tokens[starts[pack.valid[starts]]]
        total += float(nats[firsts].sum())
        batch = Batch.from_pack(pack, device)
        assert batch.labels is not None
        total += float(model.loss(model.hidden(batch)[0], batch.labels))

    def per_byte(nats_or_bits: float) -> float:
        return nats_or_bits / len(text)

    return Compression(
        model=per_byte(total / math.log(2)),
        unigram=per_byte(float(nats[ids].sum()) / math.log(2)),
        zlib=per_byte(8 * len(zlib.compress(text, 9))),
        xz=per_byte(8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))),
        heldout_bytes=len(text),
        heldout_tokens=heldout.num_tokens,
    )
