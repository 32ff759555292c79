"""Names of weights in each layout, and where each published tensor lies in ours.

A published tensor is a view of one of our tensors.  So one table serves both ways: reading copies
into the view, writing copies the view out.

    sferic         our own names, as in `model.state_dict()`
    minimax        MiniMax's files, and transformers' saved form: one tensor per expert matrix
    transformers   transformers' form in memory: an expert layer's matrices fused
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sferic.config import ModelConfig
from sferic.nn import HybridModel

Layout = Literal["sferic", "minimax", "transformers"]
LAYOUTS: tuple[Layout, ...] = ("sferic", "minimax", "transformers")

# transformers saves these tables with the weights; they follow from the config
_DERIVED = ("slope_rate", "query_decay", "key_decay", "diagonal_decay", "rotary_emb.inv_freq")

_MODEL = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_BLOCK = {
    "mixer_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_MIXER = {
    "lightning": {
        "mixer.qkv_proj.weight": "self_attn.qkv_proj.weight",
        "mixer.gate_proj.weight": "self_attn.output_gate.weight",
        "mixer.norm.weight": "self_attn.norm.weight",
        "mixer.out_proj.weight": "self_attn.out_proj.weight",
    },
    "softmax": {
        "mixer.q_proj.weight": "self_attn.q_proj.weight",
        "mixer.k_proj.weight": "self_attn.k_proj.weight",
        "mixer.v_proj.weight": "self_attn.v_proj.weight",
        "mixer.out_proj.weight": "self_attn.o_proj.weight",
    },
}


_STRIP = 32  # rows; a cache line of bf16: seven times the speed of one piece


class Place(NamedTuple):
    """Where a published tensor lies: `view` of our tensor `ours` has its shape."""

    ours: str
    view: Callable[[Tensor], Tensor]


def own_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Our tensors of a model, without memory (on the meta device)."""
    with torch.device("meta"):
        return HybridModel(config).state_dict()


def places(config: ModelConfig, layout: Layout) -> dict[str, Place]:
    """Every tensor name of a layout, in the order of our tensors."""
    if layout == "sferic":
        return {name: Place(name, _whole) for name in own_tensors(config)}
    return dict(_published(config, layout))


def shapes(config: ModelConfig, layout: Layout) -> dict[str, list[int]]:
    """Shape of every tensor of a layout."""
    ours = own_tensors(config)
    return {
        name: list(place.view(ours[place.ours]).shape)
        for name, place in places(config, layout).items()
    }


def copy(into: Tensor, source: Tensor) -> Tensor:
    """`into.copy_(source)` where one of them is a transposed view, as a `Place` gives it.

    In strips, since on a CPU the library walks such a pair of matrices across the cache's lines.
    """
    if into.device.type != "cpu" or (into.is_contiguous() and source.is_contiguous()):
        return into.copy_(source)
    if into.dim() > 2:
        for a, b in zip(into, source, strict=True):
            copy(a, b)
    else:
        for i in range(0, len(into), _STRIP):
            into[i : i + _STRIP].copy_(source[i : i + _STRIP])
    return into


def layout_of(names: Iterable[str]) -> Layout:
    """The published layout that tensor names belong to."""
    return "transformers" if any(".mlp." in name for name in names) else "minimax"


def is_derived(name: str) -> bool:
    """Whether a published tensor is a table that follows from the config."""
    return name.endswith(_DERIVED)


def _published(config: ModelConfig, layout: Layout) -> Iterator[tuple[str, Place]]:
    assert config.ffn.kind == "moe"
    for ours, name in _MODEL.items():
        yield name, Place(ours, _whole)
    experts = _fused_experts() if layout == "transformers" else _experts(config.ffn.num_experts)
    ffn = dict(experts)
    ffn_name = "mlp" if layout == "transformers" else "block_sparse_moe"
    for i, mixer in enumerate(config.mixers):
        for ours, name in (_BLOCK | _MIXER[mixer]).items():
            yield f"model.layers.{i}.{name}", Place(f"layers.{i}.{ours}", _whole)
        router = Place(f"layers.{i}.ffn.router.weight", _whole)
        yield f"model.layers.{i}.{ffn_name}.gate.weight", router
        for name, place in ffn.items():
            ours = f"layers.{i}.ffn.{place.ours}"
            yield f"model.layers.{i}.{ffn_name}.experts.{name}", Place(ours, place.view)


def _experts(num_experts: int) -> Iterator[tuple[str, Place]]:
    for e in range(num_experts):
        yield f"{e}.w1.weight", Place("w13", partial(_gate_or_up, expert=e, which=0))
        yield f"{e}.w3.weight", Place("w13", partial(_gate_or_up, expert=e, which=1))
    for e in range(num_experts):
        yield f"{e}.w2.weight", Place("w2", partial(_down, expert=e))


def _fused_experts() -> Iterator[tuple[str, Place]]:
    yield "gate_up_proj", Place("w13", _fused_gate_up)
    yield "down_proj", Place("w2", _fused_down)


def _whole(w: Tensor) -> Tensor:
    return w


def _gate_or_up(w13: Tensor, expert: int, which: int) -> Tensor:
    return w13[expert, :, which].T  # [E, D, 2, F] -> [F, D]


def _down(w2: Tensor, expert: int) -> Tensor:
    return w2[expert].T  # [E, F, D] -> [D, F]


def _fused_gate_up(w13: Tensor) -> Tensor:
    return w13.flatten(2).transpose(1, 2)  # [E, D, 2, F] -> [E, 2F, D]: rows of w1, then of w3


def _fused_down(w2: Tensor) -> Tensor:
    return w2.transpose(1, 2)  # [E, F, D] -> [E, D, F]
