"""The list of benchmarks."""

import importlib.util
from pathlib import Path

import pytest
from benchmarks.registry import ENTRIES, ROOT, Entry, run


def entries(why: str | None = None) -> list[Entry]:
    return [
        Entry("first", "one thing", lambda out: ["one.py", f"{out}"], lambda: why),
        Entry("second", "another", lambda out: ["two.py"], lambda: None),
    ]


def test_all_are_listed_and_those_that_can_run_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []

    tmp_path /= "new"

    def start(command: list[str]) -> int:
        assert tmp_path.is_dir()
        started.append(command[1:])
        return 0

    assert run(entries("no CUDA device here"), tmp_path, start) == 0
    assert started == [["two.py"]]
    out = capsys.readouterr().out
    assert "one thing - skipped: no CUDA device here" in out
    assert "another\n" in out
    assert run(entries(), tmp_path, start) == 0
    assert started[1:] == [["one.py", str(tmp_path)], ["two.py"]]


def test_one_that_fails_lets_the_next_run_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(entries(), tmp_path, lambda command: int("one.py" in command)) == 1
    assert "failed: first" in capsys.readouterr().out


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_command_leads_to_a_program(entry: Entry) -> None:
    command = entry.command(Path("out"))
    if command[0] == "-m":
        assert importlib.util.find_spec(f"{command[1]}.__main__")
    else:
        assert (ROOT / command[0]).is_file()
    assert any("out" in word for word in command)


def test_every_benchmark_is_in_the_list() -> None:
    named = {entry.command(Path("out"))[0] for entry in ENTRIES}
    scripts = {str(path.relative_to(ROOT)) for path in (ROOT / "benchmarks").glob("*_*.py")}
    assert {path for path in scripts if "bench_check" not in path and "__" not in path} <= named
