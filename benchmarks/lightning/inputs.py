"""Random inputs, several sets of them, so that no call finds its data in the cache."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.lightning.plan import HEAD_DIM, Case

PIECE = 2**28  # elements drawn at once, in float32

QKV = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Inputs:
    """q, k and v of every set in one buffer that both layouts view.

    The numbers are independent, so each layout is as random as the other and a case of 51 GB fits
    once.
    """

    case: Case
    flat: Tensor  # [sets, 3 * elements] bf16, silu of normal numbers
    do: tuple[Tensor, ...]  # [B, N, H, 128] bf16 of each set, normal; none without a backward

    def views(self, layout: str) -> list[QKV]:
        """q, k, v [B, N, H, 128] of each set; they require grad if the case has a backward.

        "contiguous": three tensors; "qkv": strided views of one [B, N, H, 3, 128], as a fused
        projection leaves them.
        """
        shape = (self.case.B, self.case.N, self.case.H)
        sets = []
        for row in self.flat:
            if layout == "contiguous":
                parts = row.view(3, *shape, HEAD_DIM).unbind(0)
            else:
                parts = row.view(*shape, 3, HEAD_DIM).unbind(-2)
            q, k, v = (x.detach().requires_grad_(self.case.backward) for x in parts)
            sets.append((q, k, v))
        return sets


def draw(case: Case, sets: int, device: torch.device) -> Inputs:
    """Inputs of so many sets; the same on every call."""
    generator = torch.Generator(device).manual_seed(0)
    flat = torch.empty(sets, 3 * case.elements, device=device, dtype=torch.bfloat16)
    for piece in flat.view(-1).split(PIECE):
        normal = torch.randn(len(piece), generator=generator, device=device)
        piece.copy_(F.silu(normal, inplace=True))
    do: tuple[Tensor, ...] = ()
    if case.backward:
        shape = (case.B, case.N, case.H, HEAD_DIM)
        do = tuple(
            torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(sets)
        )
    return Inputs(case, flat, do)


def document_offsets(documents: int, tokens: int, device: torch.device) -> Tensor:
    """cu_seqlens [documents + 1] int32 of documents of random lengths, none empty."""
    generator = torch.Generator().manual_seed(0)
    cuts = 1 + torch.randperm(tokens - 1, generator=generator)[: documents - 1].sort().values
    ends = torch.tensor([0, tokens])
    return torch.cat([ends[:1], cuts, ends[1:]]).to(device, torch.int32)
