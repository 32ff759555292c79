"""What a run writes down."""

import io
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sferic.train import Trainer, read_metrics
from sferic.train.losses import RoutingStats
from sferic.train.metrics import LiveLine, MetricsLog, plot_losses

Make = Callable[..., Trainer]
KEYS = [
    "step", "tokens", "loss", "auxiliary_loss", "lr", "grad_norm", "skipped", "tokens_per_second",
    "max_load", "drop_rate", "router_entropy",
]  # fmt: skip


def test_each_step_is_a_row_of_plain_json(trainer: Make) -> None:
    made = trainer()
    rows = made.run()
    found = [json.loads(s) for s in (made.folder / "metrics.jsonl").read_text().splitlines()]
    assert found == rows == read_metrics(made.folder / "metrics.jsonl")
    for i, row in enumerate(found, 1):
        assert list(row) == KEYS + ["validation_loss"] * (i in (3, 6))
        assert row["step"] == i
        assert row["tokens"] == 64 * i
        assert all(isinstance(v, int | float) for v in row.values())
        assert 0 < row["router_entropy"] <= 1
        assert 1 <= row["max_load"] <= 4
        assert 0 <= row["drop_rate"] < 1
    assert found[-1]["loss"] < found[0]["loss"]


def test_the_validation_loss_is_the_mean_over_labels_without_token_drop(trainer: Make) -> None:
    made = trainer(dtype=torch.float64)
    rows = made.run()
    total, labels = 0.0, 0
    with torch.no_grad():
        for pack in made.heldout:
            ends = torch.from_numpy(pack.cu_seqlens)
            logits = made.model.eval()(torch.from_numpy(pack.tokens), cu_seqlens=ends)
            logp = logits.log_softmax(-1)
            for t, label in enumerate(pack.labels.tolist()):
                if label >= 0:
                    total, labels = total - float(logp[t, label]), labels + 1
    assert rows[-1]["validation_loss"] == pytest.approx(total / labels, rel=1e-10)


def routing(counts: list[int], dropped: int, entropy: float, tokens: int) -> Any:
    """What the statistics read of a `Routing`."""
    return SimpleNamespace(
        counts=torch.tensor(counts),
        dropped=torch.tensor(dropped),
        entropy_sum=torch.tensor(entropy, dtype=torch.float64),
        tokens=torch.tensor(tokens),
    )


def test_routing_numbers_by_hand() -> None:
    """Two layers, two micro-batches of 10 and 6 tokens, four experts, two choices each."""
    stats = RoutingStats()
    stats.add([routing([8, 4, 4, 4], 2, 10.0, 10), routing([5, 5, 5, 5], 0, 12.0, 10)])
    stats.add([routing([7, 1, 2, 2], 3, 4.0, 6), routing([0, 12, 0, 0], 6, 2.0, 6)])
    assert stats.summary() == {
        # of 32 choices in each layer, the busiest experts took 15 and 17; the mean is 8
        "max_load": 17 / 8,
        "drop_rate": 11 / 64,
        "router_entropy": pytest.approx(28 / 32 / math.log(4)),
    }


def test_a_model_without_experts_has_no_routing_numbers(trainer: Make) -> None:
    assert RoutingStats().summary() == {}
    row = trainer("model.ffn={kind='dense', size=64}").step()
    assert list(row) == KEYS[:8]
    assert row["auxiliary_loss"] == 0


def test_the_rows_tell_the_drop_of_the_capacity(trainer: Make) -> None:
    tight, loose = trainer("model.ffn.capacity_factor=0.5"), trainer("model.ffn.capacity_factor=4")
    assert tight.step()["drop_rate"] >= 0.5
    assert loose.step()["drop_rate"] == 0


def rows_of(*losses: float | None) -> list[dict[str, Any]]:
    return [
        {"step": i, "loss": loss, "lr": 1e-3, "tokens_per_second": 1234.5}
        for i, loss in enumerate(losses, 1)
    ]


@pytest.mark.parametrize("losses", [(3.0, None, 2.0), (None,), (3.0,)])
def test_the_plot_is_a_png(tmp_path: Path, losses: tuple[float | None, ...]) -> None:
    rows = rows_of(*losses)
    rows[-1]["validation_loss"] = 2.5
    plot_losses(rows, tmp_path / "loss.png", "title")
    content = (tmp_path / "loss.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert content[-8:-4] == b"IEND"
    assert [p.name for p in tmp_path.iterdir()] == ["loss.png"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`at(seconds)` sets the clock, which stands at 1000."""

    def set(seconds: float) -> None:
        monkeypatch.setattr(time, "monotonic", lambda: seconds)

    set(1000)
    return set


def test_a_terminal_has_one_live_line(at: Callable[[float], None]) -> None:
    out = Terminal()
    show = LiveLine("demo", out=out)
    first, second = rows_of(3.25, 2.0)
    at(1000 + 3725)
    show.update(first, 0.5)
    at(9000)
    show.update(second, 1.0)
    show.note("something happened")
    show.finish()
    clear = "\r\x1b[K"
    assert out.getvalue() == (
        f"{clear}demo  50%  step 1  loss 3.250  lr 1.00e-03  1,234 tokens/s  1:02:05 left"
        f"{clear}demo 100%  step 2  loss 2.000  lr 1.00e-03  1,234 tokens/s  0:00 left"
        f"{clear}something happened\n\n"
    )


def test_a_log_file_has_whole_lines_now_and_then(at: Callable[[float], None]) -> None:
    out = io.StringIO()
    show = LiveLine("demo" * 30, interval=60, out=out)
    for row in rows_of(*[2.0] * 9):
        at(1000 + 7 * row["step"])
        show.update(row, row["step"] / 9)
    show.finish()
    lines = out.getvalue().splitlines()
    assert len(lines) == 2  # the first and, past the interval or not, the last
    assert lines[0].endswith("1,234 tokens/s  0:56 left")
    assert lines[1].startswith("demo" * 30 + " 100%  step 9")
    assert "\r" not in out.getvalue()


@pytest.mark.parametrize(
    ("share", "shown"), [(0.001, "  0%"), (0.29, " 29%"), (0.996, " 99%"), (1.0, "100%")]
)
def test_only_the_end_is_100_percent(at: Callable[[float], None], share: float, shown: str) -> None:
    out = io.StringIO()
    show = LiveLine("demo", out=out)
    at(1001)
    show.update(rows_of(2.0)[0], share)
    assert out.getvalue().startswith(f"demo {shown}  step 1")


def test_the_time_left_follows_the_recent_speed(at: Callable[[float], None]) -> None:
    """Half of the budget was done before; 100 steps of 9 s, then 60 of 1 s, of 1000 in all."""
    out = Terminal()
    show = LiveLine("demo", 0.5, out=out)
    for step in range(1, 161):
        at(1000 + 9 * min(step, 100) + max(step - 100, 0))
        show.update(rows_of(2.0)[0], 0.5 + step / 1000)
    shown = [text.split()[-2] for text in out.getvalue().split("\r")[1:]]
    assert shown[0] == "1:14:51"  # 499 steps of 9 s
    assert shown[99] == "1:00:00"  # 400 steps of 9 s
    assert shown[-1] == "5:40"  # 340 steps of 1 s


@pytest.mark.parametrize("columns", [0, 20, 200])
def test_a_live_line_never_wraps(
    at: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    out = Terminal()
    monkeypatch.setattr(out, "fileno", lambda: 2)
    monkeypatch.setattr(
        os, "get_terminal_size", lambda fd: os.terminal_size((columns * fd // 2, 9))
    )
    show = LiveLine("a long name of a stage" * 5, out=out)
    at(1001)
    show.update(rows_of(2.0)[0], 0.5)
    shown = out.getvalue().removeprefix("\r\x1b[K")
    assert shown.startswith("a long name of a st")
    assert len(shown) == {0: 79, 20: 19}.get(columns, len(shown)) < 200


def test_a_step_without_a_finite_loss_can_be_shown() -> None:
    out = io.StringIO()
    LiveLine("demo", out=out).update(rows_of(None)[0], 1.0)
    assert "step 1" in out.getvalue()


def test_rows_survive_without_close(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "deep" / "metrics.jsonl", 0)
    log.write({"step": 1})
    assert read_metrics(log.path) == [{"step": 1}]
    log.close()
    again = MetricsLog(log.path, 1)
    again.write({"step": 2})
    again.close()
    assert read_metrics(log.path) == [{"step": 1}, {"step": 2}] == again.rows


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []
