"""What all tests share: loud uninitialised memory, few threads, and small models."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sferic.config import ModelConfig, MoEFFN
from sferic.nn import HybridModel

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

# Memory of torch.empty holds NaN, so a place that nobody wrote shows.
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore
torch.set_num_threads(1)

settings.register_profile("sferic", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("sferic")


class Operators(TorchDispatchMode):
    """Records every operator that runs inside, and the largest tensor that one returned."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.largest = max([self.largest, *sizes])
        return out


@pytest.fixture(scope="session")
def operators() -> type[Operators]:
    """`with operators() as seen:` records what runs: `seen.names`, `seen.largest`."""
    return Operators


@contextmanager
def _no_host_sync() -> Iterator[Callable[[Tensor], Tensor]]:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode.from_tensor


@pytest.fixture(scope="session")
def no_host_sync() -> Callable[[], Any]:
    """`with no_host_sync() as fake: f(fake(x))` raises where f waits for the numbers of x.

    A fake tensor has a shape and no numbers, and so has all that is computed from it.  Reading one
    on the host fails, and so does a shape that depends on one.
    """
    return _no_host_sync


def small_config(**changes: Any) -> ModelConfig:
    """Every part of the architecture in little; hidden_size is not num_heads * head_dim."""
    values: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 24,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "layer_pattern": ("lightning", "softmax", "lightning"),
        "ffn": MoEFFN(kind="moe", size=16, num_experts=4, top_k=2, capacity_factor=1.25),
        **changes,
    }
    return ModelConfig(**values)


def small_model(
    config: ModelConfig | None = None, *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> HybridModel:
    """A model in evaluation mode whose weights, norms too, are far from their usual start."""
    model = HybridModel(config or small_config())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)
    return model.to(dtype).eval()


@pytest.fixture(scope="session")
def make_config() -> Callable[..., ModelConfig]:
    """`make_config(**changes)`, a small config."""
    return small_config


@pytest.fixture(scope="session")
def make_model() -> Callable[..., HybridModel]:
    """`make_model(config, seed=0, dtype=float64)`, a small model with telling weights."""
    return small_model
