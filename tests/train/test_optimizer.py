"""AdamW's groups and arithmetic, and the schedules as the loop follows them."""

from collections.abc import Callable

import pytest
import torch

from sferic.config import OptimizerConfig, batch_tokens_at, lr_at
from sferic.train import Trainer
from sferic.train.optimizer import build_optimizer

Make = Callable[..., Trainer]


def test_matrices_decay_and_norms_do_not(trainer: Make) -> None:
    model = trainer().model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.5))
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    shrunk = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert shrunk == {name for name in before if "norm" not in name}
    assert {"embed_tokens.weight", "lm_head.weight", "layers.0.ffn.w13"} <= shrunk
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] * (0.95 if name in shrunk else 1))


def test_three_updates_equal_adamw_by_hand(trainer: Make) -> None:
    made = trainer(
        "stages.0.optimizer={betas=[0.8, 0.9], weight_decay=0.3, eps=1e-4, clip_norm=1e9}",
        "stages.0.lr=[{shape='linear', to=3e-2, length=3}]",
        dtype=torch.float64,
    )
    weight = made.model.layers["0"].get_parameter("ffn.w13")
    w, m, v = weight.detach().clone(), torch.tensor(0.0), torch.tensor(0.0)
    for t in (1, 2, 3):
        made.step()
        assert weight.grad is not None
        m, v = 0.8 * m + 0.2 * weight.grad, 0.9 * v + 0.1 * weight.grad**2
        lr = 1e-2 * t
        w = w * (1 - lr * 0.3)
        w = w - lr * (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-4)
        torch.testing.assert_close(weight.detach(), w, rtol=1e-10, atol=1e-12)


def test_the_norm_of_a_step_is_clipped_and_reported_unclipped(trainer: Make) -> None:
    loose, tight = (
        trainer(f"stages.0.optimizer.clip_norm={norm}", dtype=torch.float64) for norm in (1e9, 1e-3)
    )
    rows = loose.step(), tight.step()
    assert rows[0]["grad_norm"] == rows[1]["grad_norm"] > 0.1
    norms = [
        torch.nn.utils.get_total_norm([p.grad for p in t.model.parameters() if p.grad is not None])
        for t in (loose, tight)
    ]
    assert float(norms[0]) == pytest.approx(rows[0]["grad_norm"], rel=1e-12)
    assert float(norms[1]) == pytest.approx(1e-3, rel=1e-4)


@pytest.mark.parametrize(("unit", "n"), [("steps", (2, 1)), ("tokens", (64, 96))])
def test_rows_follow_the_segments_of_lr_and_batch(
    trainer: Make, unit: str, n: tuple[int, int]
) -> None:
    first, later = (f"length={length}, unit='{unit}'" for length in n)
    made = trainer(
        f"stages.0.batch=[{{tokens=32, {first}}}, {{tokens=96, unit='{unit}'}}]",
        f"stages.0.lr=[{{shape='linear', to=1e-2, {first}}}, "
        f"{{shape='constant', to=1e-3, {later}}}, {{shape='linear', to=0, {later}}}]",
    )
    rows = [made.step() for _ in range(4)]
    assert [row["tokens"] for row in rows] == [32, 64, 160, 256]
    assert [row["lr"] for row in rows] == pytest.approx([5e-3, 1e-2, 1e-3, 0])
    assert made.progress.pack == 8
    at = [(0, 0), (1, 32), (2, 64), (3, 160)]
    assert [row["lr"] for row in rows] == [lr_at(made.stage, *a) for a in at]
    assert [batch_tokens_at(made.stage, *a) for a in at] == [32, 32, 96, 96]


def test_the_rate_of_the_row_is_the_one_that_moves_the_weights(trainer: Make) -> None:
    made = trainer("stages.0.lr=[{shape='constant', to=2e-3}]")
    made.step()  # Adam's first step moves every weight by the rate
    moved = (made.model.norm.weight.detach() - 1).abs().max()
    assert float(moved) == pytest.approx(2e-3, rel=1e-3)


def test_a_budget_in_tokens_ends_at_the_step_that_reaches_it(trainer: Make) -> None:
    made = trainer("stages.0.budget={tokens=150}", "stages.0.lr=[{shape='constant', to=1e-3}]")
    rows = made.run()
    assert [row["tokens"] for row in rows] == [64, 128, 192]
    assert "validation_loss" in rows[-1]
