"""The kernels of lightning attention against float64: all of it on a GPU, a part by interpreter.

On a GPU: CUBLAS_WORKSPACE_CONFIG=:4096:8 pytest -n 8 tests/ops/test_lightning_kernels.py
Backends are named, so that a fallback fails.
"""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning_matrix import (
    CUDA,
    DEVICE,
    HOPPER,
    SLOPES,
    Call,
    Case,
    check,
    draw,
    errors,
    run,
    silu_positive,
    truth,
)
from torch import Tensor

from sferic.ops import lightning_attention
from sferic.ops.lightning import plan

pytest.importorskip("triton")

attention: Any = lightning_attention
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GPU = pytest.mark.skipif(not CUDA, reason="needs a GPU")
BACKENDS = ["triton", *(["hopper"] if HOPPER else [])]
ODD = (0, 50, 1, 0, 129, 320, 64, 0)
TINY = Case(T=70, H=2, K=16, V=16, dtype=FP32)
LARGE = pytest.mark.xdist_group("large")  # one at a time: tens of GiB


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def usual(backend: str) -> Case:
    """A case that the backend takes on this machine."""
    return Case() if CUDA else replace(TINY, dtype=FP16 if backend == "triton" else BF16)


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 127, 255, 257, 8191] if CUDA else [1, 33, 64])
@pytest.mark.parametrize("states", [True, False])
def test_lengths(T: int, states: bool, backend: str, usual: Case) -> None:
    check(replace(usual, T=T, B=2 if T < 8000 else 1, states=states), backend)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32] if CUDA else [FP16, FP32])
@pytest.mark.parametrize(
    ("K", "V"),
    [(32, 32), (64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (64, 32), (128, 256)]
    if CUDA
    else [(16, 24), (33, 16)],
)
def test_head_dims(K: int, V: int, dtype: torch.dtype) -> None:
    check(Case(T=200 if CUDA else 70, H=6 if CUDA else 2, K=K, V=V, dtype=dtype), "triton")


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("K", "V"), [(128, 128), (72, 128), (128, 96), (96, 96)])
@pytest.mark.parametrize("lengths", [None, ODD])
def test_head_dims_on_hopper(
    K: int, V: int, dtype: torch.dtype, lengths: tuple[int, ...] | None
) -> None:
    check(Case(K=K, V=V, dtype=dtype, lengths=lengths), "hopper")


@GPU
def test_tf32_where_the_user_allows_it() -> None:
    check(Case(dtype=FP32, tf32=True), "triton")
    check(Case(dtype=FP32, lengths=ODD, tf32=True), "triton")


@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    "lengths",
    [ODD, (3,), (0,), (9000, 0, 70, 5000), (0, 0, 4096)] if CUDA else [(0, 40, 1, 0, 33)],
    ids=str,
)
def test_packs(
    lengths: tuple[int, ...], deterministic: bool, states: bool, backend: str, usual: Case
) -> None:
    if sum(lengths) == 0:
        pytest.skip("no token at all is the reference's")
    check(replace(usual, lengths=lengths, states=states, deterministic=deterministic), backend)


@pytest.mark.parametrize("deterministic", [True, False])
def test_thousands_of_short_documents(deterministic: bool, backend: str, usual: Case) -> None:
    count = 4096 if CUDA else 40
    lengths = tuple(random.Random(0).choices(range(1, 8), k=count))
    case = replace(usual, lengths=lengths, H=3, states=False, deterministic=deterministic)
    call = draw(case)
    assert max(errors(run(call, backend), truth(call)).values()) < 5e-3


@settings(max_examples=40 if CUDA else 8)
@given(
    lengths=st.lists(st.integers(0, 200 if CUDA else 40), min_size=1, max_size=6),
    H=st.sampled_from([1, 3, 6] if CUDA else [1, 2]),
    widths=st.sampled_from([(128, 128), (96, 128)] if CUDA else [(16, 16), (16, 32)]),
    states=st.booleans(),
    deterministic=st.booleans(),
)
def test_any_pack(
    lengths: list[int], H: int, widths: tuple[int, int], states: bool, deterministic: bool
) -> None:
    K, V = widths
    if sum(lengths) == 0:
        return
    dtype = BF16 if CUDA else FP32
    case = Case(
        lengths=tuple(lengths), H=H, K=K, V=V, dtype=dtype,
        states=states, deterministic=deterministic,
    )  # fmt: skip
    for name in BACKENDS:
        check(case, name)


@pytest.mark.parametrize("lengths", [None, (500, 300) if CUDA else (150, 190)])
def test_items_of_many_sizes(
    lengths: tuple[int, ...] | None, backend: str, usual: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences spread over few and many items, each summed up by one program or several."""
    for items, shares in ((2, 1), (3, 2), (5, 4)):
        monkeypatch.setattr(plan, "segment_count", lambda *_, n=items: n)
        monkeypatch.setattr(plan, "share_count", lambda *_, n=shares: n)
        plan.batch_plan.cache_clear()
        check(replace(usual, T=800 if CUDA else 330, lengths=lengths), backend)
    plan.batch_plan.cache_clear()


def test_positive_exponents_overflow_nowhere(backend: str, usual: Case) -> None:
    """Steep slopes and a ragged tail: weights before their clamp would be exp(100 * 57)."""
    for T in (7, 65):
        call = draw(replace(usual, T=T, H=len(SLOPES)))
        got = run(call, backend)
        assert all(bool(x.isfinite().all()) for x in got.values())
        assert errors(got, truth(call))["state"] < 5e-3


def test_the_same_bits_every_time(backend: str, usual: Case) -> None:
    for lengths in (None, ODD):
        call = draw(replace(usual, lengths=lengths, T=4000 if CUDA else 90, B=1))
        first = run(call, backend)
        for _ in range(5 if CUDA else 1):
            again = run(call, backend)
            assert all(torch.equal(first[name], again[name]) for name in first)


def test_deterministic_bits_of_a_batch_row(backend: str, usual: Case) -> None:
    T = 3000 if CUDA else 70
    case = replace(usual, T=T, B=3, H=2, deterministic=True)
    call = draw(case)
    together = run(call, backend)
    for b in range(3):
        alone = draw(replace(case, B=1))
        alone.inputs = [x[b : b + 1] for x in call.inputs]
        alone.sent = [x[b : b + 1] for x in call.sent]
        got = run(alone, backend)
        assert all(torch.equal(got[name][0], together[name][b]) for name in got), b


def test_deterministic_bits_of_a_document(
    backend: str, usual: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not CUDA:
        monkeypatch.setattr(plan, "SEGMENT", 1)
        monkeypatch.setattr("sferic.ops.lightning.triton.SEGMENT", 1)
    lengths = (5000, 3, 0, 9001, 77) if CUDA else (3, 70, 0, 40)
    case = replace(usual, lengths=lengths, H=2, deterministic=True)
    call = draw(case)
    together = run(call, backend)
    start = 0
    for n, length in enumerate(lengths):
        rows = slice(start, start + length)
        start += length
        if length == 0:
            continue
        alone = draw(replace(case, lengths=(length,)))
        alone.inputs = [x[rows] for x in call.inputs[:3]] + [call.inputs[3][n : n + 1]]
        alone.sent = [call.sent[0][rows], call.sent[1][n : n + 1]]
        for name, x in run(alone, backend).items():
            whole = together[name]
            same = whole[n : n + 1] if name in ("state", "dinitial") else whole[rows]
            assert torch.equal(x, same), (n, name)


def test_a_state_carried_between_two_calls(backend: str, usual: Case) -> None:
    T = 700 if CUDA else 70
    call = draw(replace(usual, T=T))
    want = truth(call)
    q, k, v, start = call.inputs
    for cut in (1, 64, T // 2, T - 1):
        options: dict[str, Any] = {"return_state": True, "backend": backend}
        first, state = attention(
            q[:, :cut], k[:, :cut], v[:, :cut], call.slopes, initial_state=start, **options
        )
        rest, end = attention(
            q[:, cut:], k[:, cut:], v[:, cut:], call.slopes, initial_state=state, **options
        )
        got = {"o": torch.cat([first, rest], dim=1), "state": end}
        assert max(errors(got, {name: want[name] for name in got}).values()) < 5e-3


@pytest.mark.parametrize("layout", ["qkv", "heads first", "padded rows"])
@pytest.mark.parametrize("lengths", [None, ODD if CUDA else (40, 0, 30)])
def test_strided_inputs(
    layout: str, lengths: tuple[int, ...] | None, backend: str, usual: Case
) -> None:
    call = draw(replace(usual, layout=layout, lengths=lengths))
    strided = run(call, backend)
    assert not call.inputs[0].is_contiguous()
    call.inputs = [x.contiguous() for x in call.inputs]
    dense = run(call, backend)
    assert all(torch.equal(strided[name], dense[name]) for name in dense)


def test_expanded_gradient(backend: str, usual: Case) -> None:
    call = draw(replace(usual, states=False))
    call.sent = [torch.ones((), dtype=usual.dtype, device=DEVICE).expand_as(call.sent[0])]
    assert max(errors(run(call, backend), truth(call)).values()) < 5e-3


@pytest.mark.parametrize("missing", ["o", "state"])
def test_gradient_of_one_output_alone(missing: str, backend: str, usual: Case) -> None:
    call = draw(usual)
    found = []
    for name, dtype in ((backend, None), ("reference", torch.float64)):
        inputs = [x.detach().to(dtype or x.dtype).requires_grad_() for x in call.inputs]
        slopes = call.slopes.to(dtype or call.slopes.dtype)
        o, state = attention(
            *inputs[:3], slopes, initial_state=inputs[3], return_state=True, backend=name
        )
        kept, sent = (state, call.sent[1]) if missing == "o" else (o, call.sent[0])
        grads = torch.autograd.grad(kept, inputs, sent.to(kept.dtype), allow_unused=True)
        found.append([torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs)])  # noqa: B905
    for got, want in zip(*found, strict=True):
        assert float((got.double() - want).norm()) <= 5e-3 * float(want.norm())


@pytest.mark.parametrize("lengths", [None, (100, 77, 90) if CUDA else (20, 17, 30)])
def test_nan_of_a_sequence_stays_there(
    lengths: tuple[int, ...] | None, backend: str, usual: Case
) -> None:
    case = replace(usual, B=3, T=100 if CUDA else 33, lengths=lengths)
    call = draw(case)
    clean = run(call, backend)
    ill: Any = slice(1, 2) if lengths is None else slice(lengths[0], lengths[0] + lengths[1])
    for x in (*call.inputs[:3], call.sent[0]):
        x[ill] = torch.nan
    got = run(call, backend)
    for name, x in got.items():
        well = torch.ones(len(x), dtype=torch.bool, device=DEVICE)
        well[slice(1, 2) if name in ("state", "dinitial") else ill] = False
        assert torch.equal(x[well], clean[name][well]), name


def test_more_programs_than_a_grid_axis_holds(backend: str) -> None:
    """B * H above 65,535; the last row has the bits that it has alone."""
    if not CUDA:
        pytest.skip("the interpreter would take minutes")
    case = Case(B=1100, T=3, H=64, states=False)
    call = draw(case)
    whole = run(call, backend)
    call.inputs, call.sent = ([x[-1:] for x in xs] for xs in (call.inputs, call.sent))
    last = Call(replace(case, B=1), call.inputs, call.slopes, None, call.sent)
    alone = run(last, backend)
    assert all(torch.equal(whole[name][-1:], x) for name, x in alone.items())
    assert max(errors(alone, truth(last)).values()) < 5e-3


def test_transposed_products(backend: str) -> None:
    """Head dim 64 on Hopper: `dot(trans(dot result), x)` is wrong there from Triton 3.4 on."""
    if backend == "triton" and CUDA:
        for K, V in ((64, 64), (64, 128), (128, 64)):
            check(Case(K=K, V=V, T=300), backend)


@GPU
@LARGE
def test_more_elements_than_32_bits_count(backend: str) -> None:
    """300,000 tokens of 64 heads: 2.46e9 elements a tensor, against two halves."""
    T, cut, H = 300_000, 150_016, 64
    slopes = torch.linspace(0.001, 0.9, H, device=DEVICE)
    q, k, v, do = (
        torch.randn(1, T, H, 128, device=DEVICE, dtype=BF16).requires_grad_(n < 3) for n in range(4)
    )
    o = attention(q, k, v, slopes, backend=backend)
    grads = torch.autograd.grad(o, (q, k, v), do)
    halves = []
    for part, first in ((slice(0, cut), True), (slice(cut, T), False)):
        pieces = [x.detach()[:, part].requires_grad_() for x in (q, k, v)]
        options = {} if first else {"initial_state": halves[0][0].detach().requires_grad_()}
        got, state = attention(*pieces, slopes, return_state=True, backend=backend, **options)
        halves.append((state, got, pieces, options.get("initial_state")))
    state, got, pieces, start = halves[1]
    *later, dstart = torch.autograd.grad(got, (*pieces, start), do[:, cut:])
    state, first, pieces, _ = halves[0]
    earlier = torch.autograd.grad([first, state], pieces, [do[:, :cut], dstart])
    for whole, a, b in zip((o, *grads), (first, *earlier), (got, *later), strict=True):
        for mine, part in ((whole[:, :cut], a), (whole[:, cut:], b)):
            for t in range(0, part.shape[1], 30_000):
                x, y = mine[0, t : t + 30_000].float(), part[0, t : t + 30_000].float()
                assert float((x - y).norm() / y.norm()) < 4e-3, t


@GPU
@LARGE
@pytest.mark.parametrize("slope", [0.0, 1e-5])
def test_no_drift_over_a_million_tokens(slope: float, backend: str) -> None:
    T, H = 1_000_000, 2
    q, k, v = (silu_positive(1, T, H, 128, dtype=BF16, seed=n) for n in range(3))
    slopes = torch.full((H,), slope, device=DEVICE)
    o, state = attention(q, k, v, slopes, return_state=True, backend=backend)
    want, end = attention(
        q.double(), k.double(), v.double(), slopes.double(), return_state=True, backend="reference"
    )
    for part in (slice(0, 1000), slice(T // 2, T // 2 + 1000), slice(T - 1000, T)):
        x, y = o[0, part].double(), want[0, part]
        assert float((x - y).norm() / y.norm()) < 5e-3
    assert float((state.double() - end).norm() / end.norm()) < 5e-3


REFUSED = {
    "float64": ({"dtype": torch.float64}, "triton", "float64 is not bfloat16"),
    "head dim": ({"K": 272}, "triton", "head dims 272 and 128 go beyond 256"),
    "float32 on hopper": ({"dtype": FP32}, "hopper", "not all bfloat16 or float16"),
    "narrow on hopper": ({"K": 64}, "hopper", "head dims 64 and 128 are not multiples of 8 in 72"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_named_backend_says_what_it_cannot_take(name: str) -> None:
    changes, backend, message = REFUSED[name]
    if backend == "hopper" and not HOPPER:
        message = "no Hopper GPU" if CUDA else "cpu is no Hopper GPU"
    call = draw(replace(Case(B=1, T=3, H=1, states=False), **changes))
    with pytest.raises(ValueError, match=message):
        run(call, backend)


def test_slopes_that_want_a_gradient_are_refused() -> None:
    call = draw(replace(TINY, states=False))
    call.slopes.requires_grad_()
    with pytest.raises(ValueError, match="slopes want a gradient"):
        run(call, "triton")


def test_no_second_derivative_in_silence(backend: str, usual: Case) -> None:
    call = draw(replace(usual, states=False))
    inputs = [x.detach().requires_grad_() for x in call.inputs]
    o = attention(*inputs, call.slopes, backend=backend)
    with pytest.raises(RuntimeError, match='no second derivative; backend="reference" has'):
        torch.autograd.grad(o.sum(), inputs[:1], create_graph=True)


@GPU
def test_auto_takes_kernels_and_says_when_it_cannot(recwarn: pytest.WarningsRecorder) -> None:
    call = draw(Case(states=False))
    assert torch.equal(run(call, "auto")["o"], run(call, BACKENDS[-1])["o"])
    narrow = draw(Case(K=64, V=64, states=False))
    assert torch.equal(run(narrow, "auto")["o"], run(narrow, "triton")["o"])
    assert not [w for w in recwarn if "plain PyTorch" in str(w.message)]
    run(draw(Case(dtype=torch.float64)), "auto")
    assert [w for w in recwarn if "plain PyTorch (hopper: " in str(w.message)]


@GPU
@pytest.mark.parametrize("lengths", [None, ODD])
def test_the_host_never_waits(lengths: tuple[int, ...] | None, backend: str, usual: Case) -> None:
    call = draw(replace(usual, lengths=lengths))
    run(call, backend)
    inputs = [x.detach().requires_grad_() for x in call.inputs]
    torch.cuda.set_sync_debug_mode("error")
    try:
        o, state = attention(
            *inputs[:3], call.slopes, initial_state=inputs[3], return_state=True,
            cu_seqlens=call.offsets, backend=backend,
        )  # fmt: skip
        torch.autograd.grad([o, state], inputs, call.sent)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@GPU
def test_forward_and_backward_in_a_graph(backend: str, usual: Case) -> None:
    call = draw(replace(usual, lengths=ODD))
    want = run(call, backend)
    inputs = [x.detach().requires_grad_() for x in call.inputs]

    def both() -> tuple[Tensor, ...]:
        o, state = attention(
            *inputs[:3], call.slopes, initial_state=inputs[3], return_state=True,
            cu_seqlens=call.offsets, backend=backend,
        )  # fmt: skip
        return o, state, *torch.autograd.grad([o, state], inputs, call.sent)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        both()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = both()
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(results, want.values(), strict=True))
