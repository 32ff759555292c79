"""Nothing is timed that is wrong: errors against float64, with a limit from plain PyTorch.

A result's error is the worst head's relative L2 distance from the float64 truth.  It may be at most
`FACTOR` times that of the plain block form on the same bf16 inputs, results rounded to bf16.  For
the operators on a pool, whose plain form may be the fast one by another name, the limit is `FACTOR`
times what rounding the truth to bf16 costs; a state that decode keeps may be `FLOAT32` away.
"""

from collections.abc import Iterable
from itertools import pairwise, product

import torch
from torch import Tensor

from benchmarks.lightning.impls import Impl, Serving
from benchmarks.lightning.inputs import QKV, draw
from benchmarks.lightning.plan import HEAD_DIM, Case, slopes
from sferic.ops import lightning_attention
from sferic.ops.lightning.reference import lightning_quadratic, lightning_recurrent

FACTOR = 2.0
FLOAT32 = 1e-5
DOCUMENTS = (1, 63, 64, 65, 207)  # lengths of the pack that is checked

Results = dict[str, Tensor]


class Refused(RuntimeError):
    """An operator's result is wrong, so it is not timed."""


def worst_head(got: Tensor, truth: Tensor, heads: int = -2) -> float:
    """Relative L2 distance of the worst head; infinity for another shape or non-finite numbers.

    Args:
        got: what an operator returned.
        truth: the same in float64.
        heads: the dimension of the heads.
    """
    if got.shape != truth.shape or not bool(got.isfinite().all()):
        return float("inf")
    want = truth.detach().movedim(heads, 0).flatten(1)
    error = got.detach().double().movedim(heads, 0).flatten(1) - want
    return float((error.norm(dim=1) / want.norm(dim=1).clamp(min=1e-300)).max())


def hold(what: str, got: Results, plain: Results, truth: Results, heads: int = -2) -> float:
    """The worst error of an operator's results, all within their limits.

    Args:
        what: names operator and inputs in the message.
        got: the operator's results.
        plain: those of plain PyTorch, rounded to bf16 here.
        truth: those in float64.
        heads: the dimension of the heads, in every one.

    Raises:
        Refused: a limit is passed.
    """
    worst = 0.0
    for name, right in truth.items():
        error = worst_head(got[name], right, heads)
        limit = FACTOR * worst_head(plain[name].bfloat16(), right, heads)
        if not error <= limit:
            raise Refused(f"{what}: error of {name} is {error:.2e}, limit {limit:.2e}: not timed")
        worst = max(worst, error)
    return worst


def check_attention(impl: Impl, cases: Iterable[Case], device: torch.device) -> dict[str, float]:
    """Worst errors {"fwd": o's, "fwd+bwd": those of o, dq, dk and dv} over small cases.

    Raises:
        Refused: one is past its limit.
    """
    errors = {"fwd": 0.0, "fwd+bwd": 0.0}
    layouts = ("contiguous", "qkv") if impl.ours else ("contiguous",)  # those that are timed
    for case, when, layout in product(cases, ("early", "late"), layouts):
        inputs = draw(case, 1, device)
        qkv, do = inputs.views(layout)[0], inputs.do[0]
        decay = slopes(case.H, when, device)
        got = with_gradients(impl.attention(*qkv, decay), qkv, do)
        plain, truth = _softmax(qkv, do) if impl.softmax else _linear(qkv, do, decay)
        what = f"{impl.name}, {case.name}, {when} slopes, {layout}"
        both = hold(what, got, plain, truth)
        errors["fwd+bwd"] = max(errors["fwd+bwd"], both)
        errors["fwd"] = max(errors["fwd"], worst_head(got["o"], truth["o"]))
    return errors


def with_gradients(o: Tensor, qkv: QKV, do: Tensor) -> Results:
    """o and the gradients of q, k and v."""
    dq, dk, dv = torch.autograd.grad(o, qkv, do.to(o.dtype))
    return {"o": o.detach(), "dq": dq, "dk": dk, "dv": dv}


def _doubles(qkv: QKV) -> QKV:
    q, k, v = (x.detach().double().requires_grad_() for x in qkv)
    return q, k, v


def _linear(qkv: QKV, do: Tensor, decay: Tensor) -> tuple[Results, Results]:
    o = lightning_attention(*qkv, decay, backend="reference")
    assert isinstance(o, Tensor)
    plain = with_gradients(o, qkv, do)
    double = _doubles(qkv)
    return plain, with_gradients(lightning_quadratic(*double, decay)[0], double, do)


def _softmax(qkv: QKV, do: Tensor) -> tuple[Results, Results]:
    plain = with_gradients(_softmax_by_hand(*qkv), qkv, do)
    double = _doubles(qkv)
    return plain, with_gradients(_softmax_by_hand(*double), double, do)


def _softmax_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention, every step in the dtype of the inputs."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    later = torch.ones_like(scores[0, 0]).triu(1).bool()
    return (scores.masked_fill(later, float("-inf")).softmax(-1) @ v).transpose(1, 2)


def check_packed(impl: Impl, heads: int, device: torch.device) -> dict[str, float]:
    """As `check_attention`, of a pack of documents.

    Raises:
        Refused: an error is past its limit.
    """
    inputs = draw(Case(1, sum(DOCUMENTS), heads), 1, device)
    q, k, v = inputs.views("contiguous")[0]
    decay = slopes(heads, "early", device)
    ends = torch.tensor((0, *DOCUMENTS)).cumsum(0).to(device, torch.int32)

    def run(attention: Impl) -> Results:
        o = attention.attention(q[0], k[0], v[0], decay, cu_seqlens=ends)
        return with_gradients(o[None], (q, k, v), inputs.do[0])

    plain = run(Impl("plain", _reference))
    double = _doubles((q, k, v))
    parts = [_truth(double, decay, a, b)[0] for a, b in pairwise(ends.tolist())]
    truth = with_gradients(torch.cat(parts, 1), double, inputs.do[0])
    got = run(impl)
    both = hold(f"{impl.name}, pack of {len(DOCUMENTS)} documents", got, plain, truth)
    return {"fwd": worst_head(got["o"], truth["o"]), "fwd+bwd": both}


def _truth(
    qkv: QKV, decay: Tensor, begin: int, end: int, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """o and final state of the tokens from `begin` to `end`, in float64."""
    q, k, v = (x[:, begin:end].double() for x in qkv)
    return lightning_quadratic(q, k, v, decay, None if state is None else state.double())


def _reference(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, cu_seqlens: Tensor) -> Tensor:
    o = lightning_attention(q, k, v, decay, cu_seqlens=cu_seqlens, backend="reference")
    assert isinstance(o, Tensor)
    return o


def check_decode(serving: Serving, heads: int, device: torch.device) -> float:
    """Worst error of o after a few steps; the states must be right in float32.

    Raises:
        Refused: an error is past its limit.
    """
    rows, steps = 3, 4
    q, k, v = draw(Case(rows, steps, heads, backward=False), 1, device).views("contiguous")[0]
    decay = slopes(heads, "early", device)
    pool = _random_states(rows + 2, heads, device)
    slots = torch.tensor([4, 0, 2], device=device, dtype=torch.int32)
    o, state = lightning_recurrent(
        q.double(), k.double(), v.double(), decay, pool[slots.long()].double()
    )

    outputs = [serving.decode(q[:, t], k[:, t], v[:, t], decay, pool, slots) for t in range(steps)]
    got = torch.stack(outputs, 1)
    states = worst_head(pool[slots.long()], state, 1)
    if not states <= FLOAT32:
        raise Refused(f"decode: error of the state is {states:.2e}, limit {FLOAT32:.0e}: not timed")
    return hold("decode", {"o": got}, {"o": o}, {"o": o})


def check_prefill(serving: Serving, heads: int, device: torch.device) -> float:
    """Worst error of o, of the states and of a state written on the way.

    Raises:
        Refused: one is past its limit.
    """
    lengths, begin, way = (130, 1, 333), (0, 130, 131), 192
    qkv = draw(Case(1, sum(lengths), heads, backward=False), 1, device).views("contiguous")[0]
    decay = slopes(heads, "early", device)
    slots, has_state = [3, 0, 5], [True, False, True]
    start = _random_states(7, heads, device)
    pool = start.clone()

    def integers(*numbers: int) -> Tensor:
        return torch.tensor(numbers, device=device, dtype=torch.int32)

    o = serving.prefill(
        *(x[0] for x in qkv),
        decay,
        pool,
        integers(*slots),
        torch.tensor(has_state, device=device),
        integers(*begin, sum(lengths)),
        checkpoints=(integers(2), integers(way), integers(1)),
    )
    before = [start[n : n + 1] * known for n, known in zip(slots, has_state, strict=True)]
    parts = [
        _truth(qkv, decay, a, a + n, state)
        for a, n, state in zip(begin, lengths, before, strict=True)
    ]
    parts.append(_truth(qkv, decay, begin[2], begin[2] + way, before[2]))
    outputs = torch.cat([part for part, _ in parts[:3]], 1)[0]
    states = torch.cat([state for _, state in parts])
    return max(
        hold("prefill", {"o": o}, {"o": outputs}, {"o": outputs}),
        hold("prefill", {"state": pool[[*slots, 1]]}, {"state": states}, {"state": states}, 1),
    )


def _random_states(slots: int, heads: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(1)
    shape = (slots, heads, HEAD_DIM, HEAD_DIM)
    return torch.randn(shape, generator=generator, device=device)
