"""Initialisation, decays and sizes."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sferic.config import DenseFFN, ModelConfig, MoEFFN, load_model, model_names, sizes
from sferic.nn import HybridModel

MakeConfig = Callable[..., ModelConfig]
MakeModel = Callable[..., HybridModel]

D, H, G, K, F, E, VOCAB = 96, 8, 4, 24, 64, 16, 500
WIDE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": D,
    "num_heads": H,
    "num_kv_heads": G,
    "head_dim": K,
    "num_layers": 2,
    "layer_pattern": ("lightning", "softmax"),
}
MOE = MoEFFN(kind="moe", size=F, num_experts=E, top_k=2)
DENSE = DenseFFN(kind="dense", size=F)


@pytest.mark.parametrize("ffn", [MOE, DENSE], ids=["moe", "dense"])
@pytest.mark.parametrize(("norm", "depth"), [("post", 2), ("post", 80), ("pre", 2)])
def test_standard_deviation_of_each_matrix(
    norm: str, depth: int, ffn: MoEFFN | DenseFFN, make_config: MakeConfig
) -> None:
    config = make_config(**WIDE, norm=norm, depth=depth, ffn=ffn)
    weights = HybridModel(config).init_weights(0).state_dict()
    gain = (8 * depth) ** -0.25 if norm == "post" else 1.0

    def xavier(inputs: int, outputs: int) -> float:
        return math.sqrt(2 / (inputs + outputs))

    qkv = weights.pop("layers.0.mixer.qkv_proj.weight").view(H, 3, K, D)
    weights |= {f"layers.0.{name}": qkv[:, i] for i, name in enumerate("qkv")}
    want = {
        "embed_tokens.weight": xavier(VOCAB, D),
        "lm_head.weight": xavier(D, VOCAB),
        "layers.0.q": xavier(D, H * K),
        "layers.0.k": xavier(D, H * K),
        "layers.0.v": gain * xavier(D, H * K),
        "layers.0.mixer.gate_proj.weight": xavier(D, H * K),
        "layers.0.mixer.out_proj.weight": gain * xavier(H * K, D),
        "layers.1.mixer.q_proj.weight": xavier(D, H * K),
        "layers.1.mixer.k_proj.weight": xavier(D, G * K),
        "layers.1.mixer.v_proj.weight": gain * xavier(D, G * K),
        "layers.1.mixer.out_proj.weight": gain * xavier(H * K, D),
    }
    for layer in range(2):
        names = ("w13", "w2") if ffn is MOE else ("w1.weight", "w3.weight", "w2.weight")
        for name in names:
            want[f"layers.{layer}.ffn.{name}"] = gain * xavier(D, F)
        if ffn is MOE:
            want[f"layers.{layer}.ffn.router.weight"] = xavier(D, E)
    for name, weight in weights.items():
        if "norm" in name:
            assert torch.equal(weight, torch.ones_like(weight)), name
            continue
        spread = 5 / math.sqrt(2 * weight.numel())  # five standard errors
        assert float(weight.std()) == pytest.approx(want.pop(name), rel=spread), name
        assert abs(float(weight.mean())) < 5 * float(weight.std()) / math.sqrt(weight.numel()), name
    assert not want


def test_every_weight_is_filled_and_follows_the_seed(make_config: MakeConfig) -> None:
    config = make_config()
    first, same, other = (HybridModel(config).init_weights(n).state_dict() for n in (3, 3, 4))
    seen = set()
    for name, weight in first.items():
        assert weight.isfinite().all(), name
        assert torch.equal(weight, same[name]), name
        if "norm" not in name:
            assert not torch.equal(weight, other[name]), name
            seen.add(weight.flatten()[0].item())
    assert len(seen) == sum("norm" not in name for name in first)  # no two start alike


def test_experts_differ(make_config: MakeConfig) -> None:
    w13 = HybridModel(make_config()).init_weights(0).state_dict()["layers.0.ffn.w13"]
    assert not torch.equal(w13[0], w13[1])
    assert not torch.equal(w13[0, :, 0], w13[0, :, 1])


def all_slopes(model: HybridModel) -> dict[int, Tensor]:
    """By absolute layer."""
    first = model.config.first_layer
    return {
        first + i: block.mixer.slopes  # type: ignore[union-attr]
        for i, block in enumerate(model.layers.values())
        if hasattr(block.mixer, "slopes")
    }


def test_a_slice_has_the_decays_of_the_whole_model(make_config: MakeConfig) -> None:
    pattern = ("lightning",) * 7 + ("softmax",)
    whole = all_slopes(HybridModel(make_config(num_layers=80, layer_pattern=pattern)))
    part = all_slopes(
        HybridModel(make_config(num_layers=8, depth=80, first_layer=72, layer_pattern=pattern))
    )
    assert list(part) == list(range(72, 79))
    assert len(whole) == 70
    for layer, slopes in part.items():
        assert torch.equal(slopes, whole[layer])
        want = [2 ** (-2 * h) * (1 - layer / 79 + 1e-5) for h in range(1, 5)]
        torch.testing.assert_close(slopes, torch.tensor(want, dtype=torch.float64))


def test_decays_stay_exact_in_any_dtype(make_config: MakeConfig) -> None:
    with torch.device("meta"):
        made_on_meta = HybridModel(make_config())
    for model in (
        HybridModel(make_config()).to(torch.bfloat16),
        HybridModel(make_config()).half().float(),
        made_on_meta.to_empty(device="cpu"),
    ):
        for layer, slopes in all_slopes(model).items():
            want = [2 ** (-2 * h) * (1 - layer / 3 + 1e-5) for h in range(1, 5)]
            assert slopes.dtype == torch.float64
            assert slopes.device.type == "cpu"
            torch.testing.assert_close(slopes, torch.tensor(want, dtype=torch.float64))


def test_decays_are_no_weights(make_config: MakeConfig) -> None:
    assert not any("slope" in name for name in HybridModel(make_config()).state_dict())


@pytest.mark.parametrize("name", model_names())
def test_presets_have_as_many_parameters_as_counted(name: str) -> None:
    config = load_model(name)
    with torch.device("meta"):
        model = HybridModel(config)
    assert sum(p.numel() for p in model.parameters()) == sizes(config)["total_params"]
    assert all(p.requires_grad for p in model.parameters())


def test_weights_have_the_layout_of_the_contract(make_config: MakeConfig) -> None:
    shapes = {n: tuple(w.shape) for n, w in HybridModel(make_config()).state_dict().items()}
    assert shapes["layers.0.ffn.w13"] == (4, 24, 2, 16)
    assert shapes["layers.0.ffn.w2"] == (4, 16, 24)
    assert shapes["layers.0.mixer.qkv_proj.weight"] == (4 * 3 * 8, 24)
    assert shapes["layers.0.mixer.norm.weight"] == (32,)
    assert shapes["layers.1.mixer.k_proj.weight"] == (16, 24)


def test_a_part_of_a_model_begins_as_the_whole_does(make_config: MakeConfig) -> None:
    """A weight's numbers depend on the seed and its name, not on what else is drawn."""
    whole = HybridModel(make_config()).init_weights(3).state_dict()
    part = HybridModel(make_config())
    del part.layers["0"]
    for name, weight in part.init_weights(3).state_dict().items():
        assert torch.equal(weight, whole[name]), name
