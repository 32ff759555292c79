"""Documents, and the moves that several tests of the model make."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sferic.nn import Batch, HybridModel


def _documents(*lengths: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(40, (n,), generator=generator) for n in lengths]


@pytest.fixture(scope="session")
def documents() -> Callable[..., list[Tensor]]:
    """`documents(*lengths, seed=0)`, random tokens of the small model."""
    return _documents


@torch.no_grad()
def _alone(model: HybridModel, tokens: Tensor) -> Tensor:
    return model.head(model.hidden(Batch.pack([tokens]))[0])


@pytest.fixture(scope="session")
def alone() -> Callable[[HybridModel, Tensor], Tensor]:
    """Logits [T, vocab] of one document by itself, without a cache."""
    return _alone
