"""Xavier initialisation with DeepNorm's gain (DeepNet, arXiv 2203.00555; paper section 2)."""

import hashlib
import math

import torch
from torch import nn


class Draw:
    """Fills one module's weights with numbers that depend on (seed, weight's name) alone.

    So a part of a model, on any device, has the numbers that the whole model would have.
    """

    def __init__(self, module: nn.Module, prefix: str, seed: int) -> None:
        self._module, self._prefix, self._seed = module, prefix, seed

    @torch.no_grad()
    def xavier(self, name: str, fan_in: int, fan_out: int, gain: float = 1.0) -> None:
        """N(0, gain^2 * 2 / (fan_in + fan_out)), drawn on the CPU in float32."""
        weight = self._module.get_parameter(name)
        key = f"{self._seed}:{self._prefix}.{name}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
        numbers = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        weight.copy_(numbers * (gain * math.sqrt(2 / (fan_in + fan_out))))


class Initialised(nn.Module):
    """A module that knows how its own weights begin."""

    def init_weights(self, draw: Draw, gain: float) -> None:
        """Fill them; `gain` is for v, output projections and FFN matrices, 1 is for others."""
        raise NotImplementedError


def init_weights(model: nn.Module, gain: float, seed: int) -> None:
    """Begin the weights of all `Initialised` modules of a model."""
    for name, module in model.named_modules():
        if isinstance(module, Initialised):
            module.init_weights(Draw(module, name, seed), gain)
