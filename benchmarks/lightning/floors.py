"""The least time a pass can take: each tensor moved once, or its arithmetic."""

from dataclasses import dataclass

from benchmarks.lightning.plan import HEAD_DIM, Case

CHUNK = 64  # of the block form whose FLOPs are counted, its tiles in full
STATE_BYTES = HEAD_DIM * HEAD_DIM * 4  # of one head, float32


@dataclass(frozen=True)
class Rates:
    """What this device reached in this run."""

    bytes_per_s: float  # of a copy, read and written bytes counted
    flop_per_s: float  # of a bf16 matrix product

    def ms(self, moved: float, flop: float = 0.0) -> float:
        """Milliseconds to move so many bytes or do so many FLOPs, whichever takes longer."""
        return 1e3 * max(moved / self.bytes_per_s, flop / self.flop_per_s)


def moved_bytes(case: Case, backward: bool) -> int:
    """bf16 q, k, v in, o out; with the backward also q, k, v, do in, dq, dk, dv out."""
    return case.elements * (8 + 14 * backward)


def linear_flop(case: Case, backward: bool) -> float:
    """Products with tiles and with the state: 2 of each forward, 5 of each backward."""
    return (4.0 + 10.0 * backward) * case.elements * (HEAD_DIM + CHUNK)


def softmax_flop(case: Case, backward: bool) -> float:
    """Causal softmax attention: 2 products of half a square forward, 5 backward."""
    return (2.0 + 5.0 * backward) * case.elements * case.N


def floor_ms(case: Case, rates: Rates, *, backward: bool, softmax: bool = False) -> float:
    """Milliseconds below which neither memory nor arithmetic lets a pass get."""
    flop = softmax_flop if softmax else linear_flop
    return rates.ms(moved_bytes(case, backward), flop(case, backward))


def decode_floor_ms(case: Case, rates: Rates) -> float:
    """Milliseconds to read and write the float32 states of one step."""
    return rates.ms(2 * case.B * case.H * STATE_BYTES)
