"""From logits to the next token."""

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from sferic.ops.precision import fp32

# beyond these a float32 quotient of ordinary logits overflows or vanishes
SMALLEST, LARGEST = 1e-6, 1e6


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits.

    Steps in this order, each on what the one before it left, renormalised (the order of
    transformers): repetition penalty, temperature, top-k, top-p, min-p, draw.

    Attributes:
        temperature: divides the logits; 0 takes the largest one and ignores the next three.
        top_p: draw from the fewest tokens whose probabilities sum to at least this, in (0, 1].
        top_k: draw from this many most probable tokens; None or 0 from all.
        min_p: drop tokens less probable than this share of the most probable one, in [0, 1].
        repetition_penalty: of each token in the prompt or generated so far, divides a logit above
            zero (CTRL, arXiv:1909.05858, section 4.1) and multiplies one below (as transformers);
            1 changes nothing.
        seed: any integer.  A draw depends on it and on the position alone, so that equal prompts of
            one call go on equally: for other continuations call again with another seed.

    Among equal logits the lower ids stay.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError, naming the value, what is allowed and what to use instead."""
        span = f"{SMALLEST:g} to {LARGEST:g}"
        t, penalty = self.temperature, self.repetition_penalty
        _check(
            "temperature", t, _real(t) and (t == 0 or SMALLEST <= t <= LARGEST),
            f"0 or a number from {span}", "use 0 for the most probable token",
        )  # fmt: skip
        _check(
            "top_p", self.top_p, _real(self.top_p) and 0 < self.top_p <= 1,
            "a number above 0 and at most 1", "use 1 for all tokens",
        )  # fmt: skip
        _check(
            "top_k", self.top_k, self.top_k is None or (_whole(self.top_k) and self.top_k >= 0),
            "a whole number of at least 0, or None", "use 0 for all tokens",
        )  # fmt: skip
        _check(
            "min_p", self.min_p, _real(self.min_p) and 0 <= self.min_p <= 1,
            "a number from 0 to 1", "use 0 for all tokens",
        )  # fmt: skip
        _check(
            "repetition_penalty", penalty, _real(penalty) and SMALLEST <= penalty <= LARGEST,
            f"a number from {span}", "use 1 for no penalty",
        )  # fmt: skip
        _check("seed", self.seed, _whole(self.seed), "a whole number", "use 0")


def sample(
    logits: Tensor, sampling: Sampling, positions: list[int], seen: Tensor | None = None
) -> Tensor:
    """Pick one token per row.

    The random number of a row depends on (seed, position) alone: neighbours in the batch don't
    change it.

    Args:
        logits: [S, V].
        sampling: how to choose.
        positions: [S], where in its sequence each new token will stand.
        seen: [S, V] bool, the tokens that the repetition penalty is for.

    Returns:
        [S] int64; -1 for a row whose largest logit is not finite (NaN, or nothing possible). An
        error here would have to wait for the device; who reads the tokens raises it.

    Raises:
        ValueError: a repetition penalty without `seen`.
    """
    if sampling.repetition_penalty != 1:
        if seen is None:
            raise ValueError(
                f"repetition_penalty {sampling.repetition_penalty} needs `seen`, a bool tensor "
                f"{list(logits.shape)}; give it, or use a penalty of 1"
            )
        logits = penalise(logits, seen, sampling.repetition_penalty)
    best, token = logits.max(-1)
    if sampling.temperature > 0:
        probs, tokens = distribution(logits, sampling)
        draw = [_uniform(sampling.seed, position) for position in positions]
        token = tokens.gather(-1, _invert(probs, draw))[:, 0]
    return token.where(best.isfinite(), -1)


def penalise(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide seen logits [S, V] above zero by the penalty, multiply those below; float32."""
    logits = logits.to(fp32(logits.dtype))
    return logits.where(~seen, torch.where(logits > 0, logits / penalty, logits * penalty))


def distribution(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """What a temperature above 0 draws from, after the repetition penalty.

    Args:
        logits: [S, V].
        sampling: temperature, top_k, top_p and min_p are used.

    Returns:
        Probabilities [S, V], falling, 0 for what was dropped, in at least float32; and the token
        of each [S, V] int64.
    """
    logits, tokens = logits.to(fp32(logits.dtype)).sort(dim=-1, descending=True, stable=True)
    logits = (logits - logits[:, :1]) / sampling.temperature
    if sampling.top_k:
        logits[:, sampling.top_k :] = -math.inf
    probs = logits.softmax(-1)
    dropped = probs < sampling.min_p * probs[:, :1]
    if sampling.top_p < 1:
        dropped |= probs.cumsum(-1) - probs >= sampling.top_p
        dropped[:, :1] = False  # also for a top_p that is 0 in float32
    probs = probs.masked_fill(dropped, 0)
    return probs / probs.sum(-1, keepdim=True), tokens


def _invert(probs: Tensor, draw: list[float]) -> Tensor:
    """Index [S, 1] where each row's cumulative probability passes its number in [0, 1)."""
    total = probs.cumsum(-1)
    at = torch.tensor(draw, dtype=probs.dtype, device=probs.device)[:, None]
    chosen = (total <= at * total[:, -1:]).sum(-1, keepdim=True)
    return chosen.minimum((probs > 0).sum(-1, keepdim=True) - 1).clamp(min=0)


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from two integers, of any size (the splitmix64 finaliser)."""
    mask = 2**64 - 1
    x = (int(seed) * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return ((x ^ (x >> 31)) >> 11) / 2**53


def _check(name: str, value: Any, fits: bool, allowed: str, remedy: str) -> None:
    if not fits:
        raise ValueError(f"{name} is {value!r}, it must be {allowed}; {remedy}")


def _real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
