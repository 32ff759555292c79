"""A trainer that starts again from a checkpoint repeats the bits of one that never stopped."""

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sferic.data import TokenStore, write_store
from sferic.train import Interrupted, Trainer, read_metrics

Make = Callable[..., Trainer]


@pytest.fixture
def whole(trainer: Make, tmp_path: Path) -> Trainer:
    """Never stopped."""
    made = trainer(folder=tmp_path / "whole")
    made.run()
    return made


def bits(trainer: Trainer) -> list[dict[str, Any]]:
    """The rows without what time measures."""
    rows = read_metrics(trainer.folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]


def stop_after(trainer: Trainer, step: int, signum: int) -> None:
    """Send this process a signal while a step is under way, as from outside."""
    original = trainer.stream.pack

    def pack(index: int) -> Any:
        if trainer.progress.step == step - 1:
            os.kill(os.getpid(), signum)
        return original(index)

    trainer.stream.pack = pack  # type: ignore[method-assign]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_next_trainer_goes_on(
    trainer: Make, whole: Trainer, signum: signal.Signals
) -> None:
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    first = trainer()
    stop_after(first, 3, signum)
    with pytest.raises(Interrupted, match=f"{signum.name}: saved at step 3; the same command"):
        first.run()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    assert (first.checkpoints / "step-00000003").is_dir()
    second = trainer()
    assert second.progress.step == 3
    second.run()
    assert bits(second) == bits(whole)
    for p, q in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(p, q)
    for p, q in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        a, b = second.optimizer.state[p], whole.optimizer.state[q]
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)
    assert second.progress.seconds > 0
    assert replace(second.progress, seconds=0) == replace(whole.progress, seconds=0)


def test_rows_past_the_checkpoint_are_replaced_and_a_half_line_is_dropped(
    trainer: Make, whole: Trainer
) -> None:
    folder = whole.folder
    shutil.rmtree(folder / "checkpoints" / "step-00000006")  # now step 4 is the last
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:5]) + lines[5][:30])
    expected = bits(whole)[:4]
    assert [row["step"] for row in bits(whole)] == [1, 2, 3, 4, 5]
    again = trainer(folder=folder)
    assert again.progress.step == 4
    rows = again.run()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert bits(again)[:4] == expected
    assert file.read_text().splitlines(keepends=True)[:4] == lines[:4]
    assert read_metrics(file) == rows


def test_a_finished_stage_trains_no_more(trainer: Make, whole: Trainer) -> None:
    metrics = (whole.folder / "metrics.jsonl").read_bytes()
    again = trainer(folder=whole.folder)
    again.step = lambda: pytest.fail("a step ran")  # type: ignore[method-assign]
    assert len(again.run()) == 6
    assert (whole.folder / "metrics.jsonl").read_bytes() == metrics


def test_the_counters_of_bad_steps_survive_a_restart(trainer: Make) -> None:
    first = trainer("stages.0.checkpoint_every=1")
    first.progress.skipped = 7
    first.step()
    first.save()
    assert trainer().progress.skipped == 7


def test_a_checkpoint_of_another_model_or_store_is_refused(
    trainer: Make, whole: Trainer, store: TokenStore, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"step-00000006 can't be read .*earlier one"):
        trainer("model.hidden_size=24", folder=whole.folder)
    with pytest.raises(ValueError, match=r"step-00000006 can't be read"):
        trainer("model.num_layers=5", folder=whole.folder)
    other = write_store(
        tmp_path / "other",
        [store.document(i) for i in range(len(store) - 1)],
        tokenizer_hash=store.tokenizer_hash,
        vocab_size=store.vocab_size,
    )
    with pytest.raises(ValueError, match=r"another token store .*other; use another run folder"):
        trainer(folder=whole.folder, store=other)


def test_a_resumed_run_says_so(
    trainer: Make, whole: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(folder=whole.folder).run()
    assert capsys.readouterr().err == "tiny: finished before, at step 6\n"
    shutil.rmtree(whole.folder / "checkpoints" / "step-00000006")
    trainer(folder=whole.folder).run()
    assert capsys.readouterr().err.startswith("tiny: resumed at step 4\ntiny  83%  step 5 ")
