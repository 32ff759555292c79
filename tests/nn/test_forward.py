"""The whole model against one written again, token by token, from the description.

h = RMS(x); x = a h + b Mix(h); g = RMS(x); x = a g + b FFN(g); then the final RMS and the head.
Only the weights come from the model.
"""

import cmath
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sferic.config import BranchScale, DenseFFN, ModelConfig, MoEFFN
from sferic.nn import Batch, HybridModel

MakeConfig = Callable[..., ModelConfig]
MakeModel = Callable[..., HybridModel]
Documents = Callable[..., list[Tensor]]
Weights = dict[str, Tensor]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.stack([row / math.sqrt(float(row @ row) / len(row) + eps) for row in x]) * weight


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def alibi(n: int) -> list[float]:
    if n & (n - 1) == 0:
        ratio = 2 ** (-8 / n)
        return [ratio**i for i in range(1, n + 1)]
    below = 1 << (n.bit_length() - 1)
    return alibi(below) + alibi(2 * below)[::2][: n - below]


def lightning(h: Tensor, w: Weights, config: ModelConfig, layer: int) -> Tensor:
    """Per head q | k | v rows in `qkv_proj`; SiLU on all three; S = e^-s S + k v; o = S q."""
    H, K = config.num_heads, config.head_dim
    factor = 1 - layer / (config.depth - 1) + 1e-5
    out = torch.zeros(len(h), H * K, dtype=h.dtype)
    for head, slope in enumerate(alibi(H)):
        decay = math.exp(-slope * factor)
        rows = w["mixer.qkv_proj.weight"][head * 3 * K : (head + 1) * 3 * K]
        state = torch.zeros(K, K, dtype=h.dtype)
        for t, x in enumerate(h):
            z = silu(rows @ x)
            q, k, v = z[:K], z[K : 2 * K], z[2 * K :]
            state = decay * state + torch.outer(k, v)
            out[t, head * K : (head + 1) * K] = q @ state
    gate = sigmoid(h @ w["mixer.gate_proj.weight"].T)
    normed = rms(out, w["mixer.norm.weight"], config.mixer_norm_eps)
    return (gate * normed) @ w["mixer.out_proj.weight"].T


def rotate(x: Tensor, position: int, config: ModelConfig) -> Tensor:
    """Dims i and i + R/2 as one complex number, turned by position * base^(-2i/R)."""
    R, y = config.rope_dim, x.clone()
    for i in range(R // 2):
        angle = position * config.rope_base ** (-2 * i / R)
        z = complex(x[i], x[i + R // 2]) * cmath.exp(1j * angle)
        y[i], y[i + R // 2] = z.real, z.imag
    return y


def softmax(h: Tensor, w: Weights, config: ModelConfig, layer: int) -> Tensor:
    H, G, K = config.num_heads, config.num_kv_heads, config.head_dim

    def heads(name: str, n: int) -> Tensor:
        return (h @ w[f"mixer.{name}.weight"].T).view(len(h), n, K)

    q, k, v = heads("q_proj", H), heads("k_proj", G), heads("v_proj", G)
    q = torch.stack([torch.stack([rotate(x, t, config) for x in q[t]]) for t in range(len(h))])
    k = torch.stack([torch.stack([rotate(x, t, config) for x in k[t]]) for t in range(len(h))])
    out = torch.zeros(len(h), H * K, dtype=h.dtype)
    for head in range(H):
        g = head // (H // G)
        for t in range(len(h)):
            weights = torch.exp(k[: t + 1, g] @ q[t, head] / math.sqrt(K))
            mixed = weights @ v[: t + 1, g] / weights.sum()
            out[t, head * K : (head + 1) * K] = mixed
    return out @ w["mixer.out_proj.weight"].T


def swiglu(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    return (silu(x @ w13[:, 0]) * (x @ w13[:, 1])) @ w2


def ffn(h: Tensor, w: Weights, config: ModelConfig) -> Tensor:
    if isinstance(config.ffn, DenseFFN):
        w13 = torch.stack([w["ffn.w1.weight"].T, w["ffn.w3.weight"].T], dim=1)
        return torch.stack([swiglu(x, w13, w["ffn.w2.weight"].T) for x in h])
    w13, w2 = w["ffn.w13"], w["ffn.w2"]
    rows = []
    for x in h:
        logits = (w["ffn.router.weight"] @ x).tolist()
        chosen = sorted(range(len(logits)), key=lambda e: -logits[e])[: config.ffn.top_k]
        total = sum(math.exp(logits[e]) for e in chosen)
        experts = [math.exp(logits[e]) / total * swiglu(x, w13[e], w2[e]) for e in chosen]
        rows.append(torch.stack(experts).sum(0))
    return torch.stack(rows)


def forward(config: ModelConfig, weights: Weights, tokens: Tensor) -> Tensor:
    """Logits of one document."""
    x = torch.stack([weights["embed_tokens.weight"][int(t)] for t in tokens])
    for i in range(config.num_layers):
        prefix = f"layers.{i}."
        w = {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}
        layer = config.first_layer + i
        kind = config.layer_pattern[layer % len(config.layer_pattern)]
        mix = {"lightning": lightning, "softmax": softmax}[kind]
        post = config.norm == "post"
        alpha, beta = getattr(config.residual_scale, kind), getattr(config.branch_scale, kind)
        h = rms(x, w["mixer_norm.weight"], config.norm_eps)
        x = alpha * (h if post else x) + beta * mix(h, w, config, layer)
        g = rms(x, w["ffn_norm.weight"], config.norm_eps)
        alpha, beta = config.residual_scale.ffn, config.branch_scale.ffn
        x = alpha * (g if post else x) + beta * ffn(g, w, config)
    return rms(x, weights["norm.weight"], config.norm_eps) @ weights["lm_head.weight"].T


MODELS: dict[str, dict[str, Any]] = {
    "post-norm MoE, 8 heads": {"num_heads": 8},
    "pre-norm MoE, 6 heads": {"num_heads": 6, "num_kv_heads": 3, "norm": "pre"},
    "post-norm dense, 6 heads": {
        "num_heads": 6,
        "num_kv_heads": 1,
        "ffn": DenseFFN(kind="dense", size=20),
    },
    "pre-norm dense, 8 heads": {
        "num_heads": 8,
        "norm": "pre",
        "ffn": DenseFFN(kind="dense", size=20),
    },
    "slice of a deeper model": {
        "num_heads": 8,
        "depth": 11,
        "first_layer": 7,
        "layer_pattern": ("lightning", "lightning", "lightning", "softmax"),
    },
    "scales of each kind, top-3, late RoPE": {
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 6,
        "rope_dim": 4,
        "rope_base": 1e7,
        "norm_eps": 0.1,
        "mixer_norm_eps": 0.3,
        "residual_scale": BranchScale(lightning=1.5, softmax=0.7, ffn=2.5),
        "branch_scale": BranchScale(lightning=0.6, softmax=1.7, ffn=0.9),
        "ffn": MoEFFN(kind="moe", size=8, num_experts=5, top_k=3),
    },
}


@pytest.mark.parametrize("case", MODELS)
def test_logits_equal_those_of_the_model_written_again(
    case: str, make_config: MakeConfig, make_model: MakeModel, documents: Documents
) -> None:
    config = make_config(**MODELS[case])
    assert config.hidden_size != config.num_heads * config.head_dim
    assert {"lightning", "softmax"} == set(config.mixers)
    model = make_model(config)
    docs = documents(70, 1, 9)
    weights = {n: t.detach() for n, t in model.state_dict().items()}
    want = torch.cat([forward(config, weights, d) for d in docs])
    cu_seqlens = torch.tensor([0, 70, 71, 80], dtype=torch.int32)
    with torch.no_grad():
        got = model(torch.cat(docs), cu_seqlens=cu_seqlens)
    assert float(want.std()) > 0.5
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    single = model.float()
    with torch.no_grad():
        got = single(torch.cat(docs), cu_seqlens=cu_seqlens)
    assert got.dtype == torch.float32
    assert float((got - want).abs().max()) < 1e-5 * float(want.abs().max())


def test_a_batch_of_rows_and_a_pack_have_the_same_logits(
    make_model: MakeModel, documents: Documents
) -> None:
    model = make_model()
    rows = torch.stack(documents(20, 20, 20))
    with torch.no_grad():
        got = model(rows)
        want = model(rows.flatten(), cu_seqlens=torch.tensor([0, 20, 40, 60], dtype=torch.int32))
    torch.testing.assert_close(got.flatten(0, 1), want, rtol=1e-12, atol=1e-12)


def test_bad_shapes_are_named(make_model: MakeModel) -> None:
    model = make_model()
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"one pack \[T\] without lengths, got \[2, 5\]"):
        model(tokens, cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="without lengths"):
        model(tokens[0], cu_seqlens=torch.tensor([0, 5]), lengths=[5])
    with pytest.raises(ValueError, match=r"must be \[B, T\].*\[5\]"):
        model(tokens[0])
    for lengths in ([5], [5, 6], [-1, 5]):
        with pytest.raises(ValueError, match="must be 2 numbers between 0 and 5"):
            model(tokens, lengths=lengths)


def test_embeddings_take_the_place_of_tokens(make_model: MakeModel, documents: Documents) -> None:
    model = make_model()
    batch = Batch.pack(documents(9, 4))
    with torch.no_grad():
        want, _ = model.hidden(batch)
        embedded = batch.with_embeddings(model.embed(batch))
        got, _ = model.hidden(embedded)
    assert torch.equal(got, want)
