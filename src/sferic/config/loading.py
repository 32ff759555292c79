"""Recipes and models from TOML or JSON, with `extends` and `--set a.b=c`.

Three rules say how a table is laid over the one it extends; overrides follow the same ones:

- Tables merge field by field, arrays are replaced. A table with integer keys patches the
  elements of an array: `[stages.0]`.
- A table that names its own `extends`, or another `kind`, replaces the inherited table.
- Of two fields that exclude each other (a budget's steps and tokens), the new one wins.
"""

import json
import tomllib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from sferic.config.base import C, Config, ConfigError, build, did_you_mean
from sferic.config.model import ModelConfig
from sferic.config.recipe import Recipe

# a wheel is installed unpacked, so package data are plain files
_RECIPES = Path(str(files("sferic"))) / "recipes"
_MODELS = _RECIPES / "models"
_SUFFIXES = (".toml", ".json")
_EXCLUSIVE = (frozenset({"steps", "tokens"}), frozenset({"vocab_size", "path"}))

Table = dict[str, Any]


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe that comes with the package, or a .toml or .json file.

    Args:
        name_or_path: One of `recipe_names()`, or a path ending in .toml or .json.
        overrides: Items "a.b=c" applied in order, as in `apply_set`.

    Raises:
        ConfigError: Naming each problem and what is allowed.
    """
    return _load(Recipe, name_or_path, overrides, "recipe", _RECIPES)


def load_model(name_or_path: str | Path, overrides: Sequence[str] = ()) -> ModelConfig:
    """Load a model that comes with the package, or a file; arguments as in `load_recipe`."""
    return _load(ModelConfig, name_or_path, overrides, "model", _MODELS)


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    return _names(_RECIPES)


def model_names() -> list[str]:
    """The models that come with the package."""
    return _names(_MODELS)


def dump(config: Config) -> str:
    """A config as indented JSON, derived numbers included; it loads to an equal config."""
    return config.model_dump_json(indent=2)


def apply_set(data: Table, item: str) -> Table:
    """Plain `data` with one override, "a.b=c", laid over it; `data` itself is unchanged.

    The value is read as TOML, else taken as a plain string. An integer names an array's element
    and missing tables are made.

    Raises:
        ConfigError: If the item is no "key=value", or the key names no place in `data`.
    """
    key, equals, text = (part.strip() for part in item.partition("="))
    parts = key.split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {item!r}: write key=value, as in stages.0.seq_len=512")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    for part in reversed(parts):
        value = {part: value}
    try:
        return _overlay(data, value, (), "")
    except ConfigError as error:
        raise ConfigError(f"--set {item!r}: {error}") from None


def _names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.toml"))


def _load(
    cls: type[C], name_or_path: str | Path, overrides: Sequence[str], what: str, folder: Path
) -> C:
    path = Path(name_or_path)
    if path.suffix not in _SUFFIXES:
        path = _packaged(str(name_or_path), what, folder, _names(folder))
    data = _read(path, ())
    for item in overrides:
        data = apply_set(data, item)
    return build(cls, data, f"{what} {name_or_path}")


def _packaged(name: str, what: str, folder: Path, names: list[str]) -> Path:
    if name not in names:
        raise ConfigError(
            f"unknown {what} {name!r}{did_you_mean(name, names) or '.'} "
            f"The package has {', '.join(names)}; a path ends in .toml or .json."
        )
    return folder / f"{name}.toml"


def _read(path: Path, chain: tuple[Path, ...]) -> Table:
    """One file with every `extends` in it resolved; `chain` is the files that led here."""
    if path.resolve() in chain:
        circle = " -> ".join(link.name for link in (*chain, path))
        raise ConfigError(f"extends goes in a circle: {circle}; remove one of them")
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: can't be read ({error.strerror}); check the path") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds {data!r}; it must hold one table")
    try:
        return _overlay({}, data, (*chain, path.resolve()), "")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _extended(name: Any, chain: tuple[Path, ...]) -> Table:
    if not isinstance(name, str):
        raise ConfigError(f"extends = {name!r}: must be the name or path of a file")
    if Path(name).suffix in _SUFFIXES:
        folder = chain[-1].parent if chain else Path()
        return _read(folder / name, chain)
    names = recipe_names() + [f"models/{model}" for model in model_names()]
    return _read(_packaged(name, "recipe or model", _RECIPES, names), chain)


def _overlay(base: Any, over: Any, chain: tuple[Path, ...], at: str) -> Any:
    """`over`, as a file says it, laid over the resolved `base` at the dotted path `at`."""
    if isinstance(over, list):
        return [_overlay(None, item, chain, _join(at, i)) for i, item in enumerate(over)]
    if not isinstance(over, dict):
        return over
    if "extends" in over:
        base = _extended(over["extends"], chain)
        over = {key: value for key, value in over.items() if key != "extends"}
    if isinstance(base, list):
        return _patch(base, over, chain, at)
    if not isinstance(base, dict) or _kind_changes(base, over):
        base = {}
    loses = {key for group in _EXCLUSIVE if group & over.keys() for key in group}
    kept = {key: value for key, value in base.items() if key not in loses}
    return kept | {
        key: _overlay(base.get(key), value, chain, _join(at, key)) for key, value in over.items()
    }


def _patch(base: list[Any], over: Table, chain: tuple[Path, ...], at: str) -> list[Any]:
    patched = list(base)
    for key, value in over.items():
        if not key.isdecimal() or int(key) >= len(base):
            raise ConfigError(
                f"{_join(at, key)}: the array {at} has no element {key!r}; "
                f"it holds {len(base)}, counted from 0"
            )
        patched[int(key)] = _overlay(base[int(key)], value, chain, _join(at, key))
    return patched


def _kind_changes(base: Table, over: Table) -> bool:
    return "kind" in base and "kind" in over and base["kind"] != over["kind"]


def _join(at: str, key: str | int) -> str:
    return f"{at}.{key}" if at else str(key)
