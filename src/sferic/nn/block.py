"""One layer: a sequence mixer and a feature mixer, each with its norm and residual."""

import torch
from torch import Tensor, nn

from sferic.config import ModelConfig
from sferic.nn.batch import Batch
from sferic.nn.cache import Cache
from sferic.nn.dispatch import Routing
from sferic.nn.ffn import Dense, MoE
from sferic.nn.layers import RMSNorm
from sferic.nn.mixers import MIXERS


class Block(nn.Module):
    """h = norm(x); x = alpha * h + beta * mix(h), twice (post-norm as in DeepNorm).

    The residual is the *normed* value, also in the first layer.  In pre-norm it is x itself.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        kind = config.mixers[layer]
        self.post_norm = config.norm == "post"
        self.mixer_residual = getattr(config.residual_scale, kind)
        self.mixer_branch = getattr(config.branch_scale, kind)
        self.ffn_residual = config.residual_scale.ffn
        self.ffn_branch = config.branch_scale.ffn
        self.mixer_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = MIXERS[kind](config, layer)
        self.ffn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        ffn = config.ffn
        self.ffn = (MoE if ffn.kind == "moe" else Dense)(config.hidden_size, ffn)  # type: ignore[arg-type]

    def forward(
        self,
        x: Tensor,
        batch: Batch,
        cache: Cache | None = None,
        indices: Tensor | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Routing | None]:
        """Map x [T, D] to [T, D] in its own dtype; `indices` repeats an earlier routing.

        The mixer and the FFN run in `compute_dtype` (None: that of x): a residual stream in bf16
        would round after every branch, three times the error of bf16 branches.
        """
        dtype = compute_dtype or x.dtype
        h = self.mixer_norm(x)
        residual = h if self.post_norm else x
        y = self.mixer(h.to(dtype), batch, cache)
        x = _join(residual, y, self.mixer_residual, self.mixer_branch)
        h = self.ffn_norm(x)
        residual = h if self.post_norm else x
        y, routing = self.ffn(h.to(dtype), batch, indices)
        return _join(residual, y, self.ffn_residual, self.ffn_branch), routing


def _join(residual: Tensor, branch: Tensor, alpha: float, beta: float) -> Tensor:
    """alpha * residual + beta * branch, in the dtype of the residual."""
    if beta != 1:
        branch = beta * branch
    return torch.add(branch, residual, alpha=alpha)
