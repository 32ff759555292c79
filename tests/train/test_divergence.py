"""Weights that are not finite are never saved, and the last good checkpoint stays."""

from collections.abc import Callable

import pytest
import torch

from sferic.checkpoint import latest_checkpoint, step_of
from sferic.train import Diverged, Trainer

BLOWS_UP = 'stages.0.lr=[{shape="constant",to=1e-3,length=2},{shape="constant",to=1e38}]'


@pytest.mark.parametrize("steps", [3, 4])
def test_a_run_that_blows_up_keeps_its_last_good_checkpoint(
    trainer: Callable[..., Trainer], steps: int
) -> None:
    made = trainer(BLOWS_UP, f"stages.0.budget={{steps={steps}}}", "stages.0.checkpoint_every=1")
    with pytest.raises(
        Diverged, match=r"not finite: .*; the last good checkpoint is .*step-00000002"
    ):
        made.run()
    good = latest_checkpoint(made.checkpoints)
    assert good is not None
    assert step_of(good) == 2
    again = trainer(BLOWS_UP, f"stages.0.budget={{steps={steps}}}", "stages.0.checkpoint_every=1")
    assert all(bool(torch.isfinite(p).all()) for p in again.model.parameters())
