"""The shapes that are timed, and how long the device idles or works before each.

Legend: B batch, N tokens of a sequence, H heads; the head dimension is always `HEAD_DIM`.
"""

from dataclasses import dataclass

import torch

HEAD_DIM = 128
LATE = 0.0127  # slopes of the last lightning layer of the published model, relative to the first's
MAX_SETS = 128


@dataclass(frozen=True)
class Case:
    """One shape of the training operator."""

    B: int
    N: int
    H: int
    graph: bool = False  # our calls run from a CUDA graph
    backward: bool = True
    sustained_peers: bool = False  # time the other implementations under sustained load too

    @property
    def name(self) -> str:
        return f"B{self.B} N{self.N} H{self.H}"

    @property
    def elements(self) -> int:
        """Of q, and of k, v and o each."""
        return self.B * self.N * self.H * HEAD_DIM


@dataclass(frozen=True)
class Plan:
    """Everything that one run measures.  Times are in the unit of their suffix."""

    check: tuple[Case, ...]  # small: the truth is quadratic
    training: tuple[Case, ...]
    anchors: tuple[Case, ...]  # regular shapes, of rising size, that odd ones are compared with
    odd: tuple[Case, ...]
    documents: int  # of the pack, whose size and heads are those of `packed`
    packed: Case
    decode: tuple[Case, ...]  # N = 1
    prefill: Case  # B sequences of N tokens
    checkpoint_every: int  # tokens between the states that prefill writes on the way
    host: Case
    host_calls: int
    copy_bytes: int
    matmul_size: int
    idle_s: float  # idle time before a case's bursts
    pause_s: float  # between bursts
    load_s: float  # load before sustained timing
    more_load_s: float  # load before the next variant of the same case and pass
    burst_ms: float  # length of a burst
    rotate_bytes: int  # inputs together, at least (but at most `MAX_SETS` sets)

    def sets(self, bytes_of_one: int) -> int:
        """How many sets of inputs to walk round."""
        return max(2, min(MAX_SETS, -(-self.rotate_bytes // bytes_of_one)))


def slopes(heads: int, when: str, device: torch.device) -> torch.Tensor:
    """2^(-8h/H) for h = 1..H, float32; "late": the same times `LATE`."""
    h = torch.arange(1, heads + 1, dtype=torch.float64)
    factor = {"early": 1.0, "late": LATE}[when]
    return (factor * 2 ** (-8 * h / heads)).to(device, torch.float32)


FULL = Plan(
    check=(Case(1, 512, 8), Case(2, 333, 4), Case(1, 2500, 2), Case(4, 333, 64)),
    training=(
        Case(4, 8192, 64, sustained_peers=True),
        Case(16, 2048, 64),
        Case(1, 32768, 64),
        Case(1, 131072, 64),
        Case(1, 1048576, 64, backward=False),
        Case(1, 131072, 8),
        Case(4, 8192, 8, graph=True),
    ),
    anchors=tuple(
        Case(B, N, H, graph=True)
        for B, N, H in (
            (1, 64, 8), (1, 512, 8), (1, 2048, 8), (1, 8192, 8), (4, 8192, 8), (1, 131072, 8),
            (4, 8192, 64),
        )
    ),
    odd=tuple(
        Case(B, N, H, graph=True)
        for B, N, H in (
            (1, 1, 1), (7, 777, 1), (6, 4099, 1), (1, 32769, 1),
            (1, 63, 3), (8, 1023, 3), (3, 9999, 3), (2, 65, 3),
            (2, 65, 5), (1, 5001, 5), (7, 333, 5), (4, 20001, 5),
            (3, 333, 8), (2, 10007, 8), (5, 129, 8), (1, 99999, 8),
            (4, 1001, 24), (3, 2049, 24), (8, 65, 24), (1, 32767, 24),
            (5, 2047, 48), (4, 3333, 48), (1, 191, 48), (6, 4095, 48),
            (6, 4097, 64), (5, 1025, 64), (1, 333, 64), (1, 30001, 64),
        )
    ),
    documents=64,
    packed=Case(1, 32768, 64),
    decode=tuple(Case(B, 1, 64, graph=True) for B in (1, 16, 64, 256)),
    prefill=Case(4, 8192, 64),
    checkpoint_every=2048,
    host=Case(1, 64, 8),
    host_calls=200,
    copy_bytes=2**31,
    matmul_size=8192,
    idle_s=2.0,
    pause_s=0.25,
    load_s=2.0,
    more_load_s=0.25,
    burst_ms=60.0,
    rotate_bytes=512 * 2**20,
)  # fmt: skip
