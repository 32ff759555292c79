"""One sequence or a batch of equal ones: all forms against the recurrence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sferic.ops import lightning_attention
from sferic.ops.lightning import blocks, lightning_slopes
from sferic.ops.lightning.blocks import lightning_blocks
from sferic.ops.lightning.reference import lightning_quadratic, lightning_recurrent

Recurrence = Callable[..., tuple[Tensor, Tensor]]
Error = Callable[..., float]

attention: Callable[..., Any] = lightning_attention

SLOPES = torch.tensor([0, 1e-5, 0.01, 0.917, 8, 100], dtype=torch.float64)
FORMS = {
    "recurrent": lightning_recurrent,
    "quadratic": lightning_quadratic,
    "blocks": lightning_blocks,
}


def draw(
    *shape: int, V: int | None = None, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k of a shape [..., H, K], and v [..., H, V]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [shape, shape, (*shape[:-1], shape[-1] if V is None else V)]
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return q, k, v


def gradients(outputs: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Gradients of fixed random weights times every output."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in outputs]
    weights = [w.to(o.dtype) for w, o in zip(weights, outputs, strict=True)]
    return list(torch.autograd.grad(outputs, inputs, weights))


def check_against_recurrence(
    form: Callable[..., Any],
    recurrence: Recurrence,
    error: Error,
    shape: tuple[int, ...],
    V: int,
    with_state: bool,
) -> None:
    q, k, v = draw(*shape, V=V)
    inputs = [q, k, v]
    B, _, H, K = shape
    if with_state:
        inputs.append(torch.randn(B, H, K, V, dtype=torch.float64))
    for x in inputs:
        x.requires_grad_()
    slopes = SLOPES[:H]
    got = form(q, k, v, slopes, *inputs[3:])
    each = [
        recurrence(q[b], k[b], v[b], slopes, inputs[3][b] if with_state else None) for b in range(B)
    ]
    want = [torch.stack([pair[i] for pair in each]) for i in range(2)]
    assert error(got[0], want[0]) < 1e-12
    assert error(got[1], want[1], -3) < 1e-12
    places = (-2, -2, -2, -3)
    pairs = zip(gradients(got, inputs), gradients(want, inputs), places, strict=False)
    for name, (a, b, heads) in zip(("dq", "dk", "dv", "dstate"), pairs, strict=False):
        assert error(a, b, heads) < 1e-12, name


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 127, 130, 257])
def test_forms_equal_the_recurrence(
    form: str, T: int, with_state: bool, recurrence: Recurrence, error: Error
) -> None:
    shape = (2 if T < 100 else 1, T, 6, 16)
    check_against_recurrence(FORMS[form], recurrence, error, shape, 8, with_state)


@settings(max_examples=40)
@given(
    T=st.integers(1, 33),
    B=st.integers(1, 3),
    H=st.integers(1, 6),
    K=st.sampled_from([16, 33, 64, 256]),
    V=st.sampled_from([1, 16, 40]),
    block=st.sampled_from([1, 2, 3, 5, 8]),
    group=st.sampled_from([1, 2, 3, 64]),
    with_state=st.booleans(),
)
def test_blocks_and_groups_of_any_size_equal_the_recurrence(
    T: int,
    B: int,
    H: int,
    K: int,
    V: int,
    block: int,
    group: int,
    with_state: bool,
    recurrence: Recurrence,
    error: Error,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", block)
        patch.setattr(blocks, "GROUP", group)
        check_against_recurrence(lightning_blocks, recurrence, error, (B, T, H, K), V, with_state)


def test_operator_returns_what_was_asked_for(recurrence: Recurrence, error: Error) -> None:
    q, k, v = draw(2, 70, 6, 16)
    start = torch.randn(2, 6, 16, 16, dtype=torch.float64)
    o = attention(q, k, v, SLOPES)
    assert torch.is_tensor(o)
    o2, state = attention(q, k, v, SLOPES, initial_state=start, return_state=True)
    for b in range(2):
        assert error(o[b], recurrence(q[b], k[b], v[b], SLOPES)[0]) < 1e-12
        want, final = recurrence(q[b], k[b], v[b], SLOPES, start[b])
        assert error(o2[b], want) < 1e-12
        assert error(state[b], final, -3) < 1e-12


@pytest.mark.parametrize("deterministic", [False, True])
def test_two_calls_with_the_state_carried_equal_one(deterministic: bool, error: Error) -> None:
    q, k, v = draw(2, 200, 6, 16)
    options: dict[str, Any] = {"return_state": True, "deterministic": deterministic}
    whole, final = attention(q, k, v, SLOPES, **options)
    for cut in (0, 1, 64, 77, 199, 200):
        first, state = attention(q[:, :cut], k[:, :cut], v[:, :cut], SLOPES, **options)
        rest, end = attention(
            q[:, cut:], k[:, cut:], v[:, cut:], SLOPES, initial_state=state, **options
        )
        assert error(torch.cat([first, rest], dim=1), whole) < 1e-12
        assert error(end, final, -3) < 1e-12


@pytest.mark.parametrize(("T", "H", "K"), [(3, 2, 64), (17, 6, 5), (150, 6, 16)])
def test_deterministic_bits_do_not_depend_on_the_rest_of_the_batch(T: int, H: int, K: int) -> None:
    """In shapes whose products, batched, round otherwise on a CPU."""
    q, k, v = draw(5, T, H, K, dtype=torch.float32)

    def run(rows: list[int]) -> tuple[Tensor, Tensor]:
        some = [x[rows] for x in (q, k, v)]
        return attention(*some, 0.1 + SLOPES[:H], return_state=True, deterministic=True)

    o, state = run([0, 1, 2, 3, 4])
    for n in range(5):
        for rows in ([n], [(n + 1) % 5, n]):
            o2, state2 = run(rows)
            assert torch.equal(o2[-1], o[n])
            assert torch.equal(state2[-1], state[n])


def test_float32_is_within_1e5_of_float64(recurrence: Recurrence, error: Error) -> None:
    exact = [x.requires_grad_() for x in draw(300, 6, 32)]
    single = [x.detach().float().requires_grad_() for x in exact]
    o, state = attention(*(x[None] for x in single), SLOPES, return_state=True)
    assert o.dtype == state.dtype == torch.float32
    want = recurrence(*exact, SLOPES)
    assert error(o[0], want[0]) < 1e-5
    assert error(state[0], want[1], -3) < 1e-5
    pairs = zip(gradients((o[0], state[0]), single), gradients(want, exact), strict=True)
    for got, expected in pairs:
        assert got.dtype == torch.float32
        assert error(got, expected) < 1e-5


def test_bf16_error_is_at_most_twice_that_of_the_plain_formula(
    recurrence: Recurrence, error: Error
) -> None:
    T = 200
    q, k, v = (x.requires_grad_() for x in draw(T, 6, 32, dtype=torch.bfloat16))
    distance = torch.arange(T)[:, None] - torch.arange(T)
    mask = torch.exp(-SLOPES[:, None, None] * distance.clamp(min=0)) * (distance >= 0)
    scores = torch.einsum("ihk,jhk->hij", q, k) * mask.to(torch.bfloat16)
    plain = torch.einsum("hij,jhv->ihv", scores, v)
    ours = attention(q[None], k[None], v[None], SLOPES)
    assert ours.dtype == torch.bfloat16
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want = recurrence(*exact, SLOPES)[:1]
    for head in range(6):
        bound = 2 * error(plain[:, [head]], want[0][:, [head]])
        assert error(ours[0][:, [head]], want[0][:, [head]]) <= bound
    mine, theirs = gradients((ours[0],), [q, k, v]), gradients((plain,), [q, k, v])
    for a, b, c in zip(mine, theirs, gradients(want, exact), strict=True):
        assert error(a, c) <= 2 * error(b, c)


def test_state_is_float32_for_bf16_inputs() -> None:
    q, k, v = draw(1, 5, 6, 16, dtype=torch.bfloat16)
    _, state = attention(q, k, v, SLOPES, return_state=True)
    assert state.dtype == torch.float32


@pytest.mark.parametrize("packed", [False, True])
def test_views_of_a_fused_projection_give_the_numbers_of_copies(packed: bool) -> None:
    qkv = torch.randn(130, 6, 3, 16, dtype=torch.float64)
    options: dict[str, Any] = {}
    if packed:
        options["cu_seqlens"] = torch.tensor([0, 50, 130], dtype=torch.int32)
    else:
        qkv = qkv[None]
    views = qkv.unbind(-2)
    assert not views[0].is_contiguous()
    got = attention(*views, SLOPES, **options)
    want = attention(*(x.contiguous() for x in views), SLOPES, **options)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    time_last = [x.transpose(-3, -2).contiguous().transpose(-3, -2) for x in views]
    got = attention(*time_last, SLOPES, **options)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


def test_expanded_gradient_of_the_output() -> None:
    inputs = [x.requires_grad_() for x in draw(2, 70, 6, 16)]
    o = attention(*inputs, SLOPES)
    expanded = torch.ones((), dtype=torch.float64).expand_as(o)
    got = torch.autograd.grad(o, inputs, expanded, retain_graph=True)
    want = torch.autograd.grad(o, inputs, expanded.contiguous())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("packed", [False, True])
def test_no_loop_over_blocks_and_linear_memory(packed: bool, operators: type[Any]) -> None:
    def run(T: int) -> Any:
        x = torch.ones(T, 2, 16)
        with operators() as seen:
            if packed:
                cu_seqlens = torch.tensor([0, 100, T // 2, T], dtype=torch.int32)
                attention(x, x, x, SLOPES[:2], cu_seqlens=cu_seqlens)
            else:
                attention(x[None], x[None], x[None], SLOPES[:2])
        return seen

    group = blocks.BLOCK * blocks.GROUP
    runs = [run(n) for n in (group // 4, group, 2 * group, 3 * group)]
    counts = [len(seen.names) for seen in runs]
    assert counts[0] == counts[1]
    assert max(counts[2] - counts[1], counts[3] - counts[2]) < 40  # of one more group
    assert runs[2].largest <= 2 * runs[1].largest <= 4 * group * 2 * blocks.BLOCK


def test_empty_batches_and_sequences() -> None:
    for B, T in ((0, 3), (2, 0)):
        x = torch.zeros(B, T, 6, 16)
        o, state = attention(x, x, x, SLOPES, return_state=True)
        assert o.shape == x.shape
        assert torch.equal(state, torch.zeros(B, 6, 16, 16))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "three dims": ({"q": torch.zeros(4, 2, 8)}, r"q \[4, 2, 8\], k \[1, 4, 2, 8\].*\[B, T, H, K\]"),
    "q unlike k": ({"q": torch.zeros(1, 4, 2, 7)}, r"q \[1, 4, 2, 7\], k \[1, 4, 2, 8\]"),
    "v shorter": ({"v": torch.zeros(1, 3, 2, 8)}, r"v \[1, 3, 2, 8\]"),
    "v of other heads": ({"v": torch.zeros(1, 4, 1, 8)}, r"v \[1, 4, 1, 8\]"),
    "slopes of other heads": ({"slopes": torch.ones(3)}, r"slopes \[3\] must be \[H\] = \[2\]"),
    "slopes with batch": ({"slopes": torch.ones(1, 2)}, r"slopes \[1, 2\]"),
    "negative slope": ({"slopes": torch.tensor([1.0, -0.5])}, r"slopes must be >= 0.*-0\.5"),
    "nan slope": ({"slopes": torch.tensor([1.0, torch.nan])}, r"slopes must be >= 0.*nan"),
    "state of other batch": (
        {"initial_state": torch.zeros(2, 2, 8, 8)},
        r"initial_state \[2, 2, 8, 8\] must be \[1, 2, 8, 8\]",
    ),
    "transposed state": (
        {"v": torch.zeros(1, 4, 2, 5), "initial_state": torch.zeros(1, 2, 5, 8)},
        r"initial_state \[1, 2, 5, 8\] must be \[1, 2, 8, 5\]",
    ),
    "batch with cu_seqlens": (
        {"cu_seqlens": torch.tensor([0, 4])},
        r"q \[1, 4, 2, 8\].*\[T, H, K\] with cu_seqlens",
    ),
    "backend": ({"backend": "cuda"}, "backend 'cuda' is not one of 'auto', 'reference'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case: str) -> None:
    x = torch.zeros(1, 4, 2, 8)
    changes, message = BAD[case]
    arguments = {"q": x, "k": x, "v": x, "slopes": torch.ones(2), **changes}
    with pytest.raises(ValueError, match=message):
        attention(**arguments)


@pytest.mark.parametrize(
    "cu_seqlens", [[1, 4], [0, 3], [0, 5], [0, 3, 2, 4], [0, 5, 4], [], [[0, 4]]]
)
def test_bad_cu_seqlens_are_shown(cu_seqlens: list[int]) -> None:
    x = torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match=r"cu_seqlens \[.*must rise from 0 .* tokens, 4"):
        attention(x, x, x, torch.ones(2), cu_seqlens=torch.tensor(cu_seqlens))


def test_state_of_a_pack_has_one_row_per_document() -> None:
    x = torch.zeros(4, 2, 8)
    cu_seqlens = torch.tensor([0, 2, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"initial_state \[1, 2, 8, 8\] must be \[2, 2, 8, 8\]"):
        attention(
            x, x, x, torch.ones(2), cu_seqlens=cu_seqlens, initial_state=torch.zeros(1, 2, 8, 8)
        )


def test_reference_backend_is_the_block_form() -> None:
    q, k, v = draw(1, 70, 6, 16)
    got = attention(q, k, v, SLOPES, backend="reference")
    torch.testing.assert_close(got, lightning_blocks(q, k, v, SLOPES)[0], rtol=0, atol=0)


def test_slopes_of_the_released_model() -> None:
    first = lightning_slopes(64, 0, 80)
    assert first[0] == pytest.approx(2 ** (-8 / 64) * (1 + 1e-5), rel=1e-15)
    assert first[0] == pytest.approx(0.917, abs=5e-4)
    assert first[63] == pytest.approx(0.0039, abs=5e-5)
    assert len(first) == 64
    late = lightning_slopes(64, 78, 80)
    for a, b in zip(first, late, strict=True):
        assert b / a == pytest.approx(0.01268, rel=1e-3)
    assert lightning_slopes(64, 79, 80)[0] == pytest.approx(0.917e-5, rel=1e-3)


@pytest.mark.parametrize(
    ("heads", "powers"),
    [
        (1, [8]),
        (2, [4, 8]),
        (3, [4, 8, 2]),
        (6, [2, 4, 6, 8, 1, 3]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
        (48, [n / 4 for n in range(1, 33)] + [n / 8 for n in range(1, 33, 2)]),
    ],
)
def test_slopes_of_other_head_counts_interpolate_as_in_alibi(
    heads: int, powers: list[float]
) -> None:
    want = [2**-p * (1 + 1e-5) for p in powers]
    assert lightning_slopes(heads, 0, 10) == pytest.approx(want, rel=1e-14)


def test_slopes_of_a_model_of_one_layer() -> None:
    assert lightning_slopes(2, 0, 1) == pytest.approx([2**-4 * 1.00001, 2**-8 * 1.00001])
