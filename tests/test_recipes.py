"""Every recipe and model preset that comes with the package."""

import shutil
import sysconfig
from pathlib import Path

import pytest

from sferic import runner
from sferic.config import Recipe, load_model, load_recipe, model_names, recipe_names, sizes
from sferic.train import read_metrics

PACKAGE = Path(runner.__file__).parent / "recipes"
MODULES = ("bisect", "heapq", "queue", "sched", "stat")


def shrunk(name: str, corpus: Path) -> Recipe:
    """The recipe with the tiny model, short packs and two steps per stage."""
    overrides = [
        f"data.corpus={corpus}", "data.heldout=0.265", "model={extends='models/tiny'}",
        "tokenizer={vocab_size=400}", "prompt=''",
    ]  # fmt: skip
    for i, stage in enumerate(load_recipe(name).stages):
        budget = "{steps=2}" if stage.budget.steps else "{tokens=128}"
        overrides += [
            f"stages.{i}.seq_len=64",
            f"stages.{i}.budget={budget}",
            *(f"stages.{i}.batch.{k}.tokens=64" for k in range(len(stage.batch))),
        ]
    return load_recipe(name, overrides)


def test_every_file_is_a_recipe_or_a_model() -> None:
    files = {p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*") if p.is_file()}
    assert files == {f"{name}.toml" for name in recipe_names()} | {
        f"models/{name}.toml" for name in model_names()
    }
    assert {"demo", "tiny"} <= set(recipe_names())


@pytest.mark.parametrize("name", model_names())
def test_a_model_preset_loads_and_has_sizes(name: str) -> None:
    numbers = sizes(load_model(name))
    assert numbers["total_params"] > numbers["active_params_no_vocab"] > 0


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_runs_two_steps_of_each_stage_when_shrunk(name: str, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for module in MODULES:
        shutil.copy(Path(sysconfig.get_path("stdlib"), f"{module}.py"), corpus)
    recipe = shrunk(name, corpus)
    assert load_recipe(name).model.vocab_size >= 4096 or name == "tiny"
    report = runner.run(recipe, tmp_path / "run", "cpu", lambda line: None)
    for stage in recipe.stages:
        rows = read_metrics(tmp_path / "run" / stage.name / "metrics.jsonl")
        assert [row["step"] for row in rows] == [1, 2]
        assert report["stages"][stage.name]["validation_loss"] > 0
