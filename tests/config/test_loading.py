"""Files, `extends`, overrides, and the way back from a dump."""

from pathlib import Path
from typing import Any

import pytest

from sferic.config import (
    ConfigError,
    DenseFFN,
    MoEFFN,
    apply_set,
    dump,
    load_model,
    load_recipe,
    model_names,
    recipe_names,
)

MODEL = 'extends = "models/tiny"\n'


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def error_of(path: Path | str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_model(path, overrides)
    return str(error.value)


def test_the_package_has_these_files() -> None:
    assert {"demo", "tiny"} <= set(recipe_names())
    assert {"demo", "text-01", "text-01-slice8", "tiny"} <= set(model_names())


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_survives_a_dump(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    assert load_recipe(write(tmp_path / "recipe.json", dump(recipe))) == recipe


@pytest.mark.parametrize("name", model_names())
def test_every_model_survives_a_dump(name: str, tmp_path: Path) -> None:
    model = load_model(name)
    text = dump(model)
    assert "\n  " in text
    assert load_model(write(tmp_path / "model.json", text)) == model


def test_recipes_use_the_shipped_models() -> None:
    assert load_recipe("demo").model == load_model("demo")
    assert load_recipe("tiny").model == load_model("tiny")


def test_tiny_patches_the_demo_stage() -> None:
    demo, tiny = load_recipe("demo").stages[0], load_recipe("tiny").stages[0]
    assert (tiny.name, tiny.seq_len, tiny.batch[0].tokens) == ("tiny", 256, 512)
    assert tiny.lr[0].to == demo.lr[0].to
    assert tiny.lr[1] == demo.lr[1]


def test_unknown_names() -> None:
    message = error_of("text01")
    assert message.startswith("unknown model 'text01'; did you mean 'text-01'? The package has ")
    assert all(name in message for name in model_names())
    assert message.endswith("a path ends in .toml or .json.")
    with pytest.raises(ConfigError, match=r"unknown recipe 'qqq'\. The package has "):
        load_recipe("qqq")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "none.toml: can't be read (No such file" in error_of(tmp_path / "none.toml")
    assert "a.toml: not valid TOML: " in error_of(write(tmp_path / "a.toml", "x = = 1"))
    assert "a.json: not valid JSON: " in error_of(write(tmp_path / "a.json", "{"))
    assert "b.json: holds [1]; it must hold one table" in error_of(
        write(tmp_path / "b.json", "[1]")
    )


def test_a_file_extends_another_by_path_relative_to_itself(tmp_path: Path) -> None:
    write(tmp_path / "base.toml", MODEL + "hidden_size = 48\nnum_layers = 8\n")
    child = write(tmp_path / "deep" / "child.toml", 'extends = "../base.toml"\nnum_layers = 12\n')
    model = load_model(child)
    assert (model.hidden_size, model.num_layers) == (48, 12)
    assert model.residual_scale.ffn == 24**0.25  # derived for the child


def test_a_json_file_can_be_extended(tmp_path: Path) -> None:
    write(tmp_path / "base.json", dump(load_model("tiny")))
    child = write(tmp_path / "child.toml", 'extends = "base.json"\nrope_base = 5e6\n')
    assert load_model(child) == load_model("tiny", ["rope_base=5e6"])


def test_tables_merge_and_arrays_are_replaced(tmp_path: Path) -> None:
    text = MODEL + 'layer_pattern = ["softmax"]\nffn.size = 96\n'
    model = load_model(write(tmp_path / "a.toml", text))
    assert model.layer_pattern == ("softmax",)
    assert model.ffn == MoEFFN(kind="moe", size=96, num_experts=4, top_k=2, capacity_factor=1.25)


def test_another_kind_replaces_the_table(tmp_path: Path) -> None:
    dense = DenseFFN(kind="dense", size=96)
    text = MODEL + '[ffn]\nkind = "dense"\nsize = 96\n'
    assert load_model(write(tmp_path / "a.toml", text)).ffn == dense
    assert load_model("tiny", ["ffn={kind='dense', size=96}"]).ffn == dense
    assert load_model("tiny", ["ffn.kind=dense", "ffn.size=96"]).ffn == dense
    assert "ffn.size: missing" in error_of("tiny", "ffn.kind=dense")


def test_the_same_kind_merges() -> None:
    ffn = load_model("tiny", ["ffn={kind='moe', size=96}"]).ffn
    assert ffn == MoEFFN(kind="moe", size=96, num_experts=4, top_k=2, capacity_factor=1.25)


def test_a_nested_extends_replaces_the_inherited_table(tmp_path: Path) -> None:
    write(tmp_path / "base.toml", 'extends = "demo"\n[model]\nnorm_eps = 1e-3\n')
    text = 'extends = "base.toml"\ntokenizer.vocab_size = 512\n[model]\nextends = "models/tiny"\n'
    recipe = load_recipe(write(tmp_path / "a.toml", text + "rope_base = 5e6\n"))
    assert recipe.model == load_model("tiny", ["rope_base=5e6"])
    again = load_recipe("demo", ["tokenizer.vocab_size=512", "model.extends=models/tiny"])
    assert again.model == load_model("tiny")


def test_the_new_one_of_two_exclusive_fields_wins() -> None:
    recipe = load_recipe(
        "tiny",
        ["tokenizer.path=x.json", "stages.0.budget.tokens=4096", "stages.0.lr.1.length=8"],
    )
    assert (recipe.tokenizer.path, recipe.tokenizer.vocab_size) == ("x.json", None)
    assert (recipe.stages[0].budget.tokens, recipe.stages[0].budget.steps) == (4096, None)


def test_cycles_name_the_chain(tmp_path: Path) -> None:
    a = write(tmp_path / "a.toml", 'extends = "b.toml"\n')
    write(tmp_path / "b.toml", '[ffn]\nextends = "c.toml"\n')
    write(tmp_path / "c.toml", 'extends = "a.toml"\n')
    message = error_of(a)
    assert message.endswith("a circle: a.toml -> b.toml -> c.toml -> a.toml; remove one of them")


def test_one_file_may_be_extended_twice_without_a_cycle(tmp_path: Path) -> None:
    part = write(tmp_path / "part.toml", "lightning = 1.0\nsoftmax = 2.0\nffn = 3.0\n")
    text = MODEL + "".join(
        f'[{scale}]\nextends = "{part.name}"\n' for scale in ("residual_scale", "branch_scale")
    )
    model = load_model(write(tmp_path / "a.toml", text))
    assert model.residual_scale == model.branch_scale
    assert model.branch_scale.ffn == 3.0


def test_bad_extends_name_the_file(tmp_path: Path) -> None:
    a = write(tmp_path / "a.toml", 'extends = "models/tyni"\n')
    assert "a.toml: unknown recipe or model 'models/tyni'; did you mean 'models/t" in error_of(a)
    b = write(tmp_path / "b.toml", "extends = 3\n")
    assert "b.toml: extends = 3: must be the name or path of a file" in error_of(b)


def test_a_patch_names_an_element_that_exists(tmp_path: Path) -> None:
    path = write(tmp_path / "a.toml", 'extends = "tiny"\n[stages.1]\nname = "x"\n')
    with pytest.raises(
        ConfigError, match=r"a\.toml: stages\.1: the array stages has no element '1'; it holds 1,"
    ):
        load_recipe(path)
    with pytest.raises(ConfigError, match=r"--set 'stages\.last\.name=x': stages\.last: the array"):
        load_recipe("tiny", ["stages.last.name=x"])


@pytest.mark.parametrize(
    ("item", "wanted"),
    [
        ("a=2", {"a": 2, "b": {"c": [1, {"d": 2}]}}),
        ("a=text with = sign", {"a": "text with = sign", "b": {"c": [1, {"d": 2}]}}),
        ("a=", {"a": "", "b": {"c": [1, {"d": 2}]}}),
        ("a='2'", {"a": "2", "b": {"c": [1, {"d": 2}]}}),
        ("a=3e-3", {"a": 3e-3, "b": {"c": [1, {"d": 2}]}}),
        ("b.c.1.d=true", {"a": 1, "b": {"c": [1, {"d": True}]}}),
        ("b.c.0=[5]", {"a": 1, "b": {"c": [[5], {"d": 2}]}}),
        ("b.c=[]", {"a": 1, "b": {"c": []}}),
        ("x.y.z=1", {"a": 1, "b": {"c": [1, {"d": 2}]}, "x": {"y": {"z": 1}}}),
    ],
)
def test_set(item: str, wanted: dict[str, Any]) -> None:
    data = {"a": 1, "b": {"c": [1, {"d": 2}]}}
    assert apply_set(data, item) == wanted
    assert data == {"a": 1, "b": {"c": [1, {"d": 2}]}}


@pytest.mark.parametrize("item", ["a", "=1", "a..b=1", ""])
def test_set_needs_a_key_and_a_value(item: str) -> None:
    with pytest.raises(ConfigError, match="write key=value, as in"):
        apply_set({}, item)


def test_overrides_apply_in_order() -> None:
    assert load_model("tiny", ["hidden_size=40", "hidden_size=48"]).hidden_size == 48
