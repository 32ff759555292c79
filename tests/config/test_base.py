"""One readable error for everything wrong in a config."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, PositiveInt, ValidationError

from sferic.config import Config, ConfigError, build


class Round(Config):
    kind: Literal["round"]
    radius: PositiveInt


class Flat(Config):
    kind: Literal["flat", "thin"]
    width: float = 1.0
    shape: Round | None = None


class Box(Config):
    size: PositiveInt
    half: PositiveInt = Field(default_factory=lambda data: data["size"] // 2)
    lid: Round | Flat = Field(discriminator="kind")
    items: tuple[Annotated[Round | Flat, Field(discriminator="kind")], ...] = ()
    names: tuple[str, ...] = Field(default=("a",), min_length=1)


LID = {"kind": "round", "radius": 2}


def problems(data: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        build(Box, data, "box.toml")
    first, *lines = str(error.value).split("\n")
    assert first == "box.toml can't be used:"
    return [line.removeprefix("  ") for line in lines]


def test_a_valid_table_builds() -> None:
    box = build(Box, {"size": 4, "lid": LID}, "box.toml")
    assert box == Box(size=4, half=2, lid=Round(kind="round", radius=2))


def test_configs_are_immutable() -> None:
    with pytest.raises(ValidationError):
        build(Box, {"size": 4, "lid": LID}, "box.toml").size = 5


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"size": 0}, "size = 0: must be greater than 0"),
        ({"size": {"a": 1}}, "size = {'a': 1}: must be a valid integer"),
        ({"siz": 1}, "siz: unknown field 'siz'; did you mean 'size'?"),
        ({"zzz": 1}, "zzz: unknown field 'zzz'; the fields here are size, half, lid, items, names"),
        (
            {"lid": LID | {"raduis": 1}},
            "lid.raduis: unknown field 'raduis'; did you mean 'radius'?",
        ),
        (
            {"items": [LID, {"kind": "thin", "widht": 1}]},
            "items.1.widht: unknown field 'widht'; did you mean 'width'?",
        ),
        (
            {"lid": {"kind": "flat", "shape": LID | {"radus": 1}}},
            "lid.shape.radus: unknown field 'radus'; did you mean 'radius'?",
        ),
        (
            {"items": [{"kind": "thin", "width": "x"}]},
            "items.0.width = 'x': must be a valid number",
        ),
        (
            {"items": [{"kind": "thin", "width": float("inf")}]},
            "items.0.width = inf: must be a fin",
        ),
        ({"lid": {"kind": "round"}}, "lid.radius: missing; this field is required"),
        ({"lid": {"kind": "oval"}}, "lid.kind = 'oval': must be 'round' or 'flat' or 'thin'"),
        ({"lid": {}}, "lid.kind: missing; must be 'round' or 'flat' or 'thin'"),
        ({"lid": 3}, "lid = 3: must be a table"),
        ({"items": 3}, "items = 3: must be an array"),
        ({"names": []}, "names = []: must hold at least one element"),
        ({"names": [1]}, "names.0 = 1: must be a valid string"),
    ],
)
def test_a_line_names_path_value_and_what_is_allowed(change: dict[str, Any], line: str) -> None:
    (found,) = problems({"size": 4, "lid": LID} | change)
    assert found.startswith(line)


def test_every_problem_has_its_line() -> None:
    lines = problems({"lid": LID | {"radius": -1}, "nams": ["a"]})
    assert [line.split(":")[0] for line in lines] == ["size", "lid.radius = -1", "nams"]
