"""The README's measured numbers are those of the committed results."""

import json
from pathlib import Path
from typing import Any

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
    assert f"{share['aten::mm'] + share['aten::bmm']:.0%}" in readme
    assert f"{profile['outside_kernels']:.1%}" in readme
    assert f"{profile['parameters'] / 1e6:.2f} M parameters" in readme


def test_the_demo_meets_its_bars() -> None:
    demo = results("demo-cpu.json")
    bits = demo["bits_per_byte"]
    assert bits["model"] <= 2.4
    assert bits["model"] <= 0.7 * bits["unigram"]
    assert demo["seconds"] < 360
