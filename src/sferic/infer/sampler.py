"""From logits to the next token."""

import torch
from torch import Tensor

from sferic.ops.precision import fp32


def sample(
    logits: Tensor, *, temperature: float, top_p: float, seed: int, positions: list[int]
) -> Tensor:
    """Pick one token per row.

    The random number of a row depends on (seed, position) alone: neighbours in the batch don't
    change it.

    Args:
        logits: [S, V].
        temperature: 0 takes the largest logit.
        top_p: draw from the fewest tokens whose probabilities sum to at least this, in (0, 1].
        seed: any integer.
        positions: [S], where in its sequence each new token will stand.

    Returns:
        [S] int64.
    """
    if temperature < 0 or not 0 < top_p <= 1:
        raise ValueError(
            f"temperature {temperature} must be >= 0 and top_p {top_p} in (0, 1]; "
            "use temperature 0 for the most probable token"
        )
    if temperature == 0:
        return logits.argmax(-1)
    dtype = fp32(logits.dtype)
    probs = (logits.to(dtype) / temperature).softmax(-1)
    probs, tokens = probs.sort(dim=-1, descending=True, stable=True)
    before = probs.cumsum(-1) - probs
    probs = probs.masked_fill(before >= top_p, 0)  # the most probable token always stays
    total = probs.cumsum(-1)
    draw = torch.tensor([_uniform(seed, p) for p in positions], dtype=dtype, device=logits.device)
    chosen = (total <= draw[:, None] * total[:, -1:]).sum(-1, keepdim=True)
    last = (probs > 0).sum(-1, keepdim=True) - 1
    return tokens.gather(-1, chosen.minimum(last))[:, 0]


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from two integers (the splitmix64 finaliser)."""
    mask = 2**64 - 1
    x = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return ((x ^ (x >> 31)) >> 11) / 2**53
