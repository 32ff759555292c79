"""The whole lightning benchmark in little, on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
from benchmarks.lightning.bench import Bench
from benchmarks.lightning.impls import Impl, Serving, sferic, softmax_attention
from benchmarks.lightning.plan import Case, Plan
from benchmarks.lightning.timing import HostClock

TINY = Plan(
    check=(Case(1, 70, 2), Case(2, 33, 1)),
    training=(
        Case(2, 64, 2, sustained_peers=True),
        Case(1, 80, 2, graph=True),
        Case(1, 96, 2, backward=False),
    ),
    anchors=(Case(1, 16, 1, graph=True), Case(1, 128, 2, graph=True)),
    odd=(Case(1, 1, 1, graph=True), Case(3, 17, 3, graph=True)),
    documents=3,
    packed=Case(1, 64, 2),
    decode=(Case(1, 1, 2, graph=True), Case(3, 1, 2, graph=True)),
    prefill=Case(2, 32, 2),
    checkpoint_every=16,
    host=Case(1, 64, 2),
    host_calls=2,
    copy_bytes=2**16,
    matmul_size=64,
    idle_s=0.0,
    pause_s=0.0,
    load_s=0.0,
    more_load_s=0.0,
    burst_ms=0.1,
    rotate_bytes=2**16,
)


@pytest.fixture
def lines() -> list[str]:
    """What a run said."""
    return []


@pytest.fixture
def make_bench(lines: list[str]) -> Callable[..., Bench]:
    """`make_bench(*impls, **changes)`; without any: ours, a peer, and softmax attention."""

    def make(*impls: Impl, **changes: Any) -> Bench:
        ours = sferic("sferic", "reference")
        softmax = Impl("sdpa-cudnn", lambda q, k, v, _: softmax_attention(q, k, v), softmax=True)
        fla = Impl("fla", ours.attention)
        parts = {
            "clock": HostClock(),
            "plan": TINY,
            "impls": list(impls) or [ours, fla, softmax],
            "host_impls": [sferic("sferic-triton", "reference")],
            "serving": Serving(),
            "provenance": {"device": "cpu", "versions": {}, "commit": "0"},
            "say": lines.append,
        }
        return Bench(**(parts | changes))

    return make
