"""Names and shapes of published tensors, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import sferic
from sferic.checkpoint import LAYOUTS, Layout, convert
from sferic.checkpoint.layouts import shapes
from sferic.checkpoint.published import from_published, to_published
from sferic.config import BranchScale, ConfigError, DenseFFN, ModelConfig, load_model
from sferic.nn import HybridModel

MakeModel = Callable[..., HybridModel]


def text_01_names() -> dict[str, list[int]]:
    """MiniMax-Text-01's tensors, written down from its file index."""
    D, F = 6144, 9216
    names = {
        "model.embed_tokens.weight": [200064, D],
        "model.norm.weight": [D],
        "lm_head.weight": [200064, D],
    }
    for i in range(80):
        layer = f"model.layers.{i}"
        names[f"{layer}.input_layernorm.weight"] = [D]
        names[f"{layer}.post_attention_layernorm.weight"] = [D]
        if i % 8 == 7:
            names[f"{layer}.self_attn.q_proj.weight"] = [8192, D]
            names[f"{layer}.self_attn.k_proj.weight"] = [1024, D]
            names[f"{layer}.self_attn.v_proj.weight"] = [1024, D]
            names[f"{layer}.self_attn.o_proj.weight"] = [D, 8192]
        else:
            names[f"{layer}.self_attn.qkv_proj.weight"] = [24576, D]
            names[f"{layer}.self_attn.output_gate.weight"] = [8192, D]
            names[f"{layer}.self_attn.norm.weight"] = [8192]
            names[f"{layer}.self_attn.out_proj.weight"] = [D, 8192]
        names[f"{layer}.block_sparse_moe.gate.weight"] = [32, D]
        for e in range(32):
            expert = f"{layer}.block_sparse_moe.experts.{e}"
            names[f"{expert}.w1.weight"] = names[f"{expert}.w3.weight"] = [F, D]
            names[f"{expert}.w2.weight"] = [D, F]
    return names


def test_text_01_has_the_published_names_and_shapes() -> None:
    found = shapes(load_model("text-01"), "minimax")
    assert len(found) == 8243
    assert found == text_01_names()


def test_the_fused_form_is_that_of_transformers() -> None:
    """Names and shapes of transformers' own model, without memory."""
    from transformers import MiniMaxConfig, MiniMaxForCausalLM

    config = load_model("text-01")
    data = to_published(config, "transformers", "bfloat16", {})
    with torch.device("meta"):
        theirs = MiniMaxForCausalLM(MiniMaxConfig(**data))
    expected = {name: list(p.shape) for name, p in theirs.named_parameters()}
    assert shapes(config, "transformers") == expected


def published_text_01() -> dict[str, Any]:
    """The fields of MiniMax-Text-01's config.json that describe it."""
    scale = (2 * 80) ** 0.25
    return {
        "architectures": ["MiniMaxText01ForCausalLM"],
        "attention_dropout": 0.0,
        "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10,
        "auto_map": {"AutoConfig": "configuration_minimax_text_01.MiniMaxText01Config"},
        "bos_token_id": None,
        "eos_token_id": None,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 6144,
        "initializer_range": 0.02,
        "intermediate_size": 9216,
        "layernorm_full_attention_alpha": scale,
        "layernorm_full_attention_beta": 1.0,
        "layernorm_linear_attention_alpha": scale,
        "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_alpha": scale,
        "layernorm_mlp_beta": 1.0,
        "max_position_embeddings": 10240000,
        "model_type": "minimax_text_01",
        "num_attention_heads": 64,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 80,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "postnorm": True,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000000,
        "rotary_dim": 64,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "shared_intermediate_size": 0,
        "shared_moe_mode": "sigmoid",
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 200064,
    }


def hf_text_01() -> dict[str, Any]:
    """The same in transformers' schema, with the older fields that `-hf` files still carry."""
    data = published_text_01()
    for ours, theirs in (("full_attention", "full_attn"), ("linear_attention", "linear_attn")):
        data[f"{theirs}_alpha_factor"] = data.pop(f"layernorm_{ours}_alpha")
        data[f"{theirs}_beta_factor"] = data.pop(f"layernorm_{ours}_beta")
    data["mlp_alpha_factor"] = data.pop("layernorm_mlp_alpha")
    data["mlp_beta_factor"] = data.pop("layernorm_mlp_beta")
    kinds = ["linear_attention", "full_attention"]
    data["layer_types"] = [kinds[x] for x in data.pop("attn_type_list")]
    return {**data, "architectures": ["MiniMaxForCausalLM"], "model_type": "minimax"}


M1 = {"architectures": ["MiniMaxM1ForCausalLM"], "model_type": "minimax_m1"}
VL_LIKE = {"shared_intermediate_size": [0]}


@pytest.mark.parametrize(
    "data",
    [
        published_text_01(),
        published_text_01() | M1,
        published_text_01() | VL_LIKE,
        hf_text_01(),
    ],
    ids=["text-01", "m1", "list", "hf"],
)
def test_both_schemas_give_our_preset(data: dict[str, Any]) -> None:
    preset = load_model("text-01")
    assert preset.ffn.kind == "moe"
    # what only training uses is in no published file
    untold = {name: getattr(preset.ffn, name) for name in ("aux_coef", "aux_norm")}
    config = from_published(data, "config.json")
    ffn = config.ffn.model_copy(update=untold)
    assert config.model_copy(update={"ffn": ffn}) == preset


@pytest.mark.parametrize("layout", ["minimax", "transformers"])
@pytest.mark.parametrize("name", ["text-01", "demo", "tiny"])
def test_a_config_goes_out_and_comes_back(name: str, layout: Layout) -> None:
    config = load_model(name)
    data = to_published(config, layout, "bfloat16", {})
    assert from_published(json.loads(json.dumps(data)), "config.json") == config


def test_what_does_not_describe_the_architecture_is_taken_over() -> None:
    old = {"eos_token_id": 7, "max_position_embeddings": 99, "auto_map": {"AutoModel": "x.y"}}
    data = to_published(load_model("tiny"), "minimax", "float32", old)
    assert data["eos_token_id"] == 7
    assert data["max_position_embeddings"] == 99
    assert "auto_map" not in data


ALPHAS = [n for n in published_text_01() if n.endswith("_alpha")]
HF_ALPHAS = [n for n in hf_text_01() if n.endswith("_alpha_factor")]
NUMBERS = ["rotary_dim", "rope_theta", "attn_type_list", "rms_norm_eps", "head_dim", "vocab_size"]


@pytest.mark.parametrize("name", [*ALPHAS, *NUMBERS, "postnorm"])
def test_a_missing_field_is_named(name: str) -> None:
    data = published_text_01()
    del data[name]
    with pytest.raises(ConfigError, match=f"{name}: missing"):
        from_published(data, "config.json")


@pytest.mark.parametrize("name", [*HF_ALPHAS, "rotary_dim", "rope_theta"])
def test_a_missing_field_of_the_other_schema_is_named(name: str) -> None:
    data = hf_text_01()
    del data[name]
    with pytest.raises(ConfigError, match=f"{name}: missing"):
        from_published(data, "config.json")


def test_all_problems_are_listed_at_once() -> None:
    data = published_text_01() | {"hidden_act": "gelu", "sliding_window": 4096}
    del data["layernorm_mlp_alpha"], data["rotary_dim"]
    with pytest.raises(ConfigError) as error:
        from_published(data, "some/config.json")
    for part in ("some/config.json", "hidden_act = 'gelu'", "4096", "mlp_alpha", "rotary_dim"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM.* is none of MiniMaxText01"),
        ({"architectures": ["MiniMaxVL01ForConditionalGeneration"]}, "MiniMaxVL01"),
        ({"architectures": None, "model_type": "llama"}, "llama"),
        ({"attn_type_list": [0, 2] * 40}, "attn_type_list holds 2"),
        ({"attn_type_list": [0, 1]}, "2 entries for 80 layers"),
        ({"attn_type_list": 0}, "attn_type_list holds 0"),
        ({"shared_intermediate_size": 4}, "shared_intermediate_size = 4"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True"),
        ({"quantization_config": {"bits": 8}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling"),
        ({"hidden_size": "wide"}, "hidden_size = 'wide'"),
        ({"num_experts_per_tok": 33}, "top_k 33"),
        ({"sferic": {"init_gain": -1}}, "init_gain = -1"),
        ({"sferic": {"num_layers": 3}}, "may hold init_gain"),
        ({"sferic": 3}, "sferic = 3"),
        ({"rope_parameters": [1]}, "must be a table"),
        ({"rope_parameters": {"type": "yarn"}}, "yarn"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "only plain RoPE"),
        ({"postnorm": "false"}, "postnorm = 'false'"),
        ({"num_experts_per_tok": True}, "num_experts_per_tok = True"),
        ({"num_local_experts": 10**9}, "num_local_experts = 1000000000"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"architectures": 5}, "architectures = 5"),
        ({"architectures": [["x"]]}, "architectures"),
        ({"architectures": ["MiniMaxM2ForCausalLM", "MiniMaxForCausalLM"]}, "MiniMaxM2"),
    ],
)
def test_another_architecture_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_published(published_text_01() | changes, "config.json")


def test_other_decays_are_not_passed_off_as_ours() -> None:
    """transformers computes other slopes than MiniMax where heads are no power of two."""
    with pytest.raises(ConfigError, match="48 heads"):
        from_published(hf_text_01() | {"num_attention_heads": 48}, "config.json")
    assert from_published(published_text_01() | {"num_attention_heads": 48}, "x").num_heads == 48


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ffn": DenseFFN(kind="dense", size=16)}, "dense"),
        ({"depth": 9, "first_layer": 2}, "layers 2 to 5 of 9"),
        ({"mixer_norm_eps": 1e-5}, "mixer_norm_eps = 1e-05"),
        ({"num_heads": 6, "num_kv_heads": 3}, "6 heads"),
        ({"norm": "pre"}, "norm = 'pre'"),
    ],
)
def test_what_a_schema_can_not_say_is_not_written(
    make_config: Callable[..., ModelConfig], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    model = HybridModel(make_config(**changes)).init_weights(0)
    with pytest.raises(ConfigError, match=message):
        sferic.save(model, tmp_path / "model", layout="transformers")
    assert list(tmp_path.iterdir()) == []
    sferic.save(model, tmp_path / "model")


def equal(a: Any, b: Any) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(
        left[n].dtype == right[n].dtype and torch.equal(left[n], right[n]) for n in left
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard_bytes", [2_000, 10**9])
def test_each_layout_gives_the_same_bits_back(
    make_model: MakeModel, tmp_path: Path, layout: Layout, dtype: torch.dtype, shard_bytes: int
) -> None:
    scales = {"branch_scale": BranchScale(lightning=0.9, softmax=1.1, ffn=0.7)}
    model = make_model(make_model().config.model_copy(update=scales), dtype=dtype)
    folder = tmp_path / "model"
    sferic.save(model, folder, layout=layout, shard_bytes=shard_bytes)
    files = sorted(p.name for p in folder.glob("*.safetensors"))
    if shard_bytes > 10**6:
        assert files == ["model.safetensors"]
    else:
        assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        assert index["metadata"]["total_size"] == size
        assert index["weight_map"].keys() == shapes(model.config, layout).keys()
    loaded = sferic.load(folder)
    assert loaded.config.branch_scale == model.config.branch_scale
    assert equal(loaded, model)


def test_conversion_in_a_circle_gives_the_same_bits_back(published: Path, tmp_path: Path) -> None:
    """What transformers saved, through every layout."""
    at = published
    for i, layout in enumerate(["sferic", "transformers", "minimax", "sferic"]):
        to = tmp_path / f"{i}-{layout}"
        convert(at, to, layout=layout, shard_bytes=300_000)  # type: ignore[arg-type]
        at = to
    assert equal(sferic.load(at), sferic.load(published))
    first, last = load_all(published), load_all(tmp_path / "2-minimax")
    for name in last:
        assert torch.equal(first[name], last[name])
    assert all("decay" in name or "slope" in name for name in first.keys() - last.keys())


def load_all(folder: Path) -> dict[str, Tensor]:
    return {n: t for f in folder.glob("*.safetensors") for n, t in load_file(f).items()}


def test_conversion_can_change_the_dtype(published: Path, tmp_path: Path) -> None:
    convert(published, tmp_path / "low", layout="minimax", dtype=torch.bfloat16)
    assert equal(sferic.load(tmp_path / "low"), sferic.load(published, dtype=torch.bfloat16))


def test_what_float16_can_not_hold_is_refused(published: Path, tmp_path: Path) -> None:
    model = sferic.load(published)
    model.norm.weight[3] = 1e6
    sferic.save(model, tmp_path / "model")
    with pytest.raises(ValueError, match=r"norm\.weight has values beyond float16"):
        sferic.load(tmp_path / "model", dtype=torch.float16)
    with pytest.raises(ValueError, match="use bfloat16"):
        convert(tmp_path / "model", tmp_path / "out", layout="minimax", dtype=torch.float16)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_published_misfits_are_listed_by_published_names(published: Path, tmp_path: Path) -> None:
    weights = load_all(published)
    gone = "model.layers.3.block_sparse_moe.experts.2.w3.weight"
    del weights[gone]
    weights["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(3)
    weights["model.norm.weight"] = torch.zeros(47)
    weights["lm_head.weight"] = torch.zeros(128, 48, dtype=torch.int8)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((published / "config.json").read_text())
    with pytest.raises(ValueError, match="does not fit its config") as error:
        sferic.load(tmp_path)
    for part in (
        f"missing {gone}",
        "unexpected model.layers.0.self_attn.q_proj.weight",
        "model.norm.weight is [47] where the config needs [48]",
        "lm_head.weight is I8",
    ):
        assert part in str(error.value)


def test_a_pickle_is_never_opened(published: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((published / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin, a pickle.*safetensors"):
        sferic.load(tmp_path)


def test_a_missing_file_of_the_index_is_named(published: Path, tmp_path: Path) -> None:
    convert(published, tmp_path / "model", layout="minimax", shard_bytes=300_000)
    gone = sorted((tmp_path / "model").glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ValueError, match=gone.name):
        sferic.load(tmp_path / "model")


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../b.safetensors"}}']
)
def test_a_damaged_index_is_named(published: Path, tmp_path: Path, content: str) -> None:
    convert(published, tmp_path / "model", layout="minimax", shard_bytes=300_000)
    (tmp_path / "model" / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"index\.json is not a readable index"):
        sferic.load(tmp_path / "model")


def test_only_what_sferic_wrote_is_replaced(published: Path, tmp_path: Path) -> None:
    convert(published, tmp_path / "model", layout="minimax")
    (tmp_path / "model" / "tokenizer.json").write_text("kept")
    sferic.save(sferic.load(published), tmp_path / "model", layout="transformers")
    assert (tmp_path / "model" / "tokenizer.json").read_text() == "kept"
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text((published / "config.json").read_text())
    with pytest.raises(ValueError, match="is not a model that Sferic wrote"):
        sferic.save(sferic.load(published), foreign, layout="minimax")
    assert [p.name for p in foreign.iterdir()] == ["config.json"]
    for target in (tmp_path / "model", published):
        with pytest.raises(ValueError, match="is there already"):
            convert(published, target, layout="sferic")


def test_weights_that_are_there_twice_are_refused(published: Path, tmp_path: Path) -> None:
    """transformers would take the single file, others the index."""
    convert(published, tmp_path / "model", layout="minimax", shard_bytes=300_000)
    save_file({"a": torch.zeros(1)}, tmp_path / "model" / "model.safetensors")
    with pytest.raises(ValueError, match="has weights twice"):
        sferic.load(tmp_path / "model")


def test_an_end_id_that_only_the_config_names_comes_along(published: Path, tmp_path: Path) -> None:
    shutil.copytree(published, tmp_path / "in")
    config = json.loads((published / "config.json").read_text()) | {"eos_token_id": 7}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    (tmp_path / "in" / "generation_config.json").unlink()
    convert(tmp_path / "in", tmp_path / "out", layout="sferic")
    ids = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert ids == {"eos_token_id": 7}


def test_wrong_arguments_are_named(published: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'gguf' is none of sferic, minimax, transformers"):
        convert(published, tmp_path / "x", layout="gguf")  # type: ignore[arg-type]
    for dtype in ("bfloat16", torch.int8, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match="dtype is"):
            sferic.load(published, dtype=dtype)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shard_bytes is 0"):
        convert(published, tmp_path / "x", layout="minimax", shard_bytes=0)
    assert list(tmp_path.iterdir()) == []
