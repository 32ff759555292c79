"""Parameters, bytes and FLOPs of a model, counted from its config alone."""

from collections.abc import Iterator
from typing import NamedTuple, TypedDict

from sferic.config.model import ModelConfig, MoEFFN

SEQUENCE_LENGTHS = (8_192, 131_072, 1_048_576)


class Sizes(TypedDict):
    """What `sizes` returns; see there."""

    total_params: int
    active_params_no_vocab: int
    kv_bytes_per_token: int
    state_bytes_per_sequence: int
    weight_bytes: dict[str, int]
    flops_per_token: dict[str, float]


class _Matrix(NamedTuple):
    inputs: int
    outputs: int
    copies: int = 1
    used: int = 1  # copies that one token is multiplied with
    int8: bool = True

    @property
    def params(self) -> int:
        return self.inputs * self.outputs


def sizes(config: ModelConfig) -> Sizes:
    """Count a model.

    Returns:
        total_params: All parameters held.
        active_params_no_vocab: Parameters one token uses, without embedding and head.
        kv_bytes_per_token: bf16 keys and values of the softmax layers.
        state_bytes_per_sequence: float32 [H, K, K] state of the lightning layers.
        weight_bytes: "bf16"; "int8": projections and FFN at one byte and a float32 scale per
            output channel, router, embedding, head and norms in bf16.
        flops_per_token: By sequence length n, the mean forward FLOPs of one of its tokens:
            2 per matmul weight used, 2·n·H·K per softmax layer (the causal half), 4·H·K·K per
            lightning layer. The embedding lookup is free.
    """
    head_width = config.num_heads * config.head_dim
    layers = list(_layer_matrices(config))
    embedding = _Matrix(config.vocab_size, config.hidden_size, used=0, int8=False)
    head = _Matrix(config.hidden_size, config.vocab_size, int8=False)
    matrices = [*layers, embedding, head]
    norms = (2 * config.num_layers + 1) * config.hidden_size + config.num_lightning * head_width

    total = norms + sum(m.params * m.copies for m in matrices)
    int8 = [m for m in matrices if m.int8]
    saved = sum((m.params - 4 * m.outputs) * m.copies for m in int8)  # bf16 bytes less int8 bytes
    matmul = 2 * sum(m.params * m.used for m in matrices)
    lightning = 4 * head_width * config.head_dim * config.num_lightning
    softmax = 2 * head_width * config.num_softmax  # per token of length
    return {
        "total_params": total,
        "active_params_no_vocab": norms + sum(m.params * m.used for m in layers),
        "kv_bytes_per_token": 2 * 2 * config.num_kv_heads * config.head_dim * config.num_softmax,
        "state_bytes_per_sequence": 4 * head_width * config.head_dim * config.num_lightning,
        "weight_bytes": {"bf16": 2 * total, "int8": 2 * total - saved},
        "flops_per_token": {
            str(n): float(matmul + lightning + softmax * n) for n in SEQUENCE_LENGTHS
        },
    }


def _layer_matrices(config: ModelConfig) -> Iterator[_Matrix]:
    width = config.hidden_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for mixer in config.mixers:
        if mixer == "lightning":
            yield _Matrix(width, 3 * heads)  # q, k and v
            yield _Matrix(width, heads)  # gate
        else:
            yield _Matrix(width, heads)  # q
            yield _Matrix(width, kv_heads, copies=2, used=2)  # k and v
        yield _Matrix(heads, width)  # out
        yield from _ffn_matrices(config)


def _ffn_matrices(config: ModelConfig) -> Iterator[_Matrix]:
    width, ffn = config.hidden_size, config.ffn
    experts, used = 1, 1
    if isinstance(ffn, MoEFFN):
        experts, used = ffn.num_experts, ffn.top_k
        yield _Matrix(width, experts, int8=False)  # router
    yield _Matrix(width, 2 * ffn.size, experts, used)
    yield _Matrix(ffn.size, width, experts, used)
