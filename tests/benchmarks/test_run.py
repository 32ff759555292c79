"""A run from check to rows, at tiny sizes."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.lightning import __main__ as program
from benchmarks.lightning.bench import Bench
from benchmarks.lightning.impls import Impl, Serving, sferic
from benchmarks.lightning.parts import PARTS, Part, packed
from benchmarks.lightning.plan import LATE, slopes
from benchmarks.lightning.plot import plot
from benchmarks.lightning.rows import KEYS, Row, find, provenance, read, write
from benchmarks.lightning.run import kept, run, table
from torch import Tensor

from sferic.ops import lightning_attention, lightning_decode, lightning_prefill


def nothing() -> None:
    pass


def measured(bench: Bench, *names: str) -> Bench:
    run(bench, [part for part in PARTS if not names or part.name in names], nothing)
    return bench


def identity(row: Row) -> tuple[Any, ...]:
    return tuple(row[k] for k in ("part", "case", "pass", "impl", "slopes", "layout", "thermal"))


def test_every_part_measures_all_its_rows(
    make_bench: Callable[..., Bench], lines: list[str], tmp_path: Path
) -> None:
    bench = measured(make_bench())
    assert not bench.failures
    got = [identity(row) for row in bench.rows]
    assert len(set(got)) == len(got)
    passes, idle = ("fwd", "fwd+bwd"), ("early", "contiguous", "idle")
    hot = ("early", "contiguous", "sustained")
    variants = list(product(("early", "late"), ("contiguous", "qkv"), ("idle", "sustained")))
    want: set[tuple[Any, ...]] = {
        ("training", case, p, "sferic", *variant)
        for case, p, variant in product(("B2 N64 H2", "B1 N80 H2", "B1 N96 H2"), passes, variants)
        if (case, p) != ("B1 N96 H2", "fwd+bwd")
    }
    for impl, p in product(("fla", "sdpa-cudnn"), passes):
        want |= {("training", case, p, impl, *idle) for case in ("B2 N64 H2", "B1 N80 H2")}
        want.add(("training", "B2 N64 H2", p, impl, *hot))
    for p in passes:
        cases = ("B1 N16 H1", "B1 N128 H2", "B1 N1 H1", "B3 N17 H3")
        want |= {("lengths", case, p, "sferic", *idle) for case in cases}
        want |= {("packed", case, p, "sferic", *idle) for case in ("S3 N64 H2", "S1 N64 H2")}
    want |= {("decode", case, "decode", "sferic", *idle) for case in ("B1 H2", "B3 H2")}
    want |= {("prefill", "B2 N32 H2", p, "sferic", *idle) for p in ("prefill", "fwd")}
    want.add(("host", "B1 N64 H2", "host", "sferic-triton", *idle))
    want.add(("ceilings", "65536 bytes", "copy", "torch", None, None, "idle"))
    want.add(("ceilings", "64 x 64 x 64", "matmul", "torch", None, None, "idle"))
    assert set(got) == want

    for row in bench.rows:
        assert set(KEYS) <= set(row)
        assert 0 < row["lo"] <= row["ms"] <= row["hi"]
        if row["part"] != "ceilings":
            assert 0 < row["err_worst_head"] < 0.01
        if row["part"] not in ("ceilings", "host"):
            assert row["floor_ms"] > 0
    assert any("s left" in line for line in lines)
    assert "S3 N64 H2" in table(bench.rows)
    plot(bench.rows, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_late_slopes_are_timed_with_late_slopes() -> None:
    early, late = (slopes(8, when, torch.device("cpu")) for when in ("early", "late"))
    assert early.tolist() == [0.5**n for n in range(1, 9)]
    assert torch.allclose(late, LATE * early)


def wrong_value(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, **pack: Any) -> Tensor:
    """Slightly other slopes: what a kernel's mistake looks like."""
    o = lightning_attention(q, k, v, decay * 1.02, **pack)
    assert isinstance(o, Tensor)
    return o


def wrong_gradient(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    o = lightning_attention(q, k * 0.99 + (k * 0.01).detach(), v, decay)
    assert isinstance(o, Tensor)
    return o


def not_finite(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    o = lightning_attention(q, k, v, decay)
    assert isinstance(o, Tensor)
    return o + torch.where(torch.arange(o.shape[1]) == 5, torch.nan, 0)[:, None, None]


@pytest.mark.parametrize("broken", [wrong_value, wrong_gradient, not_finite])
def test_a_wrong_operator_is_never_called_for_timing(
    make_bench: Callable[..., Bench], broken: Callable[..., Tensor]
) -> None:
    sizes = []

    def attention(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        sizes.append(q.shape[1])
        return broken(q, k, v, decay)

    impl = Impl("sferic", attention, ours=True)
    bench = measured(make_bench(impl, Impl("fla", sferic("", "reference").attention)))
    assert len(bench.failures) == 1
    assert "sferic" in bench.failures[0]
    assert "not timed" in bench.failures[0]
    assert set(sizes) <= {70, 33}
    assert not find(bench.rows, impl="sferic")
    assert find(bench.rows, impl="fla", part="training")


def test_an_autotuner_meets_a_shape_that_is_timed_before_the_small_ones(
    make_bench: Callable[..., Bench],
) -> None:
    shapes = []

    def attention(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        shapes.append(tuple(q.shape[:3]))
        return wrong_value(q, k, v, decay)

    measured(make_bench(Impl("fla", attention, autotuned=True)), "training")
    assert shapes[0] == (2, 64, 2)
    assert {heads for _, _, heads in shapes} == {2}


def test_a_wrong_pack_is_refused(make_bench: Callable[..., Bench]) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, **pack: Tensor) -> Tensor:
        return (wrong_value if pack else sferic("", "reference").attention)(q, k, v, decay, **pack)

    bench = measured(make_bench(Impl("sferic", attention, ours=True)), "packed", "prefill")
    assert ["pack" in failure for failure in bench.failures] == [True]
    assert not find(bench.rows, part="packed")
    assert len(find(bench.rows, part="prefill")) == 2


def wrong_decode(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, pool: Tensor, slots: Tensor
) -> Tensor:
    return lightning_decode(q, k, v, decay * 1.001, pool, slots)


def wrong_output(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, pool: Tensor, slots: Tensor
) -> Tensor:
    return 1.01 * lightning_decode(q, k, v, decay, pool, slots)


def forgetful_prefill(*arguments: Any, **more: Any) -> Tensor:
    """Takes no state."""
    *front, has_state, ends = arguments
    prefill: Any = lightning_prefill
    return prefill(*front, torch.zeros_like(has_state), ends, **more)


def without_checkpoints(*arguments: Any, checkpoints: Any) -> Tensor:
    return lightning_prefill(*arguments)


@pytest.mark.parametrize(
    ("part", "serving"),
    [
        ("decode", Serving(decode=wrong_decode)),
        ("decode", Serving(decode=wrong_output)),
        ("prefill", Serving(prefill=forgetful_prefill)),
        ("prefill", Serving(prefill=without_checkpoints)),
    ],
)
def test_a_wrong_operator_on_a_pool_is_refused(
    make_bench: Callable[..., Bench], part: str, serving: Serving
) -> None:
    bench = measured(make_bench(serving=serving), "decode", "prefill")
    assert len(bench.failures) == 1
    assert "not timed" in bench.failures[0]
    assert not find(bench.rows, part=part)
    assert find(bench.rows, part="prefill" if part == "decode" else "decode")


def test_a_failed_part_costs_its_own_rows_only(
    make_bench: Callable[..., Bench], lines: list[str]
) -> None:
    def fails(bench: Bench) -> None:
        raise ValueError("no such kernel")

    saved = []
    bench = make_bench()
    parts = [Part("broken", "", fails, 1), Part("packed", "", packed, 1)]
    run(bench, parts, lambda: saved.append(len(bench.rows)))
    assert bench.failures == ["broken: ValueError: no such kernel"]
    assert len(find(bench.rows, part="packed")) == 4
    assert any("Traceback" in line for line in lines)
    assert saved[0] == 2  # the ceilings, before the next part began
    assert saved[-1] == 6


def test_an_implementation_that_fails_at_one_shape_leaves_the_others(
    make_bench: Callable[..., Bench],
) -> None:
    ours = sferic("sferic", "reference")

    def picky(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        if q.shape[1] == 64:
            raise NotImplementedError("64 tokens")
        return ours.attention(q, k, v, decay)

    bench = measured(make_bench(ours, Impl("fla", picky)), "training")
    assert len(bench.failures) == 1
    assert not find(bench.rows, impl="fla", case="B2 N64 H2")
    assert find(bench.rows, impl="fla", case="B1 N80 H2")
    assert len(find(bench.rows, impl="sferic", case="B2 N64 H2")) == 16


def test_a_dead_device_ends_the_run_but_saves_its_rows(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()

    def dies(bench: Bench) -> None:
        def synchronize() -> None:
            raise RuntimeError("illegal memory access")

        bench.clock.synchronize = synchronize

    saved = []
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run(bench, [Part("dies", "", dies, 1)], lambda: saved.append(len(bench.rows)))
    assert saved == [2]


def rows_of(*names: tuple[str, str]) -> list[Row]:
    return [{"part": part, "impl": impl} for part, impl in names]


@pytest.mark.parametrize(
    ("parts", "impls", "stay"),
    [
        (["training", "host"], None, [3]),
        (["training"], ["fla"], [0, 2, 3]),
        (["host"], ["fla"], [0, 1, 3]),
        (["decode"], None, [0, 1, 2]),
    ],
)
def test_a_partial_run_keeps_what_it_does_not_measure(
    parts: Sequence[str], impls: Sequence[str] | None, stay: list[int]
) -> None:
    old = rows_of(
        ("training", "sferic"), ("training", "fla"), ("host", "sferic-triton"),
        ("decode", "sferic"), ("ceilings", "torch"),
    )  # fmt: skip
    assert kept(old, parts, impls) == [old[n] for n in stay]


def test_rows_survive_the_file(tmp_path: Path) -> None:
    file = tmp_path / "new" / "rows.json"
    rows = [{"case": "B1 N2 H3", "ms": 0.25}, {"case": "B1 N4 H3", "ms": None}]
    write(file, rows)
    assert read(file) == json.loads(file.read_text()) == rows
    assert read(tmp_path / "none.json") == []


def test_provenance_names_device_versions_and_commit() -> None:
    found = provenance(torch.device("cpu"), None)
    assert found["versions"]["torch"] == torch.__version__
    assert found["device"]
    assert found["commit"]
    assert provenance(torch.device("cpu"), "abc")["commit"] == "abc"


def test_without_a_gpu_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert program.main(["--out", str(tmp_path / "rows.json")]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("broken", [False, True])
def test_the_program_exits_with_1_if_something_was_refused(
    make_bench: Callable[..., Bench],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    broken: bool,
) -> None:
    ours = sferic("sferic", "reference")
    impl = replace(ours, attention=wrong_value) if broken else ours
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(program, "CudaClock", lambda: make_bench().clock)
    monkeypatch.setattr(program, "FULL", make_bench().plan)
    monkeypatch.setattr(program, "BUILDERS", {"sferic": lambda: impl})
    file = tmp_path / "rows.json"
    code = program.main(["--only", "packed,decode", "--impl", "sferic", "--out", str(file)])
    assert code == int(broken)
    assert {row["part"] for row in read(file)} == (
        {"ceilings"} if broken else {"ceilings", "packed", "decode"}
    )
    assert ("NOT MEASURED" in capsys.readouterr().out) is broken


@pytest.mark.parametrize("option", [["--only", "speed"], ["--impl", "flash"]])
def test_unknown_names_are_refused(option: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        program.main(option)
    assert error.value.code == 2


def test_a_peer_that_is_not_installed_is_a_failure_with_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent() -> Impl:
        raise ModuleNotFoundError("No module named 'fla'")

    monkeypatch.setitem(program.BUILDERS, "fla", absent)
    impls, failures = program.build(["sferic", "fla"])
    assert [impl.name for impl in impls] == ["sferic"]
    assert failures == ["fla: No module named 'fla'"]


def test_times_are_finite_medians_over_all_sets(make_bench: Callable[..., Bench]) -> None:
    bench, seen = make_bench(), []
    timed = bench.prepare(lambda i: seen.append(i % 5), 5)
    assert set(seen) == set(range(5))
    assert math.isfinite(bench.burst(timed).ms)
