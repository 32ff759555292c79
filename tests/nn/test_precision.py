"""Branches in bf16 beside float32 weights, and models that are bf16 throughout."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sferic.config import ModelConfig
from sferic.nn import Batch, ContiguousCache, HybridModel

MakeConfig = Callable[..., ModelConfig]
MakeModel = Callable[..., HybridModel]
Documents = Callable[..., list[Tensor]]


def make_pair(make_config: MakeConfig, make_model: MakeModel) -> list[HybridModel]:
    """The same float32 weights, computing in float32 and in bf16."""
    models = [make_model(make_config(hidden_size=32), dtype=torch.float32) for _ in range(2)]
    models[1].compute_dtype = torch.bfloat16
    return models


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def run(model: HybridModel, batch: Batch, replay: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    h, _ = model.hidden(batch, replay=replay)
    assert batch.labels is not None
    loss = model.loss(h, batch.labels) / len(batch.labels)
    loss.backward()
    gradients = {}
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        gradients[name] = weight.grad
    return loss.detach(), gradients


@pytest.mark.parametrize("training", [False, True])
def test_bf16_branches_are_near_float32(
    training: bool, make_config: MakeConfig, make_model: MakeModel, documents: Documents
) -> None:
    full, mixed = make_pair(make_config, make_model)
    for model in (full, mixed):
        model.train(training)
    batch = Batch.pack(documents(60, 9))
    assert batch.tokens is not None
    batch = replace(batch, labels=batch.tokens.roll(-1))
    with torch.no_grad():
        h, routings = full.hidden(batch)
        replay = [r.indices for r in routings if r is not None]  # near ties would differ
        h2, _ = mixed.hidden(batch, replay=list(replay))
        assert (h.dtype, h2.dtype) == (torch.float32, torch.bfloat16)
        logits, logits2 = full.head(h), mixed.head(h2)
    assert logits2.dtype == torch.bfloat16
    assert 1e-4 < relative(logits2, logits) < 0.05
    loss, want = run(full, batch, replay)
    loss2, got = run(mixed, batch, replay)
    assert loss2.dtype == torch.float32
    assert loss2.item() == pytest.approx(loss.item(), rel=0.02)
    for name, grad in got.items():
        assert grad.dtype == torch.float32, name
        assert relative(grad, want[name]) < 0.2, name


def test_the_residual_stream_and_the_router_stay_float32(
    make_config: MakeConfig, make_model: MakeModel, documents: Documents
) -> None:
    _, mixed = make_pair(make_config, make_model)
    seen: dict[str, set[torch.dtype]] = {"block": set(), "mixer": set(), "router": set()}

    def record(place: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, out: Any) -> None:
            seen[place].add((out[0] if isinstance(out, tuple) else out).dtype)

        return hook

    for block in mixed.layers.values():
        block.register_forward_hook(record("block"))
        block.mixer.register_forward_hook(record("mixer"))  # type: ignore[union-attr]
        block.ffn.router.register_forward_hook(record("router"))  # type: ignore[union-attr]
    with torch.no_grad():
        mixed.hidden(Batch.pack(documents(9)))
    assert seen == {
        "block": {torch.float32},
        "mixer": {torch.bfloat16},
        "router": {torch.float32},
    }


@pytest.mark.parametrize("kind", ["compute_dtype", "weights"])
def test_cached_decoding_in_bf16_is_near_float32(
    kind: str, make_config: MakeConfig, make_model: MakeModel, documents: Documents
) -> None:
    full, mixed = make_pair(make_config, make_model)
    if kind == "weights":
        mixed.compute_dtype = None
        mixed = mixed.to(torch.bfloat16)
    (doc,) = documents(30)
    cache = ContiguousCache(mixed.config, 1, 30, dtype=torch.bfloat16)
    with torch.no_grad():
        h, routings = full.hidden(Batch.pack([doc]))
        want = full.head(h)
        chosen = [r.indices for r in routings if r is not None]
        plain = mixed.head(mixed.hidden(Batch.pack([doc]), replay=list(chosen))[0])
        parts = []
        for a, b in [(0, 20), *((t, t + 1) for t in range(20, 30))]:
            batch = cache.extend([doc[a:b]])
            h, _ = mixed.hidden(batch, cache, [i[a:b] for i in chosen])
            parts.append(mixed.head(h))
    assert relative(torch.cat(parts), want) < 1.2 * relative(plain, want) < 0.1
