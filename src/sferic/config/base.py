"""The base of every config, and one readable error for everything wrong in a file."""

import difflib
from collections.abc import Iterable, Sequence
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

C = TypeVar("C", bound="Config")


class ConfigError(ValueError):
    """A recipe, model file or override that can't be used; the message says what to change."""


class Config(BaseModel):
    """Base of all configs: immutable, finite numbers only, unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def build(cls: type[C], data: dict[str, Any], source: str) -> C:
    """Validate `data` as a `cls`.

    Args:
        cls: The config to build.
        data: Plain values, as TOML or JSON gives them.
        source: Where `data` came from; it opens the error.

    Raises:
        ConfigError: With one line per problem: dotted path, offending value, what is allowed.
    """
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        lines = [f"  {_describe(cls, problem)}" for problem in _causes(error)]
        raise ConfigError("\n".join([f"{source} can't be used:", *lines])) from None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The hint "; did you mean 'lr'?" when a known word is close, else an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _causes(error: ValidationError) -> list[dict[str, Any]]:
    """The problems that aren't only consequences of others."""
    problems = [dict(problem) for problem in error.errors()]
    return [
        problem
        for problem in problems
        # a default that waits for a bad field; an array short of its bad elements
        if problem["type"] != "default_factory_not_called"
        and not (problem["type"] == "too_short" and problem["input"])
    ]


_EXPECTED = {
    "missing": "missing; this field is required",
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
    "tuple_type": "must be an array",
    "too_short": "must hold at least one element",
}


def _describe(cls: type[Config], problem: dict[str, Any]) -> str:
    kind, loc, value = problem["type"], problem["loc"], problem["input"]
    path, types = _trace(cls, loc)
    where = ".".join(path)
    if kind == "extra_forbidden":
        (owner,) = _trace(cls, loc[:-1])[1]
        known = list(owner.model_fields)
        hint = did_you_mean(path[-1], known) or f"; the fields here are {', '.join(known)}"
        return f"{where}: unknown field {path[-1]!r}{hint}"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        allowed = " or ".join(repr(tag) for member in types for tag in _tags(member))
        tag = problem["ctx"].get("tag")
        found = ": missing;" if tag is None else f" = {tag!r}:"
        return f"{where}.kind{found} must be {allowed}"
    if kind == "value_error":
        text = str(problem["ctx"]["error"])
    else:
        message: str = problem["msg"]
        text = _EXPECTED.get(kind, message.replace("Input should be", "must be"))
    self_contained = kind == "value_error" and isinstance(value, (dict, list, tuple))
    if kind == "missing" or self_contained:
        return f"{where}: {text}" if where else text
    return f"{where} = {value!r}: {text}"


def _trace(cls: type[Config], loc: Sequence[str | int]) -> tuple[list[str], list[Any]]:
    """The path a reader knows (pydantic's also names union members), and the types at its end."""
    path: list[str] = []
    types: list[Any] = [cls]
    for part in loc:
        if isinstance(part, int):
            path.append(str(part))
            types = [member for t in types for arg in get_args(t)[:1] for member in _members(arg)]
        elif len(types) > 1:
            types = [t for t in types if part in _tags(t)]
        else:
            path.append(part)
            field = types[0].model_fields.get(part)
            types = _members(field.annotation) if field else []
    return path, types


def _members(annotation: Any) -> list[Any]:
    """The types an annotation stands for, without None and without Annotated."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [member for arg in get_args(annotation) for member in _members(arg)]
    return [] if annotation is type(None) else [annotation]


def _tags(member: Any) -> tuple[str, ...]:
    return get_args(member.model_fields["kind"].annotation)
