"""The recurrence of lightning attention, written again, and how far two results differ."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


def _recurrence(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    q, k, v, slopes = q.double(), k.double(), v.double(), slopes.double()
    if state is None:
        state = q.new_zeros(q.shape[1], q.shape[2], v.shape[2])
    outputs = [v[:0]]
    for t in range(len(q)):
        state = torch.exp(-slopes)[:, None, None] * state + k[t, :, :, None] * v[t, :, None, :]
        outputs.append((state * q[t, :, :, None]).sum(1)[None])
    return torch.cat(outputs), state


@pytest.fixture(scope="session")
def recurrence() -> Callable[..., tuple[Tensor, Tensor]]:
    """(q, k [T, H, K], v, slopes, state=None) -> (o, state) of one sequence in float64."""
    return _recurrence


def _error(got: Tensor, want: Tensor, heads: int = -2) -> float:
    assert got.shape == want.shape, f"{list(got.shape)} is not {list(want.shape)}"
    assert got.isfinite().all()
    got, want = got.detach(), want.detach()
    if want.numel() == 0:
        return 0.0
    rows = (got.double() - want.double()).abs().movedim(heads, 0).flatten(1).amax(1)
    scale = want.double().abs().movedim(heads, 0).flatten(1).amax(1)
    return float((rows / scale.clamp(min=1e-290)).max())


@pytest.fixture(scope="session")
def error() -> Callable[..., float]:
    """(got, want, heads=-2): difference relative to a head's largest number, worst head."""
    return _error
