"""What a model config allows, and the numbers it derives."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sferic.config import (
    BranchScale,
    ConfigError,
    DenseFFN,
    ModelConfig,
    MoEFFN,
    build,
    load_model,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 24,
    "num_layers": 8,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "ffn": {"kind": "dense", "size": 32},
}
MOE = {"kind": "moe", "size": 8, "num_experts": 4, "top_k": 2}


def model(**changes: Any) -> ModelConfig:
    return build(ModelConfig, SHAPE | changes, "test")


def test_defaults() -> None:
    config = model()
    assert config.layer_pattern == ("lightning",) * 7 + ("softmax",)
    assert config.rope_dim == 4
    assert config.rope_base == 10_000.0
    assert (config.norm, config.norm_eps, config.mixer_norm_eps) == ("post", 1e-5, 1e-6)
    assert (config.depth, config.first_layer) == (8, 0)
    assert config.branch_scale == BranchScale.uniform(1.0)
    assert config.ffn == DenseFFN(kind="dense", size=32)


def test_moe_defaults() -> None:
    ffn = model(ffn=MOE).ffn
    assert isinstance(ffn, MoEFFN)
    assert (ffn.capacity_factor, ffn.aux_coef, ffn.aux_norm) == (None, 0.01, "switch")


def test_deepnorm_scales_follow_the_depth_of_the_whole_model() -> None:
    config = model(depth=80, first_layer=72)
    assert config.residual_scale == BranchScale.uniform(3.5565588200778455)
    assert config.init_gain == 640**-0.25


def test_pre_norm_scales_nothing() -> None:
    config = model(norm="pre", depth=80)
    assert config.residual_scale == BranchScale.uniform(1.0)
    assert config.init_gain == 1.0


def test_given_numbers_beat_derived_ones() -> None:
    scale = {"lightning": 2.0, "softmax": 3.0, "ffn": 4.0}
    config = model(residual_scale=scale, init_gain=0.5, rope_dim=8)
    assert config.residual_scale == BranchScale(lightning=2.0, softmax=3.0, ffn=4.0)
    assert (config.init_gain, config.rope_dim) == (0.5, 8)


def test_mixers_repeat_the_pattern() -> None:
    config = model(num_layers=9)
    assert config.mixers == ("lightning",) * 7 + ("softmax", "lightning")
    assert (config.num_lightning, config.num_softmax) == (8, 1)


@given(
    pattern=st.lists(st.sampled_from(["lightning", "softmax"]), min_size=1, max_size=5),
    depth=st.integers(1, 20),
    data=st.data(),
)
def test_a_slice_has_the_mixers_of_the_whole_model(
    pattern: list[str], depth: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, depth - 1))
    count = data.draw(st.integers(1, depth - first))
    whole = model(num_layers=depth, layer_pattern=pattern)
    part = model(num_layers=count, depth=depth, first_layer=first, layer_pattern=pattern)
    assert part.mixers == whole.mixers[first : first + count]
    assert part.num_lightning + part.num_softmax == count
    assert (part.residual_scale, part.init_gain) == (whole.residual_scale, whole.init_gain)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads 3 must divide num_heads 4"),
        ({"rope_dim": 3}, "rope_dim 3 must be even and at most head_dim 8"),
        ({"rope_dim": 10}, "rope_dim 10 must be even and at most head_dim 8"),
        ({"ffn": MOE | {"top_k": 5}}, "ffn: top_k 5 is more than num_experts 4; use at most 4"),
        ({"first_layer": 1}, "first_layer 1 + num_layers 8 is more than depth 8"),
        ({"depth": 7}, "first_layer 0 + num_layers 8 is more than depth 7"),
        ({"ffn": MOE | {"capacity_factor": 0}}, "ffn.capacity_factor = 0: must be greater than 0"),
        ({"ffn": MOE | {"aux_norm": "x"}}, "ffn.aux_norm = 'x': must be 'paper' or 'switch'"),
        ({"layer_pattern": []}, "layer_pattern = []: must hold at least one element"),
        ({"layer_pattern": ["mamba"]}, "layer_pattern.0 = 'mamba': must be 'lightning' or"),
        ({"norm": "sandwich"}, "norm = 'sandwich': must be 'post' or 'pre'"),
        ({"residual_scale": {"ffn": 1.0, "softmax": 1.0}}, "residual_scale.lightning: missing"),
        ({"first_layer": -1}, "first_layer = -1: must be greater than or equal to 0"),
    ],
)
def test_rules(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        model(**changes)
    assert f"  {message}" in str(error.value)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_residual_scale_is_finite_and_positive(value: float) -> None:
    with pytest.raises(ConfigError, match=r"residual_scale\.ffn = "):
        model(residual_scale={"lightning": 1.0, "softmax": 1.0, "ffn": value})


@pytest.mark.parametrize("field", [key for key in SHAPE if key != "ffn"])
def test_shapes_are_positive(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} = 0: must be greater than 0"):
        model(**{field: 0})


def test_text_01_is_the_released_model() -> None:
    config = load_model("text-01")
    assert config.residual_scale == BranchScale.uniform(3.5565588200778455)
    assert (config.rope_base, config.rope_dim) == (1e7, 64)
    assert [i for i, kind in enumerate(config.mixers) if kind == "softmax"] == [*range(7, 80, 8)]


def test_slice8_is_the_last_period_of_text_01() -> None:
    whole, part = load_model("text-01"), load_model("text-01-slice8")
    assert part.mixers == whole.mixers[72:]
    assert part == whole.model_copy(update={"num_layers": 8, "first_layer": 72})
