"""The command line killed at any moment: the same command goes on as if nothing had happened."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STEPS = 96
OPTIONS = (
    "data.heldout=0.265",
    "tokenizer.vocab_size=400",
    "prompt=''",
    "stages.0.seq_len=32",
    "stages.0.batch=[{tokens=64}]",
    f"stages.0.budget.steps={STEPS}",
    "stages.0.precision=fp32",
    "stages.0.validate_every=9",
    "stages.0.checkpoint_every=3",
)


@pytest.fixture(scope="module")
def start(corpus: Path) -> Callable[[Path], subprocess.Popen[str]]:
    """Starts the run in a folder, or goes on with it."""

    def start(out: Path) -> subprocess.Popen[str]:
        options = [x for item in (f"data.corpus={corpus}", *OPTIONS) for x in ("--set", item)]
        command = [sys.executable, "-m", "sferic.cli", "run", "tiny", "--out", str(out), *options]
        return subprocess.Popen(
            [*command, "--device", "cpu"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    return start


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def rows(out: Path) -> list[dict[str, Any]]:
    lines = (out / "tiny" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    for row in found:
        del row["tokens_per_second"]
    return found


@pytest.fixture(scope="module")
def whole(
    start: Callable[[Path], subprocess.Popen[str]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run that was never killed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    code, _, err = finish(start(out))
    assert code == 0, err
    assert [row["step"] for row in rows(out)] == list(range(1, STEPS + 1))
    return out


def wait_for(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while process.poll() is None and not reached():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def steps_done(out: Path) -> int:
    file = out / "tiny" / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def test_a_run_stopped_again_and_again_ends_like_one_never_stopped(
    start: Callable[[Path], subprocess.Popen[str]], whole: Path, tmp_path: Path
) -> None:
    """Kills at random moments and while a checkpoint is written, and both polite signals."""
    out = tmp_path / "run"
    checkpoints = out / "tiny" / "checkpoints"
    chance = random.Random(0)
    stops = ["kill", "SIGTERM", "kill in a checkpoint", "SIGINT", "kill", "kill in a checkpoint"]
    killed = 0
    for i, stop in enumerate(stops):
        process = start(out)
        goal = max(steps_done(out) + 2, 10 * i + 5) + chance.randrange(3)
        wait_for(process, lambda goal=goal: steps_done(out) >= goal)
        if stop == "kill":
            time.sleep(chance.uniform(0, 0.03))
        elif stop == "kill in a checkpoint":
            wait_for(process, lambda: any(checkpoints.glob("*.tmp")))
        process.send_signal(getattr(signal, stop, signal.SIGKILL))
        code, _, err = finish(process)
        assert "Traceback" not in err
        assert "Warning" not in err
        step = steps_done(out)
        assert step < STEPS, "the run ended before it was stopped"
        if "kill" in stop:
            killed += code == -signal.SIGKILL
            continue
        assert code == {"SIGTERM": 143, "SIGINT": 130}[stop]
        assert (checkpoints / f"step-{step:08d}").is_dir()
        last = f"sferic: {stop}: saved at step {step}; the same command goes on from there"
        assert err.splitlines()[-1] == last
    assert killed == 4
    code, _, err = finish(start(out))
    assert code == 0, err
    assert "tiny: resumed at step" in err
    assert rows(out) == rows(whole)
    for name in ("model/model.safetensors", "tokenizer.json", "data/train/tokens.bin"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    reports = [json.loads((folder / "report.json").read_text()) for folder in (out, whole)]
    assert reports[0]["bits_per_byte"] == reports[1]["bits_per_byte"]
    assert not list(out.rglob("*.tmp"))
