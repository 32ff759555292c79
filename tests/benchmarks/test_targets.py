"""What the rows must reach: a miss is seen, printed, and ends with 1."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from benchmarks.lightning.floors import Rates, decode_floor_ms, floor_ms, moved_bytes
from benchmarks.lightning.plan import FULL, Case
from benchmarks.lightning.rows import Row, find, write
from benchmarks.lightning.targets import TRAINING, checks, curve, expected_ms

from benchmarks import bench_check

H200 = Rates(4.28e12, 782e12)


def row(**values: Any) -> Row:
    passes = values.pop("passes")
    return {
        "impl": "sferic", "slopes": "early", "layout": "contiguous", "thermal": "idle",
        "graph": False, "peak_gib": 2.0, "floor_ms": 0.001, "commit": "0", "pass": passes,
        "ms": 0.001, **values,
    }  # fmt: skip


@pytest.fixture
def rows() -> list[Row]:
    """All that a full run measures, and everything fast."""
    variants = product(("early", "late"), ("contiguous", "qkv"), ("idle", "sustained"))
    passes = ("fwd", "fwd+bwd")
    training = [
        row(
            part="training", case=case.name, passes=p, slopes=slopes, layout=layout,
            thermal=thermal, graph=case.graph,
        )
        for (slopes, layout, thermal), case, p in product(variants, FULL.training, passes)
        if p == "fwd" or case.backward
    ]  # fmt: skip
    lengths = [
        row(part="lengths", case=case.name, passes=p, graph=True)
        for case, p in product((*FULL.anchors, *FULL.odd), passes)
    ]
    packs = ("S1 N32768 H64", "S64 N32768 H64")
    decodes = ("B1 H64", "B16 H64", "B64 H64", "B256 H64")
    hosts = ("sferic-triton", "sferic-hopper")
    return [
        *training,
        *lengths,
        *(row(part="packed", case=case, passes=p) for case, p in product(packs, passes)),
        *(row(part="prefill", case="B4 N8192 H64", passes=p) for p in ("fwd", "prefill")),
        *(row(part="decode", case=case, passes="decode", graph=True) for case in decodes),
        *(row(part="host", case="B1 N64 H8", passes="host", impl=impl) for impl in hosts),
    ]


def misses(rows: list[Row]) -> list[str]:
    return [str(check) for check in checks(rows) if check.missed]


def test_fast_rows_miss_nothing(rows: list[Row]) -> None:
    assert misses(rows) == []


def test_the_table_names_what_the_plan_measures() -> None:
    assert list(TRAINING) == [case.name for case in FULL.training]
    for case in FULL.training:
        assert ("fwd+bwd" in TRAINING[case.name]) == case.backward


@pytest.mark.parametrize(
    ("where", "good", "bad"),
    [
        ({"case": "B4 N8192 H64", "passes": "fwd"}, 0.559, 0.561),
        ({"case": "B4 N8192 H64", "passes": "fwd", "layout": "qkv"}, 0.559, 0.561),
        ({"case": "B4 N8192 H64", "passes": "fwd+bwd"}, 2.249, 2.251),
        ({"case": "B4 N8192 H64", "passes": "fwd", "thermal": "sustained"}, 0.615, 0.617),
        ({"case": "B16 N2048 H64", "passes": "fwd+bwd"}, 2.24, 2.26),
        ({"case": "B1 N32768 H64", "passes": "fwd"}, 0.599, 0.601),
        ({"case": "B1 N131072 H64", "passes": "fwd"}, 2.29, 2.31),
        ({"case": "B1 N131072 H64", "passes": "fwd+bwd"}, 8.99, 9.01),
        ({"case": "B1 N131072 H64", "passes": "fwd", "slopes": "late"}, 2.89, 2.91),
        ({"case": "B1 N131072 H64", "passes": "fwd+bwd", "slopes": "late"}, 9.99, 10.01),
        ({"case": "B1 N1048576 H64", "passes": "fwd"}, 18.9, 19.1),
        ({"case": "B1 N131072 H8", "passes": "fwd+bwd"}, 1.24, 1.26),
        ({"case": "B4 N8192 H8", "passes": "fwd"}, 0.119, 0.121),
    ],
)
def test_a_slow_pass_is_the_one_miss(
    rows: list[Row], where: dict[str, str], good: float, bad: float
) -> None:
    keys = {"slopes": "early", "layout": "contiguous", "thermal": "idle", **where}
    (found,) = find(rows, part="training", **keys)
    found["ms"] = good
    assert misses(rows) == []
    found["ms"] = bad
    (miss,) = misses(rows)
    assert keys["case"] in miss
    assert f"{bad:.4g} ms" in miss


@pytest.mark.parametrize(
    ("where", "key", "good", "bad"),
    [
        ({"part": "host", "impl": "sferic-triton"}, "ms", 0.040, 0.041),
        ({"part": "host", "impl": "sferic-hopper"}, "ms", 0.060, 0.061),
        ({"part": "packed", "case": "S64 N32768 H64", "passes": "fwd"}, "ms", 0.00114, 0.00116),
        ({"part": "prefill", "passes": "prefill"}, "ms", 0.00109, 0.00111),
        ({"part": "decode", "case": "B16 H64"}, "ms", 0.00121, 0.00123),
        ({"part": "decode", "case": "B64 H64"}, "ms", 0.00110, 0.00112),
        ({"part": "decode", "case": "B256 H64"}, "ms", 0.00107, 0.00108),
        ({"part": "decode", "case": "B1 H64"}, "ms", 0.0049, 0.0051),
        ({"part": "lengths", "case": "B2 N10007 H8", "passes": "fwd"}, "ms", 0.00134, 0.00136),
        (
            {
                "part": "training", "case": "B4 N8192 H64", "passes": "fwd+bwd", "slopes": "early",
                "layout": "contiguous", "thermal": "idle",
            },
            "peak_gib", 2.49, 2.51,
        ),
    ],
)  # fmt: skip
def test_every_other_limit(
    rows: list[Row], where: dict[str, str], key: str, good: float, bad: float
) -> None:
    (found,) = find(rows, **where)
    found[key] = good
    assert misses(rows) == []
    found[key] = bad
    assert len(misses(rows)) == 1


def test_each_missing_row_is_a_miss(rows: list[Row]) -> None:
    for n, gone in enumerate(rows):
        found = misses(rows[:n] + rows[n + 1 :])
        assert any("not measured" in miss for miss in found), gone


def test_a_number_that_is_none_is_a_miss(rows: list[Row]) -> None:
    assert checks([])
    assert all(check.missed for check in checks([]))
    found = find(rows, part="training", case="B4 N8192 H64", passes="fwd+bwd", thermal="idle")
    found[0]["peak_gib"] = None
    found[1]["ms"] = float("nan")
    assert len(misses(rows)) == 2


@pytest.mark.parametrize("slow", [False, True])
def test_the_program_prints_misses_and_exits_with_1(
    rows: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str], slow: bool
) -> None:
    if slow:
        find(rows, part="decode", case="B1 H64")[0]["ms"] = 0.0075
    write(tmp_path / "rows.json", rows)
    assert bench_check.main([str(tmp_path / "rows.json")]) == int(slow)
    out = capsys.readouterr().out
    assert ("MISS  decode B1 H64: 0.0075 ms, limit 0.005 ms" in out) is slow


def test_no_file_is_a_miss(tmp_path: Path) -> None:
    assert bench_check.main([str(tmp_path / "none.json")]) == 1


def test_floors_are_those_of_tensors_moved_once() -> None:
    case = Case(4, 8192, 64)
    assert floor_ms(case, H200, backward=False) == pytest.approx(0.50, abs=0.005)
    assert floor_ms(case, H200, backward=True) == pytest.approx(1.38, abs=0.01)
    assert moved_bytes(case, False) == 4 * (4 * 8192 * 64 * 128) * 2  # q, k, v, o of 2 bytes


def test_arithmetic_is_the_floor_where_it_takes_longer() -> None:
    case = Case(1, 32768, 64)
    # two products of half a 32768 x 32768 square of 128 for each head
    flop = 64 * 2 * (32768**2 / 2) * 128 * 2
    assert floor_ms(case, H200, backward=False, softmax=True) == pytest.approx(flop / 782e9)
    slow = Rates(4.28e12, 1e12)
    # of each 64 tokens: scores and their product with v, state update and state read
    flop = 64 * (32768 // 64) * 2 * (2 * 64 * 64 * 128 + 2 * 64 * 128 * 128)
    assert floor_ms(case, slow, backward=False) == pytest.approx(flop / 1e9)


def test_the_floor_of_decode_is_its_states_read_and_written() -> None:
    states = 16 * 64 * 128 * 128 * 4
    floor = decode_floor_ms(Case(16, 1, 64), H200)
    assert floor == pytest.approx(1e3 * 2 * states / 4.28e12)


def test_a_power_law_is_interpolated_exactly() -> None:
    points = [(size, 3e-6 * size**0.7) for size in (100, 3000, 1_000_000)]
    for size in (100, 250, 3000, 77_777, 1_000_000):
        assert expected_ms(points, size) == pytest.approx(3e-6 * size**0.7)
    assert expected_ms(points, 7) == pytest.approx(points[0][1])
    with pytest.raises(ValueError, match="largest"):
        expected_ms(points, 1_000_001)


def test_the_curve_lies_over_bytes_of_its_pass() -> None:
    anchors = (Case(1, 100, 2, graph=True), Case(1, 50, 1, graph=True), Case(1, 7, 1, graph=True))
    rows = [
        row(case="B1 N100 H2", passes="fwd+bwd", ms=2.0),
        row(case="B1 N50 H1", passes="fwd+bwd", ms=1.0),
    ]
    points = curve(rows, "fwd+bwd", anchors)
    assert points == [(50 * 128 * 22, 1.0), (200 * 128 * 22, 2.0)]


def test_odd_shapes_are_odd_varied_and_within_the_curve() -> None:
    sizes = [moved_bytes(case, False) for case in FULL.anchors]
    assert len(set(sizes)) == len(sizes)
    assert {case.H for case in FULL.odd} == {1, 3, 5, 8, 24, 48, 64}
    assert {case.B for case in FULL.odd} == set(range(1, 9))
    for case in FULL.odd:
        assert case.N % 2 == 1
        assert moved_bytes(case, False) <= max(sizes)
