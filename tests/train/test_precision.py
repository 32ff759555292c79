"""The dtype of the branches, and recomputation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sferic.train import Trainer
from sferic.train.precision import compute_dtype

Make = Callable[..., Trainer]


@pytest.mark.parametrize(
    ("capability", "expected"), [((9, 0), torch.bfloat16), ((8, 0), torch.bfloat16), ((7, 5), None)]
)
def test_auto_is_bf16_where_a_gpu_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: torch.dtype | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert compute_dtype("auto", torch.device("cuda")) is expected
    assert compute_dtype("auto", torch.device("cpu")) is None
    for device in (torch.device("cuda"), torch.device("cpu")):
        assert compute_dtype("bf16", device) is torch.bfloat16
        assert compute_dtype("fp32", device) is None


def test_bf16_trains_float32_weights(trainer: Make) -> None:
    options = ("stages.0.batch=[{tokens=128}]", "stages.0.lr=[{shape='constant', to=5e-3}]")
    made, exact = (trainer(f"stages.0.precision={p}", *options) for p in ("bf16", "fp32"))
    seen = []
    made.model.layers["0"].get_submodule("mixer").register_forward_hook(
        lambda module, args, out: seen.append(out.dtype)
    )
    rows, exact_rows = ([t.step() for _ in range(12)] for t in (made, exact))
    assert set(seen) == {torch.bfloat16}
    assert {p.dtype for p in made.model.parameters()} == {torch.float32}
    moments = {t.dtype for state in made.optimizer.state.values() for t in state.values()}
    assert moments == {torch.float32}
    assert rows[0]["loss"] != exact_rows[0]["loss"]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.4
    assert rows[-1]["loss"] == pytest.approx(exact_rows[-1]["loss"], rel=0.02)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_recomputation_changes_no_bit(trainer: Make, dtype: str) -> None:
    def first_rows(recompute: str) -> tuple[Trainer, list[dict[str, Any]]]:
        made = trainer(f"stages.0.recompute={recompute}", f"stages.0.precision={dtype}")
        rows = [made.step() for _ in range(4)]
        for row in rows:
            del row["tokens_per_second"]
        return made, rows

    kept, expected = first_rows("false")
    again, rows = first_rows("true")
    assert rows == expected
    for p, q in zip(kept.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_recomputation_runs_each_block_twice(trainer: Make) -> None:
    runs = []
    for recompute in ("false", "true"):
        made = trainer(f"stages.0.recompute={recompute}")
        count = [0]
        made.model.layers["2"].get_submodule("mixer").register_forward_hook(
            lambda *_, count=count: count.__setitem__(0, count[0] + 1)
        )
        made.step()
        runs.append(count[0])
    assert runs[1] == 2 * runs[0]
