"""Steps whose loss or gradient is not finite."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sferic.train import Diverged, Trainer, read_metrics

Make = Callable[..., Trainer]


def poison_gradient(trainer: Trainer, name: str, *steps: int, value: float = math.nan) -> None:
    """Spoil one element of a weight's gradient in steps counted from 1."""

    def spoil(grad: Tensor) -> Tensor:
        grad = grad.clone()
        if trainer.progress.step + 1 in steps:
            grad.view(-1)[0] = value
        return grad

    trainer.model.get_parameter(name).register_hook(spoil)


def poison_input(trainer: Trainer, *steps: int) -> None:
    """Spoil one token's embedding in steps counted from 1."""

    def spoil(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0].clone()
        if trainer.model.training and trainer.progress.step + 1 in steps:
            x[3] = math.nan
        return (x, *args[1:])

    trainer.model.layers["0"].register_forward_pre_hook(spoil)


def everything(trainer: Trainer) -> list[Tensor]:
    """Copies of weights and moments."""
    tensors = [p.detach() for p in trainer.model.parameters()]
    for state in trainer.optimizer.state.values():
        tensors += state.values()
    return [t.clone() for t in tensors]


@pytest.mark.parametrize("what", ["nan gradient", "infinite gradient", "loss"])
def test_a_bad_step_changes_no_weight_and_no_moment(trainer: Make, what: str) -> None:
    made = trainer()
    name = "layers.1.mixer.out_proj.weight"
    if what == "loss":
        poison_input(made, 2)
    else:
        poison_gradient(made, name, 2, value=math.nan if what[0] == "n" else math.inf)
    made.step()
    before = everything(made)
    assert len(before) > len(list(made.model.parameters()))
    row = made.step()
    for a, b in zip(before, everything(made), strict=True):
        assert torch.equal(a, b)
    assert row["skipped"] == made.progress.skipped == made.progress.bad_in_a_row == 1
    expected = "the loss is nan" if what == "loss" else f"the gradient of {name} is not finite"
    assert row["bad"] == expected
    assert row["tokens"] == 128  # its data is consumed
    good = made.step()
    assert "bad" not in good
    assert good["skipped"] == 1
    assert made.progress.bad_in_a_row == 0
    assert not torch.equal(before[0], everything(made)[0])


def test_several_bad_gradients_are_counted(trainer: Make) -> None:
    made = trainer()
    poison_gradient(made, "norm.weight", 1)
    poison_gradient(made, "layers.0.ffn.w2", 1)
    assert made.step()["bad"] == "the gradient of layers.0.ffn.w2 and 1 more is not finite"


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("what", ["gradient", "loss"])
def test_a_run_goes_on_after_a_bad_step_and_its_rows_are_json(
    trainer: Make, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = trainer()
    if what == "loss":
        poison_input(made, 1, 4)
    else:
        poison_gradient(made, "norm.weight", 1, 4)
    rows = made.run()
    lines = (made.folder / "metrics.jsonl").read_text().splitlines()
    assert [strict(line) for line in lines] == rows == read_metrics(made.folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "bad" in row] == [1, 4]
    assert [row["skipped"] for row in rows] == [1, 1, 1, 2, 2, 2]
    assert [row["grad_norm"] is None for row in rows] == ["bad" in row for row in rows]
    assert "step 4 skipped: the" in capsys.readouterr().err
    # step 4 was due for a checkpoint, but is no good moment
    assert [p.name for p in sorted(made.checkpoints.iterdir())] == [
        "step-00000002",
        "step-00000006",
    ]


def test_bad_steps_in_a_row_stop_the_run_and_name_the_last_good_checkpoint(trainer: Make) -> None:
    made = trainer("stages.0.max_bad_steps=3", "stages.0.budget.steps=12")
    poison_gradient(made, "norm.weight", 2, 3, *range(5, 12))
    with pytest.raises(Diverged) as error:
        made.run()
    assert made.progress.step == 7
    for part in ("3 steps in a row", "norm.weight", str(made.checkpoints / "step-00000004")):
        assert part in str(error.value)
    last = trainer("stages.0.max_bad_steps=3", "stages.0.budget.steps=12")
    assert last.progress.step == 4
    assert last.progress.bad_in_a_row == 0


def test_bad_steps_from_the_start_say_that_nothing_was_saved(trainer: Make) -> None:
    made = trainer("stages.0.max_bad_steps=2")
    poison_input(made, *range(9))
    with pytest.raises(Diverged, match="no checkpoint was saved yet"):
        made.run()
    rows = read_metrics(made.folder / "metrics.jsonl")
    assert [row["loss"] for row in rows] == [None] * len(rows)
    assert rows
