"""The same numbers as transformers' MiniMax (mended, see mended_minimax), both ways."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import sferic
from mended_minimax import mended_cache, recorded, rotate_part_of_each_head
from sferic.checkpoint import Layout
from sferic.nn import ContiguousCache, HybridModel

TOKENS = 100  # several blocks of 16 and of 64, and a remainder
TOLERANCE = 1e-5


def close(ours: Tensor, theirs: Tensor) -> None:
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < TOLERANCE, f"{error:.2e}"


@pytest.fixture(scope="module")
def theirs(published: Path) -> Any:
    from transformers import MiniMaxForCausalLM

    return rotate_part_of_each_head(MiniMaxForCausalLM.from_pretrained(published).eval())


@pytest.fixture(scope="module")
def ours(published: Path) -> HybridModel:
    return sferic.load(published)


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(128, (3, TOKENS), generator=torch.Generator().manual_seed(1))


def compare(ours: HybridModel, theirs: Any, tokens: Tensor, cache: Any) -> None:
    """Logits, every layer's output, router logits and recurrent states."""
    layers = list(theirs.model.layers)
    with (
        torch.no_grad(),
        recorded(layers, [layer.mlp.gate for layer in layers]) as right,
    ):
        right_logits = theirs(tokens, cache=cache, use_cache=True).logits
    blocks: list[Any] = list(ours.layers.values())
    own_cache = ContiguousCache(ours.config, len(tokens), tokens.shape[1])
    with torch.no_grad(), recorded(blocks, [block.ffn.router for block in blocks]) as left:
        batch = own_cache.extend(list(tokens))
        logits = ours.head(ours.hidden(batch, own_cache)[0])
    with torch.no_grad():
        whole = ours(tokens)
    assert right_logits.abs().max() > 1
    close(whole, right_logits)
    close(logits.view_as(right_logits), right_logits)
    assert len(right["layers"]) == len(right["routers"]) == ours.config.num_layers
    for key in ("layers", "routers"):
        for a, b in zip(left[key], right[key], strict=True):
            close(a, b)
    for i, kind in enumerate(ours.config.mixers):
        if kind == "lightning":
            close(own_cache.state(i), cache.linear_cache[i])


def test_their_checkpoint_in_our_model(ours: HybridModel, theirs: Any, tokens: Tensor) -> None:
    compare(ours, theirs, tokens, mended_cache())


@pytest.mark.parametrize("layout", ["minimax", "transformers"])
def test_our_checkpoint_in_their_model(
    layout: Layout, tmp_path: Path, tokens: Tensor,
    make_model: Callable[..., HybridModel], make_config: Any,
) -> None:  # fmt: skip
    from transformers import MiniMaxConfig, MiniMaxForCausalLM

    pattern = ("lightning",) * 7 + ("softmax",)
    config = make_config(vocab_size=128, num_layers=8, layer_pattern=pattern)
    ours = make_model(config, dtype=torch.float32)
    sferic.save(ours, tmp_path / "model", layout=layout)
    if layout == "minimax":  # transformers knows the names of its tensors, not its config
        own = MiniMaxConfig.from_pretrained(converted_config(ours, tmp_path))
        theirs = MiniMaxForCausalLM.from_pretrained(tmp_path / "model", config=own)
    else:
        theirs = MiniMaxForCausalLM.from_pretrained(tmp_path / "model")
    assert theirs.config.rotary_dim == 4
    compare(ours, rotate_part_of_each_head(theirs.eval()), tokens, mended_cache())


def converted_config(model: HybridModel, folder: Path) -> Path:
    sferic.save(model, folder / "config", layout="transformers")
    return folder / "config"


def test_without_the_patch_they_compute_something_else(
    published: Path, ours: HybridModel, tokens: Tensor
) -> None:
    """So the patch is needed, and the comparison can fail."""
    from transformers import MiniMaxForCausalLM

    with torch.no_grad():
        wrong = MiniMaxForCausalLM.from_pretrained(published).eval()(tokens).logits
        assert (ours(tokens) - wrong).abs().max() > 0.01


@given(lengths=st.lists(st.integers(1, TOKENS), min_size=1, max_size=3))
def test_padded_rows(ours: HybridModel, theirs: Any, tokens: Tensor, lengths: list[int]) -> None:
    """They pad on the left with a mask, we on the right with lengths."""
    rows, T = len(lengths), max(lengths)
    left, right = torch.zeros(2, rows, T, dtype=torch.long)
    mask = torch.zeros(rows, T, dtype=torch.long)
    for i, n in enumerate(lengths):
        left[i, T - n :] = right[i, :n] = tokens[i, :n]
        mask[i, T - n :] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = theirs(left, attention_mask=mask, position_ids=positions).logits
        logits = ours(right, lengths=lengths)
    for i, n in enumerate(lengths):
        close(logits[i, :n], expected[i, T - n :])


@given(cuts=st.lists(st.integers(1, TOKENS - 1), max_size=4, unique=True))
def test_prefill_in_chunks(ours: HybridModel, theirs: Any, tokens: Tensor, cuts: list[int]) -> None:
    cache, their_cache = ContiguousCache(ours.config, 3, TOKENS), mended_cache()
    ends = [0, *sorted(cuts), TOKENS]
    with torch.no_grad():
        for a, b in pairwise(ends):
            chunk = tokens[:, a:b]
            expected = theirs(chunk, cache=their_cache, use_cache=True).logits
            logits = ours.head(ours.hidden(cache.extend(list(chunk)), cache)[0])
            close(logits.view_as(expected), expected)


@given(order=st.lists(st.integers(0, 2), min_size=3, max_size=3), start=st.integers(1, 60))
def test_a_reordered_cache_goes_on(
    ours: HybridModel, theirs: Any, tokens: Tensor,
    order: list[int], start: int,
) -> None:  # fmt: skip
    cache, their_cache = ContiguousCache(ours.config, 3, TOKENS), mended_cache()
    rows = torch.tensor(order)
    with torch.no_grad():
        theirs(tokens[:, :start], cache=their_cache, use_cache=True)
        ours.hidden(cache.extend(list(tokens[:, :start])), cache)
        their_cache.reorder_cache(rows)
        cache.reorder(rows)
        for t in range(start, start + 3):
            step = tokens[:, t : t + 1]
            expected = theirs(step, cache=their_cache, use_cache=True).logits[:, 0]
            close(ours.head(ours.hidden(cache.extend(list(step)), cache)[0]), expected)
            # what a row would have been, had it been written in one piece
            row = torch.cat([tokens[order[0], :start], tokens[0, start : t + 1]])
            close(ours(row[None])[0, -1], expected[0])


def test_in_bf16_we_are_closer_to_fp32_than_they(
    published: Path, ours: HybridModel, theirs: Any, tokens: Tensor
) -> None:
    from transformers import MiniMaxForCausalLM

    low = MiniMaxForCausalLM.from_pretrained(published, dtype=torch.bfloat16).eval()
    rotate_part_of_each_head(low)
    own_low = sferic.load(published, dtype=torch.bfloat16)
    with torch.no_grad():
        exact = theirs(tokens).logits
        them = (low(tokens).logits.float() - exact).abs().mean()
        us = (own_low(tokens).float() - exact).abs().mean()
    assert us < 0.75 * them  # 0.58: they round the residual stream after every branch
