"""`config.json` of published checkpoints: MiniMax's schema and transformers' one, both ways.

MiniMax's serves Text-01 and M1 (`attn_type_list`, `layernorm_*_alpha`), transformers' one the `-hf`
files (`layer_types`, `*_alpha_factor`).  A field that every implementation would guess another
value for (residual scales, `rotary_dim`) has no default here: an absent one is an error.  Absent
branch scales are 1, which all agree on.
"""

from collections.abc import Sequence
from typing import Any

from sferic.checkpoint.layouts import Layout
from sferic.config import ConfigError, ModelConfig, MoEFFN, build

Table = dict[str, Any]

ARCHITECTURES = {
    "MiniMaxText01ForCausalLM": "minimax",
    "MiniMaxM1ForCausalLM": "minimax",
    "MiniMaxForCausalLM": "transformers",
}
MODEL_TYPES = {
    "minimax_text_01": "minimax",
    "minimax_m1": "minimax",
    "minimax": "transformers",
}
# the norm on lightning attention's output: neither schema names its epsilon, both codes have this
MIXER_NORM_EPS = 1e-6
# what neither schema can say of a model stands under a key of its own, which also tells our files
OWN_KEY = "sferic"
_OWN, _OWN_FFN = ("init_gain",), ("capacity_factor", "aux_coef", "aux_norm")

_COMMON = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rotary_dim": "rope_dim",
    "rms_norm_eps": "norm_eps",
}
_FFN = {
    "intermediate_size": "size",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "top_k",
}
_SCALES = {
    "minimax": {
        "lightning": "layernorm_linear_attention_{}",
        "softmax": "layernorm_full_attention_{}",
        "ffn": "layernorm_mlp_{}",
    },
    "transformers": {
        "lightning": "linear_attn_{}_factor",
        "softmax": "full_attn_{}_factor",
        "ffn": "mlp_{}_factor",
    },
}
_LAYERS = {
    "minimax": ("attn_type_list", {0: "lightning", 1: "softmax"}),
    "transformers": (
        "layer_types",
        {"linear_attention": "lightning", "full_attention": "softmax"},
    ),
}
# fields of the published schemas with the only values that mean this architecture
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "tie_word_embeddings": (False,),
    "sliding_window": (None,),
    "shared_intermediate_size": (0, [0]),
    "rope_scaling": (None,),
    "attention_dropout": (0,),
    "quantization_config": (None,),
    "final_logit_softcapping": (None,),
    "n_shared_experts": (None, 0),
    "postnorm": (True, False),
    "routed_scaling_factor": (None, 1),
    "scoring_func": (None, "softmax"),
}
# no model has more; a damaged file may, and would be taken for work without end
_MOST = {"vocab_size": 2**31, "num_hidden_layers": 2**12, "num_local_experts": 2**12}
_MOST_OF_ALL = 2**20

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_CARRIED = ("max_position_embeddings", "router_aux_loss_coef")


def from_published(data: Table, source: str) -> ModelConfig:
    """The config of a published model.

    Args:
        data: a `config.json`, in either schema.
        source: where it came from; it opens the error.

    Raises:
        ConfigError: with one line for each field that is missing or means another architecture.
    """
    schema = _schema(data, source)
    problems = [
        f"{name} = {data[name]!r}: must be {' or '.join(map(repr, good))}"
        for name, good in _FIXED.items()
        if name in data and not any(data[name] is x or _equal(data[name], x) for x in good)
    ]
    problems += [
        f"{name} = {data[name]}: must be a number up to {_MOST.get(name, _MOST_OF_ALL)}"
        for name in (*_COMMON, *_FFN)
        if isinstance(data.get(name), bool | int | float)
        and (isinstance(data[name], bool) or data[name] > _MOST.get(name, _MOST_OF_ALL))
    ]
    rope_base, rope_problems = _rope_base(data)
    problems += rope_problems
    values: Table = {ours: data.get(name) for name, ours in _COMMON.items()}
    values["ffn"] = {"kind": "moe", **{ours: data.get(name) for name, ours in _FFN.items()}}
    values |= {"rope_base": rope_base, "mixer_norm_eps": MIXER_NORM_EPS}
    values["norm"] = "post" if schema == "transformers" or data.get("postnorm") else "pre"
    needed = [*_COMMON, *_FFN]
    if schema == "minimax":
        needed.append("postnorm")
    for field, greek in (("residual_scale", "alpha"), ("branch_scale", "beta")):
        names = {kind: name.format(greek) for kind, name in _SCALES[schema].items()}
        needed += names.values() if greek == "alpha" else ()
        values[field] = {kind: data.get(name, 1.0) for kind, name in names.items()}
    list_name, kinds = _LAYERS[schema]
    needed.append(list_name)
    problems += [
        f"{name}: missing; without it the model would compute other numbers"
        for name in needed
        if data.get(name) is None
    ]
    layers = data.get(list_name)
    if layers is not None:
        bad = [x for x in layers if x not in list(kinds)] if isinstance(layers, list) else [layers]
        if bad:
            problems.append(f"{list_name} holds {bad[0]!r}: must be an array of {list(kinds)}")
        elif len(layers) != (data.get("num_hidden_layers") or len(layers)):
            problems.append(
                f"{list_name} has {len(layers)} entries for {data['num_hidden_layers']} layers"
            )
        else:
            values["layer_pattern"] = _period([kinds[x] for x in layers])
    if schema == "transformers":
        problems += _geometric(data.get("num_attention_heads"))
    if problems:
        lines = [f"  {problem}" for problem in problems]
        raise ConfigError("\n".join([f"{source} can't be used:", *lines]))
    own = _own_fields(data, source)
    values |= {name: own[name] for name in _OWN if name in own}
    values["ffn"] |= {name: own[name] for name in _OWN_FFN if name in own}
    return build(ModelConfig, values, source)


def to_published(config: ModelConfig, layout: Layout, dtype: str, old: Table) -> Table:
    """A model's `config.json` in a published schema.

    Args:
        config: the model.
        layout: "minimax" or "transformers".
        dtype: of the weights, such as "bfloat16".
        old: an earlier `config.json` of the model, or an empty one; what does not describe the
            architecture (special ids, the context length) is taken over.

    Raises:
        ConfigError: the schema has no field for something in the config.
    """
    ffn = config.ffn
    problems = unpublishable(config, layout)
    if problems or not isinstance(ffn, MoEFFN):
        lines = [f"  {problem}" for problem in problems]
        head = f"layout {layout!r} can't hold this model; use layout 'sferic':"
        raise ConfigError("\n".join([head, *lines]))
    minimax = layout == "minimax"
    list_name, kinds = _LAYERS[layout]
    names = {kind: name for name, kind in kinds.items()}
    data: Table = {
        "architectures": ["MiniMaxText01ForCausalLM" if minimax else "MiniMaxForCausalLM"],
        "model_type": "minimax_text_01" if minimax else "minimax",
        "torch_dtype" if minimax else "dtype": dtype,
        **{name: getattr(config, ours) for name, ours in _COMMON.items()},
        **{name: getattr(ffn, ours) for name, ours in _FFN.items()},
        list_name: [names[kind] for kind in config.mixers],
        "rope_theta": config.rope_base,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "sliding_window": None,
        "attention_dropout": 0.0,
        **{name: old.get(name) for name in SPECIAL_IDS},
        **{name: old[name] for name in _CARRIED if name in old},
    }
    for field, greek in (("residual_scale", "alpha"), ("branch_scale", "beta")):
        scale = getattr(config, field)
        for kind, name in _SCALES[layout].items():
            data[name.format(greek)] = getattr(scale, kind)
    if minimax:
        data |= {"postnorm": config.norm == "post", "shared_intermediate_size": 0}
    else:
        data["rope_parameters"] = {"rope_type": "default", "rope_theta": data.pop("rope_theta")}
    data[OWN_KEY] = {
        **{name: getattr(config, name) for name in _OWN},
        **{name: getattr(ffn, name) for name in _OWN_FFN},
    }
    return data


def unpublishable(config: ModelConfig, layout: Layout) -> list[str]:
    """What of a model a published schema has no field for, one line each."""
    problems = []
    if config.ffn.kind != "moe":
        problems.append("ffn.kind = 'dense': every published layer has experts")
    if config.depth != config.num_layers:
        problems.append(
            f"layers {config.first_layer} to {config.first_layer + config.num_layers - 1} of "
            f"{config.depth}: published models are whole"
        )
    if config.mixer_norm_eps != MIXER_NORM_EPS:
        problems.append(f"mixer_norm_eps = {config.mixer_norm_eps}: is always {MIXER_NORM_EPS}")
    if layout == "transformers":
        if config.norm != "post":
            problems.append("norm = 'pre': transformers has only 'post'")
        problems += _geometric(config.num_heads)
    return problems


def _own_fields(data: Table, source: str) -> Table:
    """Those of our own fields that a `config.json` holds."""
    own, known = data.get(OWN_KEY, {}), (*_OWN, *_OWN_FFN)
    if not isinstance(own, dict) or not own.keys() <= set(known):
        raise ConfigError(f"{source}: {OWN_KEY} = {own!r}: may hold {', '.join(known)} alone")
    return own


def _equal(found: Any, good: Any) -> bool:
    """1 is no True here."""
    return isinstance(found, bool) == isinstance(good, bool) and found == good


def _schema(data: Table, source: str) -> str:
    architectures, model_type = data.get("architectures") or [], data.get("model_type")
    names = architectures if isinstance(architectures, list) else [architectures]
    known = [ARCHITECTURES.get(name) if isinstance(name, str) else None for name in names]
    if not architectures and isinstance(model_type, str):
        known = [MODEL_TYPES.get(model_type)]
    if not known or None in known:
        found = architectures or data.get("model_type")
        raise ConfigError(
            f"{source}: architectures = {found!r} is none of {', '.join(ARCHITECTURES)}"
        )
    # transformers fills its own schema in for either name, so the fields decide
    if "attn_type_list" in data and "layer_types" not in data:
        return "minimax"
    return "transformers" if "layer_types" in data else str(known[0])


def _rope_base(data: Table) -> tuple[Any, list[str]]:
    nested = data.get("rope_parameters") or {}
    if not isinstance(nested, dict):
        return 1.0, [f"rope_parameters = {nested!r}: must be a table"]
    for name in nested:
        plain = name in ("rope_type", "type") and nested[name] == "default"
        if name != "rope_theta" and not plain:
            return 1.0, [f"rope_parameters.{name} = {nested[name]!r}: only plain RoPE is known"]
    base = nested.get("rope_theta", data.get("rope_theta"))
    return base, [] if base is not None else ["rope_theta: missing"]


def _geometric(num_heads: Any) -> list[str]:
    """transformers' decays differ from MiniMax's at other head counts."""
    if isinstance(num_heads, int) and num_heads > 0 and num_heads & (num_heads - 1) == 0:
        return []
    if num_heads is None:
        return []
    return [
        f"{num_heads} heads: transformers' decays equal MiniMax's only for a power of two; "
        "use MiniMax's layout"
    ]


def _period(kinds: Sequence[str]) -> tuple[str, ...]:
    """The shortest pattern that repeats to `kinds`."""
    n = len(kinds)
    for p in range(1, n):
        if all(kinds[i] == kinds[i % p] for i in range(n)):
            return tuple(kinds[:p])
    return tuple(kinds)
