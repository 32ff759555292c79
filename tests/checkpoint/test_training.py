"""Train checkpoints: complete or not there, pruned, and refused when damaged."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sferic.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint, training

Pair = tuple[nn.Sequential, torch.optim.Optimizer]


class Killed(BaseException):
    """What stands for the end of the process."""


def pair(seed: int, steps: int = 0, sizes: tuple[int, int] = (8, 5)) -> Pair:
    """A model and its optimizer after some steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(*sizes), nn.Linear(sizes[1], 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, sizes[0])).square().sum().backward()
        optimizer.step()
    return model, optimizer


def tensors(made: Pair) -> list[Tensor]:
    model, optimizer = made
    moments = [optimizer.state[p] for p in model.parameters()]
    found = [p.detach() for p in model.parameters()] + [t for m in moments for t in m.values()]
    return [t.clone() for t in found]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def save(folder: Path, step: int, made: Pair, keep: int = 2) -> Path:
    return save_checkpoint(folder, step, *made, {"step": step}, keep)


def test_weights_moments_and_counters_come_back_bit_for_bit(tmp_path: Path) -> None:
    made = pair(0, steps=3)
    progress = {"step": 3, "seconds": 0.1 + 0.2, "data": "abc"}
    path = save_checkpoint(tmp_path, 3, *made, progress, 2)
    assert path == tmp_path / "step-00000003" == latest_checkpoint(tmp_path)
    other = pair(1)
    assert load_checkpoint(path, *other) == progress
    assert same(tensors(made), tensors(other))
    for model, optimizer in (made, other):  # and the next step too
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    assert same(tensors(made), tensors(other))


def test_saving_does_not_touch_what_it_saves(tmp_path: Path) -> None:
    made = pair(0, steps=3)
    before = tensors(made)
    save(tmp_path, 3, made)
    assert same(before, tensors(made))


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    made = pair(0)
    for step in (1, 2, 9, 10, 11):
        save(tmp_path, step, made, keep=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-00000009", "step-00000010", "step-00000011"
    ]  # fmt: skip
    save(tmp_path, 12, made, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000012"]


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "missing") is None


def test_an_unfinished_write_is_ignored_and_removed_by_the_next(tmp_path: Path) -> None:
    made = pair(0)
    path = save(tmp_path, 2, made)
    shutil.copytree(path, tmp_path / "step-00000004.tmp")
    assert latest_checkpoint(tmp_path) == path
    save(tmp_path, 6, made)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000006"]


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    save(tmp_path, 2, pair(0))
    made = pair(1, steps=1)
    path = save(tmp_path, 2, made)
    other = pair(2)
    load_checkpoint(path, *other)
    assert same(tensors(made), tensors(other))


def test_a_death_at_any_point_of_saving_leaves_a_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Die at the first, second, ... call that changes the disk, until none is left."""
    states = {2: pair(0, steps=2), 4: pair(0, steps=4)}
    calls = lives = 0

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > lives:
                raise Killed
            return function(*args, **kwargs)

        return call

    saver = training.state_dict_saver
    for lives in range(100):
        folder = tmp_path / str(lives)
        save(folder, 2, states[2], keep=1)
        calls = 0
        with monkeypatch.context() as patch:
            for owner, name in (
                (saver, "save"), (training, "sync"), (training, "publish"), (shutil, "rmtree"),
                (Path, "write_text"),
            ):  # fmt: skip
                patch.setattr(owner, name, dying(getattr(owner, name)))
            try:
                save(folder, 4, states[4], keep=1)
                break
            except Killed:
                pass
        latest = latest_checkpoint(folder)
        assert latest is not None
        other = pair(7)
        step = load_checkpoint(latest, *other)["step"]
        assert same(tensors(states[step]), tensors(other))
        assert save(folder, 4, states[4], keep=1) == latest_checkpoint(folder)
        assert [p.name for p in folder.iterdir()] == ["step-00000004"]
    assert 6 <= lives < 99


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "progress.json"])
@pytest.mark.parametrize("damage", [Path.unlink, truncate, empty, flip])
def test_damage_is_an_error_that_names_the_checkpoint_and_the_way_out(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    path = save(tmp_path, 2, pair(0, steps=2))
    damage(path / name)
    with pytest.raises(ValueError, match=r"step-00000002 can't be read \(.+\); delete it to go on"):
        load_checkpoint(path, *pair(1))


@pytest.mark.parametrize(
    "content", ["[]", "null", "3", "{}", '{"progress": 1, "sha256": {}}', '{"progress": {}}']
)
def test_progress_that_is_none_is_damage_too(tmp_path: Path, content: str) -> None:
    path = save(tmp_path, 2, pair(0, steps=2))
    (path / "progress.json").write_text(content)
    with pytest.raises(ValueError, match=r"can't be read \(progress.json holds no progress\)"):
        load_checkpoint(path, *pair(1))


def test_an_error_without_words_is_named_by_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise EOFError

    path = save(tmp_path, 2, pair(0))
    monkeypatch.setattr(training, "sha256", fail)
    with pytest.raises(ValueError, match=r"can't be read \(EOFError\)"):
        load_checkpoint(path, *pair(1))


def test_one_flipped_bit_of_a_weight_is_noticed(tmp_path: Path) -> None:
    made = pair(0, steps=2)
    path = save(tmp_path, 2, made)
    file = path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    weight = next(made[0].parameters()).detach().numpy().tobytes()
    assert content.count(weight) == 1
    content[content.index(weight)] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="step-00000002 can't be read"):
        load_checkpoint(path, *pair(1))


def test_another_shape_and_another_model_are_errors(tmp_path: Path) -> None:
    path = save(tmp_path, 2, pair(0, steps=2))
    with pytest.raises(ValueError, match="step-00000002 can't be read"):
        load_checkpoint(path, *pair(0, sizes=(8, 6)))
    model = nn.Sequential(*pair(0)[0], nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"step-00000002 can't be read .*model\.2\."):
        load_checkpoint(path, model, optimizer)
