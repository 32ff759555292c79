"""What the operators are called with."""

from typing import Any

import pytest
import torch
from benchmarks.lightning.calls import (
    decode_call,
    forward_call,
    packed_call,
    prefill_call,
    training_call,
)
from benchmarks.lightning.check import worst_head
from benchmarks.lightning.impls import Impl, Serving
from benchmarks.lightning.inputs import document_offsets, draw
from benchmarks.lightning.plan import Case, Plan
from torch import Tensor

CPU = torch.device("cpu")
CASE = Case(2, 6, 4)


class Recorder:
    """Remembers its arguments; the result depends on q, k and v."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Tensor, **more: Any) -> Tensor:
        self.seen.append((*arguments, more))
        return arguments[0] * arguments[1] * arguments[2]


def test_inputs_are_silu_of_normal_numbers_and_differ() -> None:
    inputs = draw(Case(4, 64, 4), 2, CPU)
    q, k, v, other = (
        x.detach() for x in [*inputs.views("contiguous")[0], inputs.views("contiguous")[1][0]]
    )
    assert q.dtype == torch.bfloat16
    assert float(q.min()) == pytest.approx(-0.2785, abs=1e-3)  # the least value of silu
    assert float(q.float().mean()) == pytest.approx(0.2066, abs=0.01)
    for x in (k, v, other, inputs.do[0]):
        assert float((x == q).float().mean()) < 0.1
    assert float(inputs.do[0].float().std()) == pytest.approx(1, abs=0.02)
    assert torch.equal(draw(Case(4, 64, 4), 2, CPU).flat, inputs.flat)


@pytest.mark.parametrize("layout", ["contiguous", "qkv"])
@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize("passes", ["fwd", "fwd+bwd"])
def test_a_training_call_has_its_slopes_layout_and_gradients(
    layout: str, when: str, passes: str
) -> None:
    operator, inputs = Recorder(), draw(CASE, 3, CPU)
    call = training_call(Impl("", operator), inputs, when, layout, passes)
    results: list[Any] = [call(i) for i in range(6)]
    storage = 2 * inputs.flat.numel()
    pointers = set()
    for *qkv, decay, _ in operator.seen:
        factor = 1.0 if when == "early" else 0.0127
        assert decay.tolist() == pytest.approx(
            [factor * s for s in (0.25, 1 / 16, 1 / 64, 1 / 256)]
        )
        for x in qkv:
            assert x.shape == (2, 6, 4, 128)
            assert x.requires_grad
            assert x.is_contiguous() == (layout == "contiguous")
            if layout == "qkv":
                assert x.stride() == (6 * 4 * 3 * 128, 4 * 3 * 128, 3 * 128, 1)
            pointers.add(x.data_ptr())
    assert len(pointers) == 9  # q, k and v of three sets
    assert max(pointers) - min(pointers) < storage
    _, k, v, _, _ = operator.seen[1]
    if passes == "fwd":
        assert results[1].grad_fn is not None
    else:
        assert torch.allclose(results[1][0], inputs.do[1] * (k * v), rtol=0.02)


def test_a_case_without_a_backward_asks_for_no_gradients() -> None:
    operator, inputs = Recorder(), draw(Case(1, 4, 1, backward=False), 1, CPU)
    training_call(Impl("", operator), inputs, "early", "contiguous", "fwd")(0)
    assert not operator.seen[0][0].requires_grad
    assert inputs.do == ()


def test_host_time_is_of_a_call_that_saves_nothing() -> None:
    operator = Recorder()
    forward_call(Impl("", operator), draw(CASE, 2, CPU))(1)
    assert not any(x.requires_grad for x in operator.seen[0][:3])


def test_a_pack_has_all_its_documents() -> None:
    operator, inputs = Recorder(), draw(Case(1, 40, 2), 2, CPU)
    call: Any = packed_call(Impl("", operator), inputs, 5, "fwd+bwd")
    grads = call(1)
    q, _, _, _, more = operator.seen[0]
    assert q.shape == (40, 2, 128)
    ends = more["cu_seqlens"]
    assert ends.dtype == torch.int32
    assert len(ends) == 6
    assert (ends[0], ends[-1]) == (0, 40)
    assert bool((ends.diff() > 0).all())
    assert len(set(ends.diff().tolist())) > 1
    assert grads[0].shape == q.shape
    assert document_offsets(1, 40, CPU).tolist() == [0, 40]


def test_decode_walks_round_slots_of_its_own() -> None:
    operator = Recorder()
    call = decode_call(Serving(decode=operator), Case(3, 1, 2), 4, CPU)
    for i in range(5):
        call(i)
    slots = [arguments[5].tolist() for arguments in operator.seen]
    pool = operator.seen[0][4]
    assert pool.shape == (12, 2, 128, 128)
    assert pool.dtype == torch.float32
    assert sorted(slot for row in slots[:4] for slot in row) == list(range(12))
    assert slots[4] == slots[0]
    assert operator.seen[0][0].shape == (3, 2, 128)


def test_prefill_writes_states_on_the_way_and_continues_half() -> None:
    operator = Recorder()
    prefill_call(Serving(prefill=operator), draw(Case(3, 8, 2), 2, CPU), 3)(0)
    q, _, _, _, pool, slots, has_state, ends, more = operator.seen[0]
    assert q.shape == (24, 2, 128)
    assert not q.requires_grad
    assert slots.tolist() == [0, 1, 2]
    assert has_state.tolist() == [True, False, True]
    assert ends.tolist() == [0, 8, 16, 24]
    sequence, length, written = (x.tolist() for x in more["checkpoints"])
    assert list(zip(sequence, length, strict=True)) == [
        (0, 3), (0, 6), (1, 3), (1, 6), (2, 3), (2, 6)
    ]  # fmt: skip
    assert written == [3, 4, 5, 6, 7, 8]
    assert len(pool) == 9


def test_an_error_is_that_of_the_worst_head() -> None:
    truth = torch.ones(2, 5, 3, 4, dtype=torch.float64)
    got = truth.clone()
    got[:, :, 1] *= 1.5
    truth[:, :, 2] = got[:, :, 2] = 1e6
    assert worst_head(got, truth) == pytest.approx(0.5)
    assert worst_head(got[:, :4], truth) == float("inf")
    got[0, 0, 0, 0] = float("nan")
    assert worst_head(got, truth) == float("inf")


def test_enough_sets_to_pass_every_cache(make_bench: Any) -> None:
    plan: Plan = make_bench().plan
    assert plan.rotate_bytes == 65536
    assert [plan.sets(n) for n in (1, 1000, 65535, 65536, 10**9)] == [128, 66, 2, 2, 2]
