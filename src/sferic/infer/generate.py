"""Generation with the model's own cache: prefill the prompts, then one token per step."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from sferic.infer.sampler import Sampling, sample
from sferic.nn import ContiguousCache, HybridModel
from sferic.ops.blocked import BlockedWeights

PREFILL_CHUNK = 2048
GREEDY = Sampling()
# copies of the weights for decoding (`ops/blocked.py`) are made where so many steps repay them
BLOCKED_FROM = 32


@torch.inference_mode()
def generate_stream(
    model: HybridModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling = GREEDY,
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    vocab_size: int | None = None,
) -> Iterator[list[int | None]]:
    """Continue several prompts at once; yields one new id per prompt and step.

    A prompt that has produced a stop id yields it and then None; the iterator ends when all have,
    or after `max_new_tokens` steps.

    Args:
        model: any model on any device; it is put in evaluation mode.
        prompts: token ids, at least one each.
        sampling: how each token is chosen.
        max_new_tokens: per prompt.
        stop_ids: ids that end a prompt's continuation.
        vocab_size: ids from here on are never chosen (rows of the head without a token).

    Raises:
        ValueError: a prompt or an option can't be used, or the model's logits are NaN.
    """
    if not prompts or any(len(p) == 0 for p in prompts):
        raise ValueError("each prompt needs at least one token; give a prompt or a start token")
    limit = model.config.vocab_size
    bad = [t for p in prompts for t in p if not 0 <= t < limit]
    if bad:
        raise ValueError(f"token id {bad[0]} lies outside the model's vocabulary of {limit}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}, it must be at least 1")
    model.eval()
    weight = model.embed_tokens.weight
    device = weight.device
    capacity = max(len(p) for p in prompts) + max_new_tokens
    dtype = model.compute_dtype or weight.dtype
    cache = ContiguousCache(model.config, len(prompts), capacity, device=device, dtype=dtype)
    rows = [torch.tensor(p, device=device) for p in prompts]
    seen = _seen(rows, limit)[:, :vocab_size] if sampling.repetition_penalty != 1 else None
    logits = _prefill(model, cache, rows)
    running = [True] * len(prompts)
    weights = BlockedWeights() if max_new_tokens > BLOCKED_FROM else None
    for i in range(max_new_tokens):
        new = sample(logits[:, :vocab_size], sampling, cache.lengths, seen)
        step: list[int | None] = []
        for row, token in enumerate(new.tolist()):
            if token < 0 and running[row]:
                raise ValueError(
                    f"the model's logits of prompt {row} after {cache.lengths[row]} tokens are "
                    "NaN or infinite; check that the weights are finite, and try dtype float32"
                )
            step.append(token if running[row] else None)
            running[row] = running[row] and token not in stop_ids
        yield step
        if not any(running) or i + 1 == max_new_tokens:
            return
        new = new.clamp(min=0)[:, None]  # a row that has stopped may have no token
        if seen is not None:
            seen.scatter_(1, new, True)
        batch = cache.extend(list(new))
        with weights.used() if weights is not None else nullcontext():
            logits = model.head(model.hidden(batch, cache)[0])


def generate(
    model: HybridModel,
    prompts: Tensor | Sequence[int] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = GREEDY.temperature,
    top_p: float = GREEDY.top_p,
    top_k: int | None = GREEDY.top_k,
    min_p: float = GREEDY.min_p,
    repetition_penalty: float = GREEDY.repetition_penalty,
    seed: int = GREEDY.seed,
    stop_ids: Collection[int] = (),
    vocab_size: int | None = None,
) -> list[list[int]]:
    """Continuations of prompts (one row of ids, several, or a tensor [B, T]), a list of ids each.

    A stop id is the last of its list.

    Args:
        prompts, max_new_tokens, stop_ids, vocab_size: see `generate_stream`.
        temperature, top_p, top_k, min_p, repetition_penalty, seed: see `Sampling`.
    """
    sampling = Sampling(temperature, top_p, top_k, min_p, repetition_penalty, seed)
    given = prompts.tolist() if isinstance(prompts, Tensor) else list(prompts)
    rows: list[Any] = [given] if given and isinstance(given[0], int) else given
    out: list[list[int]] = [[] for _ in rows]
    for step in generate_stream(
        model,
        rows,
        sampling,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        vocab_size=vocab_size,
    ):
        for ids, token in zip(out, step, strict=True):
            if token is not None:
                ids.append(token)
    return out


def _seen(prompts: list[Tensor], vocab_size: int) -> Tensor:
    """[S, V] bool: the ids that each prompt holds."""
    seen = torch.zeros(len(prompts), vocab_size, dtype=torch.bool, device=prompts[0].device)
    for row, prompt in zip(seen, prompts, strict=True):
        row[prompt] = True
    return seen


def _prefill(model: HybridModel, cache: ContiguousCache, prompts: list[Tensor]) -> Tensor:
    """Run prompts through the cache in chunks; logits [S, V] after each prompt's last token."""
    logits: list[Tensor | None] = [None] * len(prompts)
    for start in range(0, max(len(p) for p in prompts), PREFILL_CHUNK):
        rows = [r for r, p in enumerate(prompts) if len(p) > start]
        batch = cache.extend([prompts[r][start : start + PREFILL_CHUNK] for r in rows], rows)
        h = model.hidden(batch, cache)[0]
        last = model.head(h[batch.cu_seqlens[1:].long() - 1])
        for row, row_logits in zip(rows, last, strict=True):
            logits[row] = row_logits
    return torch.stack([row for row in logits if row is not None])
