"""A model folder of any layout: its config, its tensors by our names, the files beside them.

sferic         sferic.json   + model*.safetensors
minimax        config.json   + model*.safetensors (Text-01, M1)
transformers   config.json   + model*.safetensors (`-hf`), as in memory or as saved
"""

import json
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sferic.checkpoint.hub import local_folder
from sferic.checkpoint.layouts import Layout, copy, is_derived, layout_of, places, shapes
from sferic.checkpoint.published import from_published
from sferic.checkpoint.shards import Header, listed, read_headers, read_tensor
from sferic.config import ConfigError, ModelConfig, build
from sferic.data.files import recover

CONFIG_FILE, PUBLISHED_CONFIG_FILE = "sferic.json", "config.json"


class ModelFolder:
    """What lies in a folder; nothing is read before it is asked for.

    Every method raises ValueError where the folder can't be used, saying what is wrong with it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = local_folder(path)
        recover(self.path)

    @cached_property
    def config(self) -> ModelConfig:
        """The model's config, from either file."""
        return read_config(self.path)

    @cached_property
    def published_config(self) -> dict[str, Any]:
        """`config.json` as it is; empty where the folder has our own config."""
        own = (self.path / CONFIG_FILE).is_file()
        return {} if own else _read_json(self.path / PUBLISHED_CONFIG_FILE)

    @cached_property
    def headers(self) -> dict[str, Header]:
        """All stored tensors, derived ones too."""
        return read_headers(self.path)

    @cached_property
    def layout(self) -> Layout:
        """The layout of the stored tensors."""
        own = (self.path / CONFIG_FILE).is_file()
        return "sferic" if own else layout_of(self.headers)

    @cached_property
    def problems(self) -> list[str]:
        """One line for each missing, unexpected or misshapen tensor, or one that isn't floats."""
        return _compare(self.config, self.layout, self.headers)

    def require_fit(self) -> None:
        """Raise unless every tensor is there, with its shape and a dtype of floats."""
        if self.problems:
            raise ValueError(f"{self.path} does not fit its config: {listed(self.problems, 40)}")

    def dtypes(self) -> dict[str, torch.dtype]:
        """Stored dtype of each of our tensors; of mixed ones, what holds them all."""
        self.require_fit()
        found: dict[str, torch.dtype] = {}
        for ours, parts in self._parts.items():
            for name, _ in parts:
                dtype = self.headers[name].torch_dtype
                assert dtype is not None
                found[ours] = torch.promote_types(found.get(ours, dtype), dtype)
        return found

    def fill(self, ours: str, tensor: Tensor) -> Tensor:
        """Read our tensor of that name into `tensor`, of its shape, any dtype and device."""
        for name, view in self._parts[ours]:
            read_tensor(self.headers[name], name, partial(copy, view(tensor)))
        if tensor.dtype == torch.float16 and not bool(tensor.isfinite().all()):
            raise ValueError(f"{ours} has values beyond float16's 65,504: use bfloat16")
        return tensor

    @cached_property
    def _parts(self) -> dict[str, list[tuple[str, Callable[[Tensor], Tensor]]]]:
        parts: dict[str, list[tuple[str, Callable[[Tensor], Tensor]]]] = {}
        for name, place in places(self.config, self.layout).items():
            parts.setdefault(place.ours, []).append((name, place.view))
        return parts


def read_config(path: str | Path) -> ModelConfig:
    """The config of a model folder, from `sferic.json` or a published `config.json`."""
    path = Path(path)
    own, published = path / CONFIG_FILE, path / PUBLISHED_CONFIG_FILE
    if own.is_file():
        return build(ModelConfig, _read_json(own), str(own))
    if published.is_file():
        return from_published(_read_json(published), str(published))
    what = "is not a model folder: it" if path.is_dir() else "is not there, so it"
    raise ConfigError(f"{path} {what} has no {CONFIG_FILE} and no {PUBLISHED_CONFIG_FILE}")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not a readable config: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file} is not a readable config: it holds {data!r}, not a table")
    return data


def _compare(config: ModelConfig, layout: Layout, headers: dict[str, Header]) -> list[str]:
    wanted = shapes(config, layout)
    found = {name: header for name, header in headers.items() if not is_derived(name)}
    problems = [f"missing {name}" for name in wanted if name not in found]
    problems += [f"unexpected {name}" for name in found if name not in wanted]
    for name, shape in wanted.items():
        header = found.get(name)
        if header is None:
            continue
        if header.shape != shape:
            problems.append(f"{name} is {header.shape} where the config needs {shape}")
        if header.torch_dtype is None:
            problems.append(f"{name} is {header.dtype}, which is no dtype of weights here")
    return problems
