"""The README's measured numbers are those of the committed results."""

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.lightning.report import summary, tables
from benchmarks.lightning.targets import checks

ROOT = Path(__file__).parents[1]


def results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text("utf-8"))


def test_the_readme_says_what_the_demo_measured() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    demo = results("demo-cpu.json")
    bits, stage = demo["bits_per_byte"], demo["stages"]["demo"]
    for key in ("model", "xz", "zlib", "unigram"):
        assert f"{bits[key]:.3f}" in readme
    assert f"{bits['heldout_bytes']:,} held-out bytes" in readme
    assert f"{demo['seconds']:.0f} s" in readme
    assert f"{stage['tokens_per_second']:,} tokens/s" in readme
    assert f"{1 - bits['model'] / bits['unigram']:.0%} fewer" in readme


def test_the_readme_says_what_the_profile_measured() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    profile = results("step-profile-cpu.json")
    share = profile["kernel_share"]
    products = ("mkldnn::_linear_pointwise", "aten::mm", "aten::bmm")
    assert f"{sum(share.get(name, 0) for name in products):.0%}" in readme
    assert f"{profile['outside_kernels']:.1%}" in readme
    assert f"{profile['parameters'] / 1e6:.2f} M parameters" in readme


def test_the_demo_meets_its_bars() -> None:
    demo = results("demo-cpu.json")
    bits = demo["bits_per_byte"]
    assert bits["model"] <= 2.4
    assert bits["model"] <= 0.7 * bits["unigram"]
    assert demo["seconds"] < 360


def test_the_readme_says_what_transformers_beside_us_took() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    rows = results("cpu-transformers.json")["rows"]
    cases = {row["case"] for row in rows}
    assert len(cases) == 3
    for case in cases:
        us, them = (
            next(r for r in rows if r["case"] == case and r["impl"].startswith(name))
            for name in ("sferic", "transformers")
        )
        assert us["pass"]
        assert us["difference"] < 3e-5
        line = next(line for line in readme.splitlines() if case in line)
        for part in (f"{us['ms']:.3g} ms", f"{them['ms']:.3g} ms", f"{us['times_faster']:.2f}"):
            assert part in line
        assert f"{us['share_of_floor']:.0%}" in line


def test_a_batched_forward_is_far_faster_than_that_of_transformers() -> None:
    rows = results("cpu-transformers.json")["rows"]
    best = {r["case"]: r["times_faster"] for r in rows if r["impl"] == "sferic"}
    assert best["forward of 8 x 1024 tokens"] >= 1.7


KERNELS = ROOT / "benchmarks" / "results" / "lightning-h200.json"
with_kernels = pytest.mark.skipif(not KERNELS.exists(), reason="no run of the kernels is kept")


def kernel_rows() -> list[dict[str, Any]]:
    return json.loads(KERNELS.read_text("utf-8"))


@with_kernels
def test_the_docs_hold_the_kernels_measured_rows() -> None:
    assert tables(kernel_rows()) in (ROOT / "docs" / "kernels.md").read_text("utf-8")


@with_kernels
def test_the_readme_says_what_the_kernels_reached() -> None:
    assert summary(kernel_rows()) in (ROOT / "README.md").read_text("utf-8")


@with_kernels
def test_the_kernels_reach_their_targets_but_for_what_the_docs_name() -> None:
    missed = [check.what for check in checks(kernel_rows()) if check.missed]
    text = (ROOT / "docs" / "kernels.md").read_text("utf-8")
    assert all(f"- {what}:" in text for what in missed), missed
