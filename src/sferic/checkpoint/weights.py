"""Models on disk: saved, loaded and converted, in three layouts."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sferic.checkpoint.folder import CONFIG_FILE, PUBLISHED_CONFIG_FILE, ModelFolder
from sferic.checkpoint.hub import local_folder
from sferic.checkpoint.layouts import LAYOUTS, Layout, own_tensors, places
from sferic.checkpoint.progress import ByteLine
from sferic.checkpoint.published import OWN_KEY, SPECIAL_IDS, to_published
from sferic.checkpoint.shards import INDEX_FILE, Out, write_shards
from sferic.config import ModelConfig, dump
from sferic.data import Tokenizer, copy_tokenizer
from sferic.data.files import locked, recover, replace_folder, sync, temporary
from sferic.nn import HybridModel

SHARD_BYTES = 5_000_000_000
# stands in a folder while it is written, and is locked
WRITING_FILE = ".writing"


def load(path: str | Path, *, device: str = "cpu", dtype: torch.dtype | None = None) -> HybridModel:
    """Read a model of any layout, ready for inference.

    Weights go straight to their place, one tensor at a time: beside the model, memory holds
    less than one file.

    Args:
        path: a folder, or `owner/name[@revision]` on the Hugging Face hub (extra `hub`).
        device: where the weights go.
        dtype: of the weights; None keeps the stored one.

    Raises:
        ValueError: the folder is no model, or tensors are missing, unexpected or misshapen; the
            message lists them.
    """
    _check_dtype(dtype)
    folder = ModelFolder(path)
    dtypes = folder.dtypes()
    with torch.device("meta"):
        model = HybridModel(folder.config)
    weights = {}
    total = sum(w.numel() * dtypes[name].itemsize for name, w in model.state_dict().items())
    with ByteLine("loading", total) as line:
        for name, wanted in model.state_dict().items():
            empty = torch.empty(wanted.shape, dtype=dtype or dtypes[name], device=device)
            weights[name] = folder.fill(name, empty)
            line.add(wanted.numel() * dtypes[name].itemsize)
    model.load_state_dict(weights, assign=True)
    model.to(device)  # the slopes, which are no weights
    return model.eval().requires_grad_(False)


def save(
    model: HybridModel,
    path: str | Path,
    *,
    layout: Layout = "sferic",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model's config and weights to a folder, beside it first and then renamed.

    An earlier model that Sferic wrote is replaced; other files in its folder stay.

    Args:
        model: on any device.
        path: the folder.
        layout: "sferic" holds every model; "minimax" and "transformers" are what others read, and
            hold what MiniMax's architecture allows.
        shard_bytes: no file of weights grows beyond this, unless by a single tensor.

    Raises:
        ValueError: something other than a model has that name, or the layout can't hold the model.
    """
    weights = model.state_dict()
    content = _Content(
        config=model.config,
        dtypes={name: w.dtype for name, w in weights.items()},
        get=lambda name: weights[name].detach().cpu(),
    )
    _write(Path(path), content, layout, shard_bytes)


def convert(
    source: str | Path,
    path: str | Path,
    *,
    layout: Layout,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model folder in another layout or dtype, without holding the model.

    Memory holds one file and one of our tensors, at most all experts of a layer.

    The tokenizer's files come along.  Arguments as in `load` and `save`.

    Raises:
        ValueError: as `load` and `save` do, or the target is there already.
    """
    _check_dtype(dtype)
    path = Path(path)
    if path.exists():
        raise ValueError(f"{path} is there already: choose another path to write to")
    folder = ModelFolder(source)
    stored = folder.dtypes()
    shapes = {name: w.shape for name, w in own_tensors(folder.config).items()}
    dtypes = {name: dtype or old for name, old in stored.items()}

    content = _Content(
        config=folder.config,
        dtypes=dtypes,
        get=lambda name: folder.fill(name, torch.empty(shapes[name], dtype=dtypes[name])),
        beside=folder.path,
        old_config=folder.published_config,
    )
    _write(path, content, layout, shard_bytes)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model folder or hub id (or of a tokenizer.json)."""
    return Tokenizer.load(local_folder(path, weights=False))


@dataclass(frozen=True)
class _Content:
    """What a model folder is written from."""

    config: ModelConfig
    dtypes: dict[str, torch.dtype]  # of our tensors
    get: Callable[[str], Tensor]  # one of them, on the CPU
    beside: Path | None = None  # a folder whose tokenizer comes along
    old_config: dict[str, Any] = field(default_factory=dict)  # an earlier config.json


def _write(path: Path, content: _Content, layout: Layout, shard_bytes: int) -> None:
    config_file = _config_file(content, layout)
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes is {shard_bytes}: a file must have room for a byte")
    path = path.resolve()  # through a link, not in place of it
    recover(path)
    if path.exists() and not _is_ours(path):
        raise ValueError(f"{path} exists and is not a model that Sferic wrote: choose another path")
    folder = temporary(path)
    with _alone(folder):
        name, text = config_file
        (folder / name).write_text(text + "\n", "utf-8")
        _write_weights(folder, _outs(content, layout), content.get, shard_bytes)
        if content.beside is not None:
            _copy_tokenizer(content.beside, folder, content.old_config)
        _keep_others(path, folder)
        for file in folder.iterdir():
            sync(file)
        replace_folder(path)
        (path / WRITING_FILE).unlink()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A new folder that no other process writes; it is gone after an error."""
    marker = folder / WRITING_FILE
    if folder.exists() and not marker.exists():
        raise ValueError(f"{folder} is in the way: move it, or choose another path to write to")
    folder.mkdir(parents=True, exist_ok=True)
    with locked(marker, f"another process is writing {folder}: wait for it"):
        for stale in folder.iterdir():  # of a process that died
            if stale != marker:
                shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
        try:
            yield
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _write_weights(
    folder: Path, outs: list[Out], get: Callable[[str], Tensor], shard_bytes: int
) -> None:
    total, free = sum(out.nbytes for out in outs), shutil.disk_usage(folder).free
    if total > free:
        raise ValueError(
            f"{folder} needs {total / 1e9:,.1f} GB and the disk has {free / 1e9:,.1f} GB free: "
            "choose a path on another disk"
        )
    with ByteLine("writing", total) as line:
        write_shards(folder, outs, get, shard_bytes, line)


def _copy_tokenizer(source: Path, target: Path, config: dict[str, Any]) -> None:
    """The tokenizer's files, and the end id where only the model's config names it."""
    copy_tokenizer(source, target)
    generation = target / "generation_config.json"
    ids = {key: config[key] for key in SPECIAL_IDS if config.get(key) is not None}
    if ids and not generation.exists():
        generation.write_text(json.dumps(ids, indent=2) + "\n", "utf-8")


def _keep_others(old: Path, new: Path) -> None:
    """Copy what is neither config nor weights of an earlier model."""
    for item in old.iterdir() if old.exists() else ():
        weights = item.suffix == ".safetensors" or item.name == INDEX_FILE
        if weights or item.name in (CONFIG_FILE, PUBLISHED_CONFIG_FILE, WRITING_FILE):
            continue
        if item.is_dir() and not item.is_symlink():
            shutil.copytree(item, new / item.name, symlinks=True)
        else:
            shutil.copy2(item, new / item.name, follow_symlinks=False)


def _check_dtype(dtype: object) -> None:
    good = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
    if dtype is not None and not good:
        raise ValueError(f"dtype is {dtype!r}: give torch.float32, torch.bfloat16 or torch.float16")


def _config_file(content: _Content, layout: Layout) -> tuple[str, str]:
    """Name and text of the config's file."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is none of {', '.join(LAYOUTS)}")
    if layout == "sferic":
        return CONFIG_FILE, dump(content.config)
    dtype = str(content.dtypes["embed_tokens.weight"]).removeprefix("torch.")
    data = to_published(content.config, layout, dtype, content.old_config)
    return PUBLISHED_CONFIG_FILE, json.dumps(data, indent=2)


def _outs(content: _Content, layout: Layout) -> list[Out]:
    ours = own_tensors(content.config)
    return [
        Out(
            name,
            place.ours,
            place.view,
            place.view(ours[place.ours]).numel() * content.dtypes[place.ours].itemsize,
        )
        for name, place in places(content.config, layout).items()
    ]


def _is_ours(path: Path) -> bool:
    """Whether a folder is a model that may be replaced: published files may not."""
    if (path / CONFIG_FILE).is_file():
        return True
    try:
        data = json.loads((path / PUBLISHED_CONFIG_FILE).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and OWN_KEY in data
