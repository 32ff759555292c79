"""What a run measures, part by part."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch

from benchmarks.lightning.bench import Bench
from benchmarks.lightning.calls import (
    decode_call,
    forward_call,
    packed_call,
    prefill_call,
    training_call,
)
from benchmarks.lightning.check import check_decode, check_packed, check_prefill
from benchmarks.lightning.floors import STATE_BYTES, Rates, decode_floor_ms, floor_ms
from benchmarks.lightning.impls import Impl
from benchmarks.lightning.inputs import Inputs, draw
from benchmarks.lightning.plan import Case
from benchmarks.lightning.timing import Timed, burst, host_time, load

CHECKED_HEADS = 4
SOFTMAX_FLOP = 1e14  # softmax attention of a longer forward pass is left out


@dataclass(frozen=True)
class Part:
    """A piece of a run that can be asked for by name."""

    name: str
    description: str
    run: Callable[[Bench], None]
    seconds: float  # expected on an H200


@dataclass(frozen=True)
class Variant:
    """One row of a case before it is timed."""

    impl: Impl
    passes: str
    slopes: str
    layout: str
    timed: Timed


def ceilings(bench: Bench) -> None:
    """What the device reaches: bytes a second of a copy, FLOP/s of a bf16 product."""
    plan, device = bench.plan, bench.clock.device
    source = torch.randint(255, (2, plan.copy_bytes), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = bench.burst(bench.prepare(lambda i: target[i % 2].copy_(source[i % 2]), 2))
    n = plan.matmul_size
    a, b = torch.randn(2, 2, n, n, device=device).bfloat16()
    product = bench.burst(bench.prepare(lambda i: a[i % 2] @ b[i % 2], 2))
    rates = Rates(2 * plan.copy_bytes / copy.ms * 1e3, 2 * n**3 / product.ms * 1e3)
    bench.rates = rates
    bench.add(
        "ceilings", f"{plan.copy_bytes} bytes", "copy", "torch", copy, floor_ms=None,
        slopes=None, layout=None, tb_per_s=rates.bytes_per_s / 1e12,
    )  # fmt: skip
    bench.add(
        "ceilings", f"{n} x {n} x {n}", "matmul", "torch", product, floor_ms=None,
        slopes=None, layout=None, tflop_per_s=rates.flop_per_s / 1e12,
    )  # fmt: skip
    copied, computed = rates.bytes_per_s / 1e12, rates.flop_per_s / 1e12
    bench.say(f"  copy {copied:.2f} TB/s, bf16 product {computed:.0f} TFLOP/s")


def training(bench: Bench) -> None:
    """Forward, and forward with backward: every implementation, idle and under sustained load."""
    for case in bench.plan.training:
        begin = time.perf_counter()
        with bench.attempt(case.name):
            _training_case(bench, case)
        bench.say(f"  {case.name}: {time.perf_counter() - begin:.1f} s")


def _training_case(bench: Bench, case: Case) -> None:
    """A function of its own, so that a case's memory is free when the next one begins."""
    variants = _variants(bench, case, _inputs(bench, case))
    _idle_rows(bench, case, variants)
    _sustained_rows(bench, case, variants)


def _inputs(bench: Bench, case: Case) -> Inputs:
    size = case.elements * (8 if case.backward else 6)
    sets = bench.plan.sets(size) if case.backward else 1  # such a case alone fills the device
    return draw(case, sets, bench.clock.device)


def _variants(bench: Bench, case: Case, inputs: Inputs) -> list[Variant]:
    """Ours in both layouts with both kinds of slopes, the others in the one that suits them."""
    variants = []
    for impl in bench.impls:
        if not _fits(impl, case):
            continue
        everything = impl.name == "sferic"
        with bench.attempt(f"{impl.name}, {case.name}"):
            for layout in ("contiguous", "qkv") if everything else ("contiguous",):
                for when in ("early", "late") if everything else ("early",):
                    for passes in ("fwd", "fwd+bwd") if case.backward else ("fwd",):
                        call = training_call(impl, inputs, when, layout, passes)
                        graph = case.graph and impl.ours
                        timed = bench.prepare(call, len(inputs.flat), graph=graph)
                        variants.append(Variant(impl, passes, when, layout, timed))
    return variants


def _fits(impl: Impl, case: Case) -> bool:
    """Whether a case is worth its time and memory with that implementation."""
    if impl.softmax:
        return case.backward and 2.0 * case.elements * case.N <= SOFTMAX_FLOP
    return impl.ours or case.backward  # one without a backward is one that fills the device


def _idle_rows(bench: Bench, case: Case, variants: list[Variant]) -> None:
    bench.idle()
    for variant in variants:
        _add(bench, "training", case, variant, "idle")


def _sustained_rows(bench: Bench, case: Case, variants: list[Variant]) -> None:
    """`load_s` of load for each pass and implementation, then its variants without a rest."""
    loaded: set[tuple[str, str]] = set()
    for variant in sorted(variants, key=lambda v: (v.impl.name, v.passes)):
        if variant.impl.name != "sferic" and not case.sustained_peers:
            continue
        key = (variant.impl.name, variant.passes)
        seconds = bench.plan.more_load_s if key in loaded else bench.plan.load_s
        loaded.add(key)
        load(bench.clock, variant.timed, seconds)
        _add(bench, "training", case, variant, "sustained")


def _add(bench: Bench, part: str, case: Case, variant: Variant, thermal: str) -> None:
    timed, impl = variant.timed, variant.impl
    if thermal == "idle":
        sample = bench.burst(timed)
    else:
        sample = burst(bench.clock, timed, bench.plan.burst_ms)
    backward = variant.passes == "fwd+bwd"
    bench.add(
        part, case.name, variant.passes, impl.name, sample,
        floor_ms=floor_ms(case, bench.rates, backward=backward, softmax=impl.softmax),
        timed=timed, slopes=variant.slopes, layout=variant.layout, thermal=thermal,
        error=bench.errors[impl.name][variant.passes],
    )  # fmt: skip


def lengths(bench: Bench) -> None:
    """Odd lengths, batches and head counts, and the regular shapes that they are held to."""
    impl = bench.ours
    if impl is None:
        return
    for case in (*bench.plan.anchors, *bench.plan.odd):
        with bench.attempt(case.name):
            _lengths_case(bench, impl, case)


def _lengths_case(bench: Bench, impl: Impl, case: Case) -> None:
    inputs = _inputs(bench, case)
    for passes in ("fwd", "fwd+bwd"):
        call = training_call(impl, inputs, "early", "contiguous", passes)
        timed = bench.prepare(call, len(inputs.flat), graph=True)
        variant = Variant(impl, passes, "early", "contiguous", timed)
        _add(bench, "lengths", case, variant, "idle")


def packed(bench: Bench) -> None:
    """A pack of documents of random lengths beside one document of all its tokens."""
    impl, case, device = bench.ours, bench.plan.packed, bench.clock.device
    if impl is None:
        return
    errors = check_packed(impl, CHECKED_HEADS, device)
    inputs = draw(case, bench.plan.sets(8 * case.elements), device)
    prepared = []
    for documents, passes in product((1, bench.plan.documents), ("fwd", "fwd+bwd")):
        call = packed_call(impl, inputs, documents, passes)
        prepared.append((documents, passes, bench.prepare(call, len(inputs.flat))))
    bench.idle()
    for documents, passes, timed in prepared:
        floor = floor_ms(case, bench.rates, backward=passes == "fwd+bwd")
        bench.add(
            "packed", f"S{documents} N{case.N} H{case.H}", passes, impl.name, bench.burst(timed),
            floor_ms=floor, timed=timed, error=errors[passes],
        )  # fmt: skip


def decode(bench: Bench) -> None:
    """One token a row against float32 states in a pool that no cache holds."""
    if bench.ours is None:
        return
    error = check_decode(bench.serving, CHECKED_HEADS, bench.clock.device)
    for case in bench.plan.decode:
        with bench.attempt(f"decode {case.name}"), torch.no_grad():
            sets = bench.plan.sets(case.B * case.H * STATE_BYTES)
            call = decode_call(bench.serving, case, sets, bench.clock.device)
            timed = bench.prepare(call, sets, graph=True)
            bench.add(
                "decode", f"B{case.B} H{case.H}", "decode", "sferic", bench.burst(timed),
                floor_ms=decode_floor_ms(case, bench.rates), timed=timed, error=error,
            )  # fmt: skip


def prefill(bench: Bench) -> None:
    """A pack of sequences into their slots, with states written on the way; half continue one.

    The training forward of the same tokens is timed beside it, on the same inputs.
    """
    impl, case = bench.ours, bench.plan.prefill
    if impl is None:
        return
    error = check_prefill(bench.serving, CHECKED_HEADS, bench.clock.device)
    inputs = draw(case, bench.plan.sets(8 * case.elements), bench.clock.device)
    count = len(inputs.flat)
    call = prefill_call(bench.serving, inputs, bench.plan.checkpoint_every)
    ours = bench.prepare(call, count)
    forward = bench.prepare(training_call(impl, inputs, "early", "contiguous", "fwd"), count)
    bench.idle()
    floor = floor_ms(case, bench.rates, backward=False)
    forward_error = bench.errors[impl.name]["fwd"]
    for passes, timed, err in (("prefill", ours, error), ("fwd", forward, forward_error)):
        bench.add(
            "prefill", case.name, passes, "sferic", bench.burst(timed),
            floor_ms=floor, timed=timed, error=err,
        )  # fmt: skip


def host(bench: Bench) -> None:
    """What an eager forward call costs the host, by kernels; no waiting for the device."""
    case = bench.plan.host
    inputs = draw(case, 2, bench.clock.device)
    for impl in bench.host_impls:
        with bench.attempt(f"host time of {impl.name}"):
            errors = bench.errors_of(impl, bench.plan.check[:1])
            sample = host_time(bench.clock, forward_call(impl, inputs), bench.plan.host_calls)
            bench.add(
                "host", case.name, "host", impl.name, sample, floor_ms=None, error=errors["fwd"]
            )


PARTS = (
    Part("training", "forward and backward beside fla and SDPA, idle and sustained", training, 120),
    Part("lengths", "odd lengths, batches and head counts: no cliff", lengths, 70),
    Part("packed", "documents of random lengths beside one long one", packed, 6),
    Part("decode", "one token a row from a CUDA graph", decode, 5),
    Part("prefill", "a pack into slots with states on the way", prefill, 6),
    Part("host", "host time of a call", host, 4),
)
