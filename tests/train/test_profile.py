"""The trace of one step."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from sferic.train import StepProfile, Trainer

CPU = torch.device("cpu")


def test_one_whole_step_after_the_warm_up_is_traced(
    trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    plain = trainer(folder=tmp_path / "plain").run()
    file = tmp_path / "run" / "profile" / "trace.json"
    profile = StepProfile(file, CPU)
    assert "no step was traced" in profile.outcome()
    rows = trainer().run(profile)
    assert profile.traced == 4
    assert profile.outcome() == f"the trace of step 4 is in {file}"
    assert [row["loss"] for row in rows] == [row["loss"] for row in plain]

    events = json.loads(file.read_text())["traceEvents"]
    names = Counter(event["name"] for event in events if event.get("cat") == "cpu_op")
    assert names["aten::embedding"] == 2  # a forward for each of the step's packs
    assert names["aten::embedding_dense_backward"] == 2
    updates = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
    assert [count for name, count in updates.items() if "Optimizer.step" in name] == [1]
    assert [path.name for path in file.parent.iterdir()] == ["trace.json"]


def test_a_run_of_few_steps_traces_none(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    profile = StepProfile(tmp_path / "profile" / "trace.json", CPU)
    trainer("stages.0.budget={steps=3}").run(profile)
    assert profile.traced is None
    assert "warm up" in profile.outcome()
    assert not profile.file.parent.exists()
