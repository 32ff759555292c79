"""An independent implementation to compare with: transformers' MiniMax, mended where it is wrong.

Three things keep it from computing the released models (transformers 5.24), and each has its patch:

- it rotates all of each head where the models rotate `rotary_dim` dims;
- it takes a cache's length from layer 0, which has no keys in the released layout;
- beam search does not reorder the recurrent states.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

LIGHTNING, SOFTMAX = "linear_attention", "full_attention"


def tiny_transformers(**changes: Any) -> Any:
    """A random `MiniMaxForCausalLM`: two periods' worth of parts, hidden_size not heads * dim."""
    from transformers import MiniMaxConfig, MiniMaxForCausalLM

    scales = {
        f"{kind}_{greek}_factor": value
        for kind, alpha, beta in (
            ("full_attn", 3.3, 1.1),
            ("linear_attn", 3.5566, 0.9),
            ("mlp", 3, 1),
        )
        for greek, value in (("alpha", alpha), ("beta", beta))
    }
    values: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rotary_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "block_size": 16,
        "layer_types": [LIGHTNING] * 7 + [SOFTMAX],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "initializer_range": 0.1,  # 0.02 hides mistakes
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **scales,
        **changes,
    }
    torch.manual_seed(0)
    model = MiniMaxForCausalLM(MiniMaxConfig(**values))
    with torch.no_grad():  # norms that are all one would hide a lost weight
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight += 0.2 * torch.randn_like(weight)
    return model.eval()


def rotate_part_of_each_head(model: Any) -> Any:
    """The model with RoPE on the first `rotary_dim` dims of each head only, in place."""
    config = model.config
    D, R = config.head_dim, config.rotary_dim
    order = torch.empty(D, dtype=torch.long)  # new dim <- old dim
    half = R // 2
    order[:half] = torch.arange(half)
    order[D // 2 : D // 2 + half] = torch.arange(half, R)
    rest = [d for d in range(D) if not (d < half or D // 2 <= d < D // 2 + half)]
    order[rest] = torch.arange(R, D)
    with torch.no_grad():
        for layer in model.model.layers:
            if layer.block_type == SOFTMAX:
                for proj in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                    rows = proj.weight.view(-1, D, proj.weight.shape[1])
                    rows.copy_(rows[:, order].clone())
    base = config.rope_parameters["rope_theta"]
    frequencies = base ** -(torch.arange(0, R, 2, dtype=torch.float) / R)
    model.model.rotary_emb.inv_freq = torch.cat([frequencies, torch.zeros(D // 2 - half)])
    return model


def mended_cache() -> Any:
    """transformers' cache with its length from the layers that hold keys, and states reordered."""
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    class Mended(MiniMaxCache):
        def get_seq_length(self, layer_idx: int = 0) -> int:
            layers: list[Any] = self.layers
            return max([layer.get_seq_length() for layer in layers], default=0)

        def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
            return self.get_seq_length() + query_length, 0

        def reorder_cache(self, beam_idx: Any) -> None:
            super().reorder_cache(beam_idx)
            self.linear_cache = [s[beam_idx] if len(s) else s for s in self.linear_cache]

    return Mended()


@contextmanager
def recorded(
    layers: list[nn.Module], routers: list[nn.Module]
) -> Iterator[dict[str, list[Tensor]]]:
    """What each layer and each router returns while inside, tokens first: [T, ...]."""
    seen: dict[str, list[Tensor]] = {"layers": [], "routers": []}

    def keep(key: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            tensor = out[0] if isinstance(out, tuple) else out
            seen[key].append(tensor.detach().reshape(-1, tensor.shape[-1]))

        return hook

    handles = [m.register_forward_hook(keep("layers")) for m in layers]
    handles += [m.register_forward_hook(keep("routers")) for m in routers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
