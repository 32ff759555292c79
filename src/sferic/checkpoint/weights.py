"""A model as a folder: `sferic.json`, its config, and `model.safetensors`, in our own names."""

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sferic.config import ConfigError, ModelConfig, build, dump
from sferic.data import Tokenizer
from sferic.data.files import discard, publish, sync, temporary
from sferic.nn import HybridModel

CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE = "sferic.json", "model.safetensors", "tokenizer.json"


def save(model: HybridModel, path: str | Path) -> None:
    """Write a model's config and weights to a folder, beside it first and then renamed.

    An earlier model of that name is replaced, but for its `tokenizer.json`.

    Raises:
        ValueError: something other than a model has that name.
    """
    path = Path(path)
    if path.exists() and not (path / CONFIG_FILE).is_file():
        raise ValueError(f"{path} exists and is not a model folder: choose another path")
    folder = temporary(path)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(dump(model.config) + "\n", "utf-8")
    weights = {name: p.detach().cpu().contiguous() for name, p in model.state_dict().items()}
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    if (path / TOKENIZER_FILE).exists():
        shutil.copyfile(path / TOKENIZER_FILE, folder / TOKENIZER_FILE)
    for file in folder.iterdir():
        sync(file)
    discard(path)
    publish(path)


def load(path: str | Path, *, device: str = "cpu", dtype: torch.dtype | None = None) -> HybridModel:
    """Read a model that `save` wrote, ready for inference.

    Args:
        path: the folder.
        device: where the weights go.
        dtype: of the weights; None keeps the stored one.

    Raises:
        ValueError: the folder is no model, or tensors are missing, unexpected or misshapen; the
            message lists them.
    """
    path = Path(path)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (path / name).is_file():
            raise ValueError(f"{path} is not a model folder: it has no {name}")
    config = read_config(path)
    with torch.device("meta"):
        model = HybridModel(config)
    wanted = model.state_dict()
    weights = {}
    try:
        with safe_open(path / WEIGHTS_FILE, "pt", device=device) as file:
            found = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            _compare(path, {n: list(t.shape) for n, t in wanted.items()}, found)
            for name in wanted:
                tensor = file.get_tensor(name)
                weights[name] = tensor if dtype is None else tensor.to(dtype)
    except SafetensorError as error:
        raise ValueError(
            f"{path / WEIGHTS_FILE} is damaged ({error}); copy or save it again"
        ) from error
    model.load_state_dict(weights, assign=True)
    model.to(device)  # the slopes, which are no weights
    return model.eval().requires_grad_(False)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model folder (or of a tokenizer.json)."""
    return Tokenizer.load(path)


def read_config(path: str | Path) -> ModelConfig:
    """The config of a model folder."""
    file = Path(path) / CONFIG_FILE
    try:
        data = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not a readable config: {error}") from error
    return build(ModelConfig, data, str(file))


def _compare(path: Path, wanted: dict[str, list[int]], found: dict[str, list[int]]) -> None:
    problems = [f"missing {n}" for n in wanted if n not in found]
    problems += [f"unexpected {n}" for n in found if n not in wanted]
    problems += [
        f"{n} is {found[n]} where the config needs {shape}"
        for n, shape in wanted.items()
        if n in found and found[n] != shape
    ]
    if problems:
        raise ValueError(f"{path / WEIGHTS_FILE} does not fit its config: " + "; ".join(problems))
