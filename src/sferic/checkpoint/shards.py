"""Safetensors files of a folder: read tensor by tensor, written shard by shard."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sferic.checkpoint.layouts import copy
from sferic.checkpoint.progress import ByteLine

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True)
class Header:
    """What a file says of one tensor."""

    file: Path
    shape: list[int]
    dtype: str  # safetensors' name: BF16, F32, I8, ...

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """None for a dtype that weights can't have."""
        return _DTYPES.get(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes; of a dtype that weights can't have, as many as its name says bits."""
        bits = int(re.sub(r"\D", " ", self.dtype).split()[0]) if re.search(r"\d", self.dtype) else 8
        return torch.Size(self.shape).numel() * bits // 8


def read_headers(folder: Path) -> dict[str, Header]:
    """Every tensor of a folder's safetensors files, by name; no weights are read.

    With an index, its files; else `model.safetensors`, else all of them.

    Raises:
        ValueError: no such files, only pickles, a file that is missing or damaged, or a tensor
            that two files hold.
    """
    headers: dict[str, Header] = {}
    for file in _files(folder):
        for name, header in _read_header(file):
            if name in headers:
                raise ValueError(
                    f"{name} is in {headers[name].file} and in {file.name}: keep one of them"
                )
            headers[name] = header
    return headers


def read_tensor(header: Header, name: str, into: Callable[[Tensor], object]) -> None:
    """Hand a tensor to `into`; its file is mapped only meanwhile, so it costs no lasting memory."""
    try:
        with safe_open(header.file, "pt") as file:
            into(file.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise _damaged(header.file, error) from error


@dataclass(frozen=True)
class Out:
    """A tensor to write: its name, the source to ask for, the part of it, and its size."""

    name: str
    source: str
    view: Callable[[Tensor], Tensor]
    nbytes: int


def write_shards(
    folder: Path,
    outs: list[Out],
    get: Callable[[str], Tensor],
    shard_bytes: int,
    line: ByteLine,
) -> None:
    """Write tensors in order; memory for one shard and one source tensor.

    Args:
        folder: exists, and holds no weights yet.
        outs: what to write; tensors of one source stand together.
        get: a source tensor by name, asked for once, unless a shard ends inside it.
        shard_bytes: a file ends before it would grow beyond this, but holds one tensor at least.
        line: told of the bytes written.
    """
    shards = _split(outs, shard_bytes)
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        many = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        file = SINGLE_FILE if len(shards) == 1 else many
        tensors: dict[str, Tensor] = {}
        source: tuple[str, Tensor] | None = None
        for out in shard:
            if source is None or source[0] != out.source:
                source = (out.source, get(out.source))
            view = out.view(source[1])
            if not view.is_contiguous():
                view = copy(torch.empty(view.shape, dtype=view.dtype), view)
            tensors[out.name] = view
        save_file(tensors, folder / file, metadata={"format": "pt"})
        line.add(sum(out.nbytes for out in shard))
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        total = sum(out.nbytes for out in outs)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def _split(outs: list[Out], shard_bytes: int) -> list[list[Out]]:
    shards: list[list[Out]] = [[]]
    size = 0
    for out in outs:
        if shards[-1] and size + out.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(out)
        size += out.nbytes
    return shards


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if index.exists():
        names = sorted(set(_weight_map(index).values()))
        if SINGLE_FILE not in names and (folder / SINGLE_FILE).exists():
            raise ValueError(
                f"{folder} has weights twice, in {SINGLE_FILE} and in the files of {INDEX_FILE}: "
                "delete the older ones"
            )
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ValueError(
                f"{folder} lacks {len(missing)} of the {len(names)} files of its index: "
                f"{listed(missing)}; copy or download them"
            )
        return [folder / name for name in names]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ValueError(
            f"{folder} has its weights in {pickles[0]}, a pickle, which can run any code: "
            "get them as safetensors"
        )
    raise ValueError(f"{folder} has no *.safetensors file")


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        names = json.loads(index.read_text("utf-8"))["weight_map"]
        good = all(isinstance(f, str) and Path(f).name == f for f in names.values())
        if names and good:
            return names
        raise ValueError("weight_map must map tensor names to file names of the folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is not a readable index: {error!r}") from error


def _read_header(path: Path) -> Iterator[tuple[str, Header]]:
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                yield name, Header(path, list(part.get_shape()), part.get_dtype())
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} is damaged ({error}); copy or download it again")


def listed(names: list[str], limit: int = 20) -> str:
    """Names for an error message, the first ones of very many."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more:,} more" if more > 0 else "")
