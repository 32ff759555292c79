"""The operators as functions of a set's number: what a clock runs."""

from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.lightning.impls import Impl, Serving
from benchmarks.lightning.inputs import Inputs, document_offsets, draw
from benchmarks.lightning.plan import HEAD_DIM, Case, slopes
from benchmarks.lightning.timing import Call


def training_call(impl: Impl, inputs: Inputs, when: str, layout: str, passes: str) -> Call:
    """Run a pass on set i; inputs require grad, so a forward saves what its backward needs."""
    views, decay = inputs.views(layout), slopes(inputs.case.H, when, inputs.flat.device)
    count = len(views)

    def forward(i: int) -> Tensor:
        return impl.attention(*views[i % count], decay)

    def both(i: int) -> object:
        return torch.autograd.grad(forward(i), views[i % count], inputs.do[i % count])

    return forward if passes == "fwd" else both


def forward_call(impl: Impl, inputs: Inputs) -> Call:
    """A forward of set i that saves nothing."""
    views = [tuple(x.detach() for x in qkv) for qkv in inputs.views("contiguous")]
    decay = slopes(inputs.case.H, "early", inputs.flat.device)
    return lambda i: impl.attention(*views[i % len(views)], decay)


def packed_call(impl: Impl, inputs: Inputs, documents: int, passes: str) -> Call:
    """As `training_call`, on a pack of so many documents."""
    device = inputs.flat.device
    decay = slopes(inputs.case.H, "early", device)
    ends = document_offsets(documents, inputs.case.N, device)
    views = [
        tuple(x.detach()[0].requires_grad_() for x in qkv) for qkv in inputs.views("contiguous")
    ]
    do = [x[0] for x in inputs.do]
    count = len(views)

    def forward(i: int) -> Tensor:
        return impl.attention(*views[i % count], decay, cu_seqlens=ends)

    def both(i: int) -> object:
        return torch.autograd.grad(forward(i), views[i % count], do[i % count])

    return forward if passes == "fwd" else both


def decode_call(serving: Serving, case: Case, sets: int, device: torch.device) -> Call:
    """One step of the rows of set i: every set has its own slots, scattered over the pool."""
    pool = torch.randn(sets * case.B, case.H, HEAD_DIM, HEAD_DIM, device=device)
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(0))
    slots = order.view(sets, case.B).to(device, torch.int32).unbind()
    inputs = draw(replace(case, backward=False), sets, device)
    rows = [tuple(x[:, 0] for x in qkv) for qkv in inputs.views("contiguous")]
    decay = slopes(case.H, "early", device)

    def call(i: int) -> object:
        return serving.decode(*rows[i % sets], decay, pool, slots[i % sets])

    return call


def prefill_call(serving: Serving, inputs: Inputs, every: int) -> Call:
    """Prefill of set i, which writes a state after each `every` tokens of a sequence."""
    case, device = inputs.case, inputs.flat.device
    way = [(sequence, n) for sequence in range(case.B) for n in range(every, case.N, every)]

    def integers(*numbers: int) -> Tensor:
        return torch.tensor(numbers, device=device, dtype=torch.int32)

    slots = integers(*range(case.B))
    ends = integers(*(case.N * n for n in range(case.B + 1)))
    checkpoints = (
        integers(*(sequence for sequence, _ in way)),
        integers(*(n for _, n in way)),
        integers(*range(case.B, case.B + len(way))),
    )
    pool = torch.zeros(case.B + len(way), case.H, HEAD_DIM, HEAD_DIM, device=device)
    decay = slopes(case.H, "early", device)
    has_state = slots % 2 == 0
    packs = [tuple(x.detach().flatten(0, 1) for x in qkv) for qkv in inputs.views("contiguous")]

    @torch.no_grad()
    def call(i: int) -> object:
        qkv = packs[i % len(packs)]
        return serving.prefill(*qkv, decay, pool, slots, has_state, ends, checkpoints=checkpoints)

    return call
