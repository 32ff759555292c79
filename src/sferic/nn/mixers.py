"""Sequence mixers: one class per kind named in a config's `layer_pattern`.

A new kind needs a class with these methods and an entry in `MIXERS`; in `config`, its name in the
pattern, a field of `BranchScale`, and its weights in `sizes`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from sferic.config import ModelConfig
from sferic.nn.batch import Batch
from sferic.nn.cores import GatedNorm, LightningCore, SoftmaxCore
from sferic.nn.init import Draw, Initialised
from sferic.nn.layers import Linear, RMSNorm, joint
from sferic.ops.attention import rope
from sferic.ops.lightning import lightning_slopes
from sferic.ops.precision import fp32

if TYPE_CHECKING:
    from sferic.nn.cache import Cache


class LightningMixer(Initialised):
    """SiLU on q, k and v, lightning attention, joint RMSNorm, sigmoid gate, output projection.

    `qkv_proj` holds q, k and v of head 0, then of head 1, ...  The gate reads the block's input.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        D, H, K = config.hidden_size, config.num_heads, config.head_dim
        self.layer = layer
        self.head_dim = K
        self.qkv_proj = Linear(D, H * 3 * K)
        self.gate_proj = Linear(D, H * K)
        self.norm = RMSNorm(H * K, config.mixer_norm_eps)
        self.out_proj = Linear(H * K, D)
        slopes = lightning_slopes(H, config.first_layer + layer, config.depth)
        # not a buffer: see _apply
        self.slopes = torch.tensor(slopes, dtype=torch.float64, device="cpu")
        self.core = LightningCore()
        self.gated_norm = GatedNorm()

    def init_weights(self, draw: Draw, gain: float) -> None:
        """q, k and v are three maps in one matrix; only v's rows take the gain."""
        D, width = self.out_proj.weight.shape
        draw.xavier("qkv_proj.weight", D, width)
        with torch.no_grad():
            self.qkv_proj.weight.view(-1, 3, self.head_dim, D)[:, 2] *= gain
        draw.xavier("gate_proj.weight", D, width)
        draw.xavier("out_proj.weight", width, D, gain)

    @staticmethod
    def new_cache(
        config: ModelConfig, rows: int, capacity: int, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """The states of `rows` sequences of any length: [rows, H, K, V]."""
        H, K = config.num_heads, config.head_dim
        return (torch.zeros(rows, H, K, K, dtype=fp32(dtype)),)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Slopes follow the device but never the dtype: in bf16 late layers would not decay."""
        super()._apply(fn, recurse)
        device = self.out_proj.weight.device
        if device.type != "meta":
            self.slopes = self.slopes.to(device)
        return self

    def forward(self, x: Tensor, batch: Batch, cache: "Cache | None") -> Tensor:
        qkv, gate = joint(x, self.qkv_proj, self.gate_proj)
        qkv = F.silu(qkv).unflatten(-1, (-1, 3, self.head_dim))  # [T, H, 3, K]
        q, k, v = qkv.unbind(2)
        state = None if cache is None else cache.state(self.layer)
        o = self.core(q, k, v, self.slopes, batch, state)
        return self.out_proj(self.gated_norm(o, gate, self.norm.weight, self.norm.eps))


class SoftmaxMixer(Initialised):
    """Causal softmax attention with grouped K/V heads and RoPE on part of each head."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        D, H, G, K = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.layer = layer
        self.head_dim = K
        self.rope_dim = config.rope_dim
        self.rope_base = config.rope_base
        self.q_proj = Linear(D, H * K)
        self.k_proj = Linear(D, G * K)
        self.v_proj = Linear(D, G * K)
        self.out_proj = Linear(H * K, D)
        self.core = SoftmaxCore()

    def init_weights(self, draw: Draw, gain: float) -> None:
        """v and the output projection take the gain."""
        D, width = self.out_proj.weight.shape
        kv_width = self.k_proj.weight.shape[0]
        draw.xavier("q_proj.weight", D, width)
        draw.xavier("k_proj.weight", D, kv_width)
        draw.xavier("v_proj.weight", D, kv_width, gain)
        draw.xavier("out_proj.weight", width, D, gain)

    @staticmethod
    def new_cache(
        config: ModelConfig, rows: int, capacity: int, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Keys and values: [rows, capacity, G, K] each."""
        shape = (rows, capacity, config.num_kv_heads, config.head_dim)
        return torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)

    def forward(self, x: Tensor, batch: Batch, cache: "Cache | None") -> Tensor:
        heads = (-1, self.head_dim)
        qkv = joint(x, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (part.unflatten(-1, heads) for part in qkv)
        qk = rope(torch.cat([q, k], 1), batch.positions, self.rope_dim, self.rope_base)
        q, k = qk.split([q.shape[1], k.shape[1]], 1)
        kv = None if cache is None else cache.kv(self.layer)
        return self.out_proj(self.core(q, k, v, batch, kv).flatten(1))


MIXERS: dict[str, type[LightningMixer] | type[SoftmaxMixer]] = {
    "lightning": LightningMixer,
    "softmax": SoftmaxMixer,
}
