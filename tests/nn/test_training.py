"""Training mode: recompute, replay, token drop and pads."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sferic.config import ModelConfig, MoEFFN
from sferic.nn import Batch, HybridModel, Routing, dispatch
from sferic.ops.moe import auxiliary_loss

MakeConfig = Callable[..., ModelConfig]
MakeModel = Callable[..., HybridModel]
Documents = Callable[..., list[Tensor]]
Gradients = dict[str, Tensor]


def labelled(docs: list[Tensor]) -> Batch:
    """A pack whose tokens predict the next one of their document."""
    labels = [torch.cat([d[1:], d.new_full((min(len(d), 1),), -100)]) for d in docs]
    return replace(Batch.pack(docs), labels=torch.cat(labels))


def loss_and_gradients(
    model: HybridModel, batch: Batch, replay: Any = None
) -> tuple[Tensor, Gradients, list[Routing]]:
    """Cross entropy plus a large balancing loss."""
    model.zero_grad()
    h, routings = model.hidden(batch, replay=replay)
    assert batch.labels is not None
    loss = model.loss(h, batch.labels) / 10
    made = [r for r in routings if r is not None]
    for r in made:
        loss = loss + auxiliary_loss(
            r.counts, r.probs_sum, r.tokens, top_k=2, coef=1.0, norm="switch"
        )
    loss.backward()
    gradients = {}
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        gradients[name] = weight.grad.clone()
    return loss.detach(), gradients, made


def assert_equal(a: Gradients, b: Gradients) -> None:
    for name, grad in a.items():
        assert torch.equal(grad, b[name]), name


@pytest.fixture(scope="module")
def dropping(make_config: MakeConfig) -> ModelConfig:
    """A model that loses many choices to capacity."""
    ffn = MoEFFN(kind="moe", size=16, num_experts=4, top_k=2, capacity_factor=0.7)
    return make_config(ffn=ffn)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_recompute_changes_no_bit(
    dtype: torch.dtype, dropping: ModelConfig, make_model: MakeModel, documents: Documents
) -> None:
    model = make_model(dropping, dtype=dtype).train()
    batch = labelled(documents(30, 1, 12))
    loss, gradients, routings = loss_and_gradients(model, batch)
    assert all(r.dropped > 0 for r in routings)
    model.recompute = True
    again, gradients2, routings2 = loss_and_gradients(model, batch)
    assert torch.equal(loss, again)
    assert_equal(gradients, gradients2)
    for a, b in zip(routings, routings2, strict=True):
        assert torch.equal(a.indices, b.indices)
        assert torch.equal(a.dropped, b.dropped)


def test_recompute_runs_the_blocks_again_but_never_routes_again(
    dropping: ModelConfig,
    make_model: MakeModel,
    documents: Documents,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model(dropping).train()
    model.recompute = True
    batch = labelled(documents(30, 12))
    _, want, routings = loss_and_gradients(model, batch)
    calls: list[Tensor | None] = []
    top_k_gates = dispatch.top_k_gates

    def unstable(probs: Tensor, top_k: int, indices: Tensor | None = None) -> Any:
        """Would choose other experts the second time."""
        calls.append(indices)
        if indices is None and len(calls) > model.config.num_layers:
            probs = probs.flip(-1)
        return top_k_gates(probs, top_k, indices)

    monkeypatch.setattr(dispatch, "top_k_gates", unstable)
    _, got, _ = loss_and_gradients(model, batch)
    assert_equal(got, want)
    layers = model.config.num_layers
    assert len(calls) == 2 * layers
    assert [c is None for c in calls] == [True] * layers + [False] * layers
    for repeated, routing in zip(calls[layers:], reversed(routings), strict=True):
        assert repeated is not None
        assert torch.equal(repeated, routing.indices)


def test_recompute_chooses_experts_once_per_layer(
    dropping: ModelConfig, make_model: MakeModel, documents: Documents, operators: type[Any]
) -> None:
    model = make_model(dropping).train()
    model.recompute = True
    with operators() as seen:
        loss_and_gradients(model, labelled(documents(30)))
    assert seen.names.count("aten.topk.default") == model.config.num_layers


@pytest.mark.parametrize("recompute", [False, True])
def test_replay_repeats_the_experts_of_another_run(
    recompute: bool, dropping: ModelConfig, make_model: MakeModel, documents: Documents
) -> None:
    model = make_model(dropping).train()
    model.recompute = recompute
    batch = labelled(documents(30, 12))
    loss, gradients, routings = loss_and_gradients(model, batch)
    again, gradients2, _ = loss_and_gradients(model, batch, [r.indices for r in routings])
    assert torch.equal(loss, again)
    assert_equal(gradients, gradients2)
    others = [(r.indices + 1) % 4 for r in routings]
    different, _, routings3 = loss_and_gradients(model, batch, others)
    assert abs(different - loss) > 1e-3
    for r, indices in zip(routings3, others, strict=True):
        assert torch.equal(r.indices, indices)
        assert torch.equal(r.counts, torch.bincount(indices.flatten(), minlength=4))


def with_pads(docs: list[Tensor], pads: Tensor) -> Batch:
    """The pack with a last document that isn't valid and has no labels."""
    batch = labelled([*docs, pads])
    valid, labels = batch.valid.clone(), batch.labels
    assert labels is not None
    first = len(valid) - len(pads)
    valid[first:], labels[first:] = False, -100
    return replace(batch, valid=valid)


@pytest.mark.parametrize("capacity_factor", [None, 0.7, 1.25])
def test_pads_change_nothing(
    capacity_factor: float | None,
    make_config: MakeConfig,
    make_model: MakeModel,
    documents: Documents,
) -> None:
    ffn = MoEFFN(kind="moe", size=16, num_experts=4, top_k=2, capacity_factor=capacity_factor)
    model = make_model(make_config(ffn=ffn)).train()
    docs = documents(30, 1, 12)
    loss, want, routings = loss_and_gradients(model, labelled(docs))
    for pads in (torch.zeros(17, dtype=torch.int64), documents(90, seed=4)[0]):
        batch = with_pads(docs, pads)
        padded, got, routings2 = loss_and_gradients(model, batch)
        torch.testing.assert_close(padded, loss, rtol=1e-12, atol=0)
        for name, grad in got.items():
            scale = float(want[name].abs().max())
            torch.testing.assert_close(grad, want[name], rtol=0, atol=1e-11 * scale, msg=name)
        for a, b in zip(routings2, routings, strict=True):
            assert torch.equal(a.counts, b.counts)
            assert torch.equal(a.dropped, b.dropped)
            assert a.tokens == b.tokens == 43
            torch.testing.assert_close(a.probs_sum, b.probs_sum, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(a.entropy_sum, b.entropy_sum, rtol=1e-12, atol=1e-12)


def test_pads_in_the_middle_take_no_capacity(
    dropping: ModelConfig, make_model: MakeModel, documents: Documents
) -> None:
    model = make_model(dropping).train()
    first, pads, last = documents(20, 30, 20)
    valid = torch.ones(70, dtype=torch.bool)
    valid[20:50] = False
    with torch.no_grad():
        h, routings = model.hidden(replace(Batch.pack([first, pads, last]), valid=valid))
        want, routings2 = model.hidden(Batch.pack([first, last]))
    torch.testing.assert_close(h[valid], want, rtol=1e-12, atol=1e-12)
    for a, b in zip(routings, routings2, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a.dropped, b.dropped)
        assert b.dropped > 0


def test_routing_counts_by_hand(
    dropping: ModelConfig, make_model: MakeModel, documents: Documents
) -> None:
    model = make_model(dropping).train()
    batch = with_pads(documents(20, 5), documents(7, seed=1)[0])
    probs: list[Tensor] = []
    for block in model.layers.values():
        block.ffn.router.register_forward_hook(  # type: ignore[union-attr]
            lambda module, args, logits: probs.append(logits.softmax(-1).detach())
        )
    with torch.no_grad():
        _, routings = model.hidden(batch)
    for p, r in zip(probs, routings, strict=True):
        assert r is not None
        real = p[:25]
        chosen = real.topk(2).indices
        assert torch.equal(r.indices[:25], chosen)
        counts = chosen.flatten().bincount(minlength=4)
        assert torch.equal(r.counts, counts)
        capacity = 9  # ceil(0.7 * 2 * 25 / 4)
        assert r.dropped == (counts - capacity).clamp(min=0).sum()
        torch.testing.assert_close(r.probs_sum, real.sum(0))
        torch.testing.assert_close(r.entropy_sum, -(real * real.log()).sum())
        assert r.tokens == 25


def test_evaluation_drops_no_token(
    dropping: ModelConfig, make_model: MakeModel, documents: Documents
) -> None:
    model = make_model(dropping)
    batch = Batch.pack(documents(30, 12))
    with torch.no_grad():
        _, routings = model.hidden(batch)
        assert all(r is not None and r.dropped == 0 for r in routings)
        _, routings = model.train().hidden(batch)
        assert all(r is not None and r.dropped > 0 for r in routings)


def test_gradients_equal_finite_differences(
    dropping: ModelConfig, make_model: MakeModel, documents: Documents
) -> None:
    model = make_model(dropping).train()
    batch = labelled(documents(30, 9))
    _, gradients, routings = loss_and_gradients(model, batch)
    replay = [r.indices for r in routings]
    generator = torch.Generator().manual_seed(5)
    for name, weight in model.named_parameters():
        direction = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        losses = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                weight += step * direction
                h, made = model.hidden(batch, replay=list(replay))
                assert batch.labels is not None
                loss = model.loss(h, batch.labels) / 10
                for r in made:
                    assert r is not None
                    loss = loss + auxiliary_loss(
                        r.counts, r.probs_sum, r.tokens, top_k=2, coef=1.0, norm="switch"
                    )
                losses.append(float(loss))
                weight -= step * direction
        slope = (losses[0] - losses[1]) / 2e-6
        want = float((gradients[name] * direction).sum())
        assert slope == pytest.approx(want, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("capacity_factor", [None, 4.0])
def test_the_experts_of_pads_are_not_computed_in_training(capacity_factor: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 8, generator=generator)
    valid = torch.tensor([True, True, False, True, False, True])
    x[~valid] = float("nan")
    weights = (
        torch.randn(3, 8, 2, 4, generator=generator),
        torch.randn(3, 4, 8, generator=generator),
    )
    probs = torch.rand(6, 3, generator=generator).softmax(-1)
    y, routing = dispatch.LocalDispatcher()(
        x,
        probs,
        valid,
        *weights,
        top_k=2,
        training=True,
        capacity_factor=capacity_factor,
        indices=None,
    )
    assert torch.equal(y[~valid], torch.zeros(2, 8))
    assert y[valid].isfinite().all()
    assert routing.dropped == 0
    assert routing.counts.sum() == 8
