"""The correctness matrix of the lightning kernels: cases, the truth, and the yardstick."""

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sferic.ops import lightning_attention

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
HOPPER = CUDA and torch.cuda.get_device_capability() == (9, 0)
SLOPES = (0.0, 1e-5, 0.05, 0.917, 8.0, 100.0)


@dataclass(frozen=True)
class Case:
    """Inputs of one call: a batch [B, T, ...], or a pack if `lengths` is given."""

    B: int = 2
    T: int = 257
    lengths: tuple[int, ...] | None = None
    H: int = 6
    K: int = 128
    V: int = 128
    dtype: torch.dtype = torch.bfloat16
    states: bool = True  # with an initial state, and the final one returned
    deterministic: bool = False
    tf32: bool = False
    layout: str = "contiguous"  # or "qkv", "heads first", "padded rows"

    @property
    def sequences(self) -> int:
        return self.B if self.lengths is None else len(self.lengths)


@dataclass
class Call:
    """Tensors of a case, and the gradients that will be sent back."""

    case: Case
    inputs: list[Tensor]  # q, k, v and the initial state
    slopes: Tensor
    offsets: Tensor | None
    sent: list[Tensor]  # to o and the final state
    results: dict[str, Tensor] = field(default_factory=dict)


def draw(case: Case, seed: int = 0, device: torch.device = DEVICE) -> Call:
    """Random inputs of a case."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    batch = (case.B, case.T) if case.lengths is None else (sum(case.lengths),)
    inputs = [_lay(normal, batch, case.H, width, case) for width in (case.K, case.K, case.V)]
    if case.layout == "qkv":
        assert case.K == case.V
        inputs = list(normal(*batch, case.H, 3, case.K).to(case.dtype).unbind(-2))
    sent = [normal(*batch, case.H, case.V).to(case.dtype)]
    if case.states:
        shape = (case.sequences, case.H, case.K, case.V)
        inputs.append(normal(*shape))
        sent.append(normal(*shape))
    offsets = None
    if case.lengths is not None:
        ends = list(accumulate(case.lengths, initial=0))
        offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    slopes = torch.tensor(SLOPES, device=device).repeat(-(-case.H // 6))[: case.H]
    return Call(case, inputs, slopes, offsets, sent)


def _lay(normal: Any, batch: tuple[int, ...], H: int, width: int, case: Case) -> Tensor:
    if case.layout == "heads first":
        return normal(*batch[:-1], H, batch[-1], width).to(case.dtype).transpose(-3, -2)
    if case.layout == "padded rows":
        return normal(*batch, H, width + 8).to(case.dtype)[..., :width]
    return normal(*batch, H, width).to(case.dtype)


def run(call: Call, backend: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Outputs and gradients by name; in another dtype if one is given."""
    case = call.case
    double = dtype == torch.float64
    inputs = [x.detach() if dtype is None else x.detach().to(dtype) for x in call.inputs]
    inputs = [x.requires_grad_() for x in inputs]
    attention: Any = lightning_attention
    result = attention(
        *inputs[:3],
        call.slopes.double() if double else call.slopes,
        initial_state=inputs[3] if case.states else None,
        return_state=case.states,
        cu_seqlens=call.offsets,
        deterministic=case.deterministic,
        backend=backend,
    )
    outputs = list(result) if case.states else [result]
    return _named(case, outputs, inputs, call.sent)


def truth(call: Call) -> dict[str, Tensor]:
    """The same in float64."""
    return run(call, "reference", torch.float64)


def yardstick(call: Call) -> dict[str, Tensor]:
    """The same by the block form, every product in the inputs' own precision."""
    case = call.case
    inputs = [x.detach().clone().requires_grad_() for x in call.inputs]
    q, k, v = inputs[:3]
    if call.offsets is None:
        parts = [(q[b], k[b], v[b]) for b in range(case.B)]
    else:
        ends = call.offsets.tolist()
        parts = [(q[a:b], k[a:b], v[a:b]) for a, b in pairwise(ends)]
    zeros = torch.zeros(case.sequences, case.H, case.K, case.V, device=q.device)
    states = inputs[3] if case.states else zeros
    pairs = [_plain(*part, call.slopes, states[n]) for n, part in enumerate(parts)]
    join = torch.stack if call.offsets is None else torch.cat
    outputs = [join([o for o, _ in pairs])]
    if case.states:
        outputs.append(torch.stack([state for _, state in pairs]))
    return _named(case, outputs, inputs, call.sent)


def _plain(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence [T, H, .], chunks of 64, operands rounded to the inputs' dtype."""
    T, dtype, outputs = len(q), q.dtype, [v[:0]]
    s = slopes[:, None, None]
    for t in range(0, T, 64):
        qc, kc, vc = (x[t : t + 64].transpose(0, 1) for x in (q, k, v))  # [H, n, .]
        r = torch.arange(qc.shape[1], device=q.device, dtype=torch.float32)
        distance = r[:, None] - r
        mask = torch.exp(-s * distance.clamp(min=0)) * (distance >= 0)
        inside = ((qc @ kc.mT).float() * mask).to(dtype) @ vc
        before = (qc @ state.to(dtype)).float() * torch.exp(-s * (r[:, None] + 1))
        weighted = (kc.float() * torch.exp(-s * (len(r) - 1 - r)[:, None])).to(dtype)
        state = torch.exp(-s * len(r)) * state + (weighted.mT @ vc).float()
        outputs.append((inside.float() + before).to(dtype).transpose(0, 1))
    return torch.cat(outputs), state


def _named(
    case: Case, outputs: list[Tensor], inputs: list[Tensor], sent: list[Tensor]
) -> dict[str, Tensor]:
    sent = [s.to(o.dtype) for s, o in zip(sent, outputs, strict=True)]
    gradients = torch.autograd.grad(outputs, inputs, sent)
    names = ["o", "state"][: len(outputs)] + ["dq", "dk", "dv", "dinitial"][: len(inputs)]
    return dict(zip(names, [*(o.detach() for o in outputs), *gradients], strict=True))


def errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Relative L2 error of each result, worst head; not finite is infinite."""
    assert got.keys() == want.keys()
    worst = {}
    for name, x in got.items():
        y = want[name]
        assert x.shape == y.shape, name
        heads = -3 if name in ("state", "dinitial") else -2
        x, y = (z.double().movedim(heads, 0).flatten(1) for z in (x, y))
        if x.numel() == 0:
            continue
        scale = y.norm(dim=1).clamp(min=1e-30)
        finite = bool(x.isfinite().all())
        worst[name] = float(((x - y).norm(dim=1) / scale).max()) if finite else torch.inf
    return worst


def check(case: Case, backend: str, seed: int = 0) -> None:
    """Hold a backend to its bar: 2x the yardstick's error at 16 bits, 1e-5 in float32."""
    call = draw(case, seed)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = case.tf32
    try:
        got = run(call, backend)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    want = truth(call)
    found = errors(got, want)
    if case.dtype == torch.float32:
        bars = dict.fromkeys(found, 2e-3 if case.tf32 else 1e-5)
    else:
        # below: what rounding the result alone costs
        least = torch.finfo(case.dtype).eps / 2
        bars = {name: max(2 * e, least) for name, e in errors(yardstick(call), want).items()}
    assert all(found[name] <= bars[name] for name in found), (found, bars)


def silu_positive(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """SiLU of normal numbers, kept positive: a state of them only grows."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return F.silu(torch.randn(*shape, generator=generator, device=DEVICE)).abs().to(dtype)
