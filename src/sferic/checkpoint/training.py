"""Train checkpoints: weights, optimizer moments and counters, complete or not there at all.

A checkpoint is a folder `step-00000120` that PyTorch's distributed checkpoint wrote, with
`progress.json` beside the tensors, which also holds the files' hashes.  It is written under another
name and renamed when every byte is on disk, so a process killed at any moment leaves the last
complete one.
"""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from sferic.data.files import discard, publish, sha256, sync, temporary

PROGRESS_FILE = "progress.json"
PREFIX = "step-"


def save_checkpoint(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: dict[str, Any],
    keep: int,
) -> Path:
    """Write `folder/step-N` and delete all but the newest `keep` checkpoints.

    Args:
        folder: where the checkpoints of a stage lie.
        step: N, finished optimizer steps.
        model, optimizer: AdamW's moments are saved under the parameters' names.
        progress: JSON values: counters that the loop needs to go on.
        keep: how many checkpoints remain, this one included.
    """
    path = folder / f"{PREFIX}{step:08d}"
    temp = temporary(path)
    for stale in folder.glob(f"{PREFIX}*.tmp"):
        shutil.rmtree(stale)
    temp.mkdir(parents=True)
    with _one_process():
        state_dict_saver.save(_state(model, optimizer), checkpoint_id=temp, no_dist=True)
    saved = {"progress": progress, "sha256": {f.name: sha256(f) for f in temp.iterdir()}}
    (temp / PROGRESS_FILE).write_text(json.dumps(saved), "utf-8")
    for file in temp.iterdir():
        sync(file)
    discard(path)
    publish(path)
    for old in _complete(folder)[:-keep]:
        discard(old)
    return path


def latest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint with the highest step, or None."""
    return (_complete(folder) or [None])[-1]


def step_of(checkpoint: Path) -> int:
    """The optimizer step after which a checkpoint was saved."""
    return int(checkpoint.name.removeprefix(PREFIX))


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Read a checkpoint into a model and its optimizer in place; returns the saved progress.

    Raises:
        ValueError: the checkpoint is damaged or belongs to another model.
    """
    state = _state(model, optimizer)
    try:
        progress, hashes = _read_progress(path / PROGRESS_FILE)
        for name, digest in hashes.items():
            if sha256(path / name) != digest:
                raise ValueError(f"{name} has changed since it was written")
        with _one_process():
            state_dict_loader.load(state, checkpoint_id=path, no_dist=True)
        return progress
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise ValueError(
            f"the checkpoint {path} can't be read ({reason}); delete it to go on from an "
            "earlier one"
        ) from error


def _read_progress(file: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The loop's counters, and the hash of each other file."""
    match json.loads(file.read_text("utf-8")):
        case {"progress": dict(progress), "sha256": dict(hashes)}:
            return progress, hashes
    raise ValueError(f"{file.name} holds no progress")


def _one_process() -> warnings.catch_warnings:
    """Without the library's warning that there are no other processes."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)


def _complete(folder: Path) -> list[Path]:
    """Sorted by step, since names have a fixed width."""
    return sorted(p for p in folder.glob(f"{PREFIX}*") if not p.name.endswith(".tmp"))


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of training by name, as views that loading fills in place."""
    tensors: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        tensors[f"model.{name}"] = p.detach()
        state = optimizer.state[p]
        if not state:  # AdamW makes it at its first step
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        for key, value in state.items():
            tensors[f"optimizer.{key}.{name}"] = value
    return tensors
