"""Xavier initialisation with DeepNorm's gain (DeepNet, arXiv 2203.00555; paper section 2)."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sferic.config import ModelConfig
from sferic.nn.ffn import Dense, MoE
from sferic.nn.layers import RMSNorm
from sferic.nn.mixers import LightningMixer, SoftmaxMixer

if TYPE_CHECKING:
    from sferic.nn.model import HybridModel


@torch.no_grad()
def init_weights(model: "HybridModel", config: ModelConfig, seed: int) -> None:
    """Fill every weight: N(0, gain^2 * 2 / (fan_in + fan_out)) per matrix, norms with 1.

    The gain is `init_gain` for v, output projections and FFN matrices, and 1 elsewhere.  Numbers
    are drawn on the CPU in float32, so that they don't depend on the device.
    """
    generator = torch.Generator().manual_seed(seed)
    gain = config.init_gain

    def xavier(weight: Tensor, fan_in: int, fan_out: int, gain: float = 1.0) -> None:
        std = gain * math.sqrt(2 / (fan_in + fan_out))
        weight.copy_(torch.randn(weight.shape, generator=generator) * std)

    D, H, G, K = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    xavier(model.embed_tokens.weight, config.vocab_size, D)
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.weight.fill_(1)
        elif isinstance(module, LightningMixer):
            xavier(module.qkv_proj.weight, D, H * K)  # q, k and v are three maps of this size
            module.qkv_proj.weight.view(H, 3, K, D)[:, 2] *= gain
            xavier(module.gate_proj.weight, D, H * K)
            xavier(module.out_proj.weight, H * K, D, gain)
        elif isinstance(module, SoftmaxMixer):
            xavier(module.q_proj.weight, D, H * K)
            xavier(module.k_proj.weight, D, G * K)
            xavier(module.v_proj.weight, D, G * K, gain)
            xavier(module.out_proj.weight, H * K, D, gain)
        elif isinstance(module, MoE | Dense):
            if isinstance(module, MoE):
                xavier(module.router.weight, D, config.ffn.num_experts)  # type: ignore[union-attr]
            xavier(module.w13, D, config.ffn.size, gain)
            xavier(module.w2, config.ffn.size, D, gain)
    xavier(model.lm_head.weight, D, config.vocab_size)
