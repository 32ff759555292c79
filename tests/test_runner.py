"""A recipe from text to report, in this process."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import sferic
from sferic import runner
from sferic.config import ConfigError, Recipe, load_recipe
from sferic.config.recipe import RESERVED_NAMES
from sferic.data import StoreError, TokenStore
from sferic.infer import Sampling, continue_text, generate_stream
from sferic.train import read_metrics

MODULES = ("bisect", "heapq", "keyword", "opcode", "queue", "sched", "stat", "types")
SMALL = (
    "data.heldout=0.265",  # one of the modules
    "tokenizer.vocab_size=400",
    "prompt='def '",
    "stages.0.seq_len=64",
    "stages.0.batch=[{tokens=128}]",
    "stages.0.budget={steps=4}",
    "stages.0.validate_every=2",
    "stages.0.checkpoint_every=2",
    "stages.0.precision=fp32",
)


@dataclass
class Run:
    recipe: Recipe
    out: Path
    report: dict[str, Any]
    lines: list[str]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for name in MODULES:
        shutil.copy(Path(sysconfig.get_path("stdlib"), f"{name}.py"), folder)
    return folder


@pytest.fixture(autouse=True, scope="module")
def short_samples() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "SAMPLE_TOKENS", 8)
        yield


def run(recipe: Recipe, out: Path) -> Run:
    lines: list[str] = []
    return Run(recipe, out, runner.run(recipe, out, "cpu", lines.append), lines)


@pytest.fixture(scope="module")
def small(corpus: Path) -> Callable[..., Recipe]:
    """`small("a.b=c")`, the tiny recipe at its smallest, over the corpus."""
    return lambda *overrides: load_recipe("tiny", (f"data.corpus={corpus}", *SMALL, *overrides))


@pytest.fixture(scope="module")
def whole(small: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run; tests must not change its folder."""
    return run(small(), tmp_path_factory.mktemp("runs") / "whole")


@pytest.fixture
def copy(whole: Run, tmp_path: Path) -> Path:
    """A finished run to change."""
    shutil.copytree(whole.out, tmp_path / "copy")
    return tmp_path / "copy"


def test_a_run_leaves_its_files(whole: Run) -> None:
    files = {p.relative_to(whole.out).as_posix() for p in whole.out.rglob("*") if p.is_file()}
    kept = {f for f in files if "checkpoints" not in f}
    stores = {
        f"data/{s}/{f}"
        for s in ("train", "heldout")
        for f in ("tokens.bin", "ends.idx", "meta.json")
    }
    assert kept == stores | {
        "lock", "recipe.json", "tokenizer.json", "report.json", "tiny/metrics.jsonl",
        "tiny/loss.png", "model/model.safetensors", "model/sferic.json", "model/tokenizer.json",
    }  # fmt: skip
    assert {Path(f).parts[2] for f in files - kept} == {"step-00000002", "step-00000004"}
    assert load_recipe(whole.out / "recipe.json") == whole.recipe
    assert {path.name for path in whole.out.iterdir()} == {"tiny", *RESERVED_NAMES} - {"profile"}


def test_the_report_agrees_with_what_it_reports(whole: Run) -> None:
    assert json.loads((whole.out / "report.json").read_text()) == whole.report
    rows = read_metrics(whole.out / "tiny" / "metrics.jsonl")
    stage = whole.report["stages"]["tiny"]
    assert stage["steps"] == rows[-1]["step"] == 4
    assert stage["tokens"] == rows[-1]["tokens"] == 512
    assert stage["validation_loss"] == rows[-1]["validation_loss"]
    assert stage["skipped"] == 0
    seconds = sum(128 / row["tokens_per_second"] for row in rows)
    assert stage["training_seconds"] == pytest.approx(seconds)
    scores = whole.report["bits_per_byte"]
    assert scores["heldout_bytes"] == Path(sysconfig.get_path("stdlib"), "sched.py").stat().st_size
    assert 0 < scores["xz"] < scores["unigram"]
    text = "\n".join(whole.lines)
    for key in ("model", "unigram", "zlib", "xz"):
        assert f" {scores[key]:.3f}" in text


def test_the_model_is_the_last_checkpoint_with_the_runs_tokenizer(whole: Run) -> None:
    model = sferic.load(whole.out / "model")
    assert model.config == whole.recipe.model
    tokenizer = sferic.load_tokenizer(whole.out / "model")
    assert tokenizer.hash == TokenStore(whole.out / "data" / "train").tokenizer_hash
    assert tokenizer.vocab_size == 400
    out = "".join(continue_text(model, tokenizer, "def ", max_new_tokens=5))
    assert out.startswith("def ")


def test_a_second_run_trains_nothing_and_says_the_same(
    whole: Run, copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def state() -> dict[str, bytes]:
        files = [p for p in copy.rglob("*") if p.is_file() and p.suffix != ".png"]
        return {str(p): p.read_bytes() for p in files}

    before = state()
    for owner, name in ((runner, "Trainer"), (runner, "compression"), (runner, "save")):
        monkeypatch.setattr(owner, name, lambda *args: pytest.fail("done again"))
    again = run(whole.recipe, copy)
    assert again.report == whole.report
    assert state() == before
    assert again.lines[0] == f"{copy} holds the finished run"
    first = [line for line in whole.lines if "Bits per byte" in line or line.startswith("  ")]
    assert len(first) == 5
    assert [line for line in again.lines if line in first] == first
    said = capsys.readouterr().out
    assert said.startswith("def ")
    run(whole.recipe, copy)
    assert capsys.readouterr().out == said


def test_another_recipe_in_the_same_folder_is_refused(
    small: Callable[..., Recipe], whole: Run
) -> None:
    other = small("stages.0.budget.steps=5", "model.hidden_size=48", "seed=1")
    with pytest.raises(ConfigError, match="holds a run of another recipe") as error:
        run(other, whole.out)
    for part in (
        str(whole.out), "stages.0.budget.steps was 4, now 5", "model.hidden_size was 32, now 48",
        "seed was 0, now 1", "--out",
    ):  # fmt: skip
        assert part in str(error.value)


class Killed(BaseException):
    """What stands for the end of the process."""


@pytest.mark.parametrize("late", [False, True])
def test_a_run_that_dies_at_every_file_ends_like_one_that_did_not(
    whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Each file and folder gets its name by a rename; die just before or after each of them."""
    out = tmp_path / "run"
    died: list[str] = []
    replace = os.replace

    def dying(source: Path, target: Path) -> None:
        name = Path(target).relative_to(out).as_posix()
        if name in died:
            return replace(source, target)
        died.append(name)
        if late:
            replace(source, target)
        raise Killed

    monkeypatch.setattr(os, "replace", dying)
    for _ in range(30):
        try:
            found = run(whole.recipe, out)
            break
        except Killed:
            pass
    else:
        pytest.fail(f"never done, died at {died}")
    assert set(died) == {
        "recipe.json", "tokenizer.json", "data/train", "data/heldout", "tiny/metrics.jsonl",
        "tiny/checkpoints/step-00000002", "tiny/checkpoints/step-00000004", "tiny/loss.png",
        "model", "model.old.tmp", "model/tokenizer.json",
        "report.json",
    }  # fmt: skip
    assert found.report["bits_per_byte"] == whole.report["bits_per_byte"]
    for name in (
        "recipe.json",
        "tokenizer.json",
        "model/model.safetensors",
        "model/tokenizer.json",
    ):
        assert (out / name).read_bytes() == (whole.out / name).read_bytes()
    rows = [read_metrics(f / "tiny" / "metrics.jsonl") for f in (out, whole.out)]
    assert [(r["step"], r["loss"]) for r in rows[0]] == [(r["step"], r["loss"]) for r in rows[1]]
    assert not list(out.rglob("*.tmp"))


@pytest.fixture
def two_stages(whole: Run, tmp_path: Path) -> Path:
    """The same recipe with a second stage, longer and with another RoPE, that learns nothing."""
    data = json.loads((whole.out / "recipe.json").read_text())
    first = data["stages"][0]
    second = {
        **first,
        "name": "longer",
        "seq_len": 128,
        "budget": {"steps": 2},
        "rope_base": 20.0,
        "lr": [{"shape": "constant", "to": 0.0}],
        "batch": [{"tokens": 256}],
    }
    path = tmp_path / "two.json"
    path.write_text(json.dumps({**data, "stages": [first, second]}))
    return path


def test_a_second_stage_starts_from_the_first_ones_weights(
    whole: Run, two_stages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = run(load_recipe(two_stages), tmp_path / "run")
    assert list(made.report["stages"]) == ["tiny", "longer"]
    first, second = (sferic.load(r.out / "model") for r in (whole, made))
    for (name, p), q in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert first.config.rope_base == 10_000
    assert second.config == first.config.model_copy(update={"rope_base": 20.0})
    rows = read_metrics(made.out / "longer" / "metrics.jsonl")
    assert [row["tokens"] for row in rows] == [256, 512]
    # the text is scored with the last stage's RoPE and length
    assert made.report["bits_per_byte"]["model"] != whole.report["bits_per_byte"]["model"]
    assert made.report["bits_per_byte"]["xz"] == whole.report["bits_per_byte"]["xz"]
    shutil.rmtree(made.out / "longer")
    (made.out / "report.json").unlink()
    capsys.readouterr()
    again = run(load_recipe(two_stages), tmp_path / "run")  # stage one comes from its checkpoint
    assert capsys.readouterr().err.startswith("tiny: finished before, at step 4\nlonger ")
    assert again.report["bits_per_byte"] == made.report["bits_per_byte"]


def test_a_tokenizer_from_a_file(small: Callable[..., Recipe], whole: Run, tmp_path: Path) -> None:
    path = whole.out / "tokenizer.json"
    made = run(small(f"tokenizer={{path='{path}'}}"), tmp_path / "run")
    assert (made.out / "tokenizer.json").read_bytes() == path.read_bytes()
    assert made.report["bits_per_byte"] == whole.report["bits_per_byte"]


def test_a_tokenizer_larger_than_the_model_is_refused(
    small: Callable[..., Recipe], whole: Run, tmp_path: Path
) -> None:
    path = whole.out / "tokenizer.json"
    recipe = small(f"tokenizer={{path='{path}'}}", "model.vocab_size=399")
    with pytest.raises(ConfigError, match=r"has 400 entries, model\.vocab_size is 399"):
        run(recipe, tmp_path / "run")


def test_a_store_of_another_tokenizer_is_refused(
    small: Callable[..., Recipe], whole: Run, copy: Path, tmp_path: Path
) -> None:
    recipe = small("tokenizer.vocab_size=300", "stages.0.budget.steps=1")
    other = run(recipe, tmp_path / "other")
    shutil.copy(other.out / "tokenizer.json", copy)
    with pytest.raises(ValueError, match="train was made with another tokenizer"):
        run(whole.recipe, copy)


def test_a_damaged_store_is_noticed(whole: Run, copy: Path) -> None:
    file = copy / "data" / "heldout" / "tokens.bin"
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    with pytest.raises(StoreError, match=r"heldout is damaged"):
        run(whole.recipe, copy)


def test_an_empty_prompt_starts_a_document(whole: Run) -> None:
    model, tokenizer = sferic.load(whole.out / "model"), sferic.load_tokenizer(whole.out / "model")
    pieces = list(continue_text(model, tokenizer, "", max_new_tokens=6))
    ids = generate_stream(
        model, [[tokenizer.end_id]], max_new_tokens=6, vocab_size=tokenizer.vocab_size
    )
    assert "".join(pieces) == tokenizer.decode(token for (token,) in ids if token is not None)


def test_a_continuation_stays_within_the_tokenizer(whole: Run) -> None:
    """The model has 512 rows and the tokenizer 400: the rest must never be drawn."""
    model, tokenizer = sferic.load(whole.out / "model"), sferic.load_tokenizer(whole.out / "model")
    with torch.no_grad():
        model.lm_head.weight[400:] = model.lm_head.weight[:112] * 50
    text = "".join(continue_text(model, tokenizer, "x", Sampling(2.0), max_new_tokens=20))
    assert text.startswith("x")


def test_a_folder_with_other_files_is_left_alone(whole: Run, tmp_path: Path) -> None:
    mine = tmp_path / "data" / "train" / "mine.csv"
    mine.parent.mkdir(parents=True)
    mine.write_text("precious")
    with pytest.raises(ConfigError, match="not empty and holds no run"):
        run(whole.recipe, tmp_path)
    assert mine.read_text() == "precious"


@pytest.mark.parametrize(
    "override",
    ["data.corpus=nowhere", "data.heldout=0.0001", "tokenizer={path='none.json'}"],
)
def test_inputs_that_do_not_serve_leave_the_folder_to_the_mended_command(
    small: Callable[..., Recipe], tmp_path: Path, override: str
) -> None:
    with pytest.raises(ValueError, match=r"'nowhere'|heldout=0.0001|none\.json"):
        run(small(override), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_that_was_too_large_for_the_text_can_be_made_smaller(
    small: Callable[..., Recipe], whole: Run, tmp_path: Path
) -> None:
    large = ("model.vocab_size=50000", "tokenizer.vocab_size=50000")
    with pytest.raises(ValueError, match=r"the texts fill only .* ask for fewer entries"):
        run(small(*large), tmp_path / "run")
    made = run(small(), tmp_path / "run")
    assert made.report["bits_per_byte"] == whole.report["bits_per_byte"]
    assert load_recipe(made.out / "recipe.json") == whole.recipe


@pytest.mark.parametrize("out", [".", "runs/x"])
def test_a_run_does_not_read_its_own_files(
    small: Callable[..., Recipe], corpus: Path, tmp_path: Path, out: str
) -> None:
    (tmp_path / "link").symlink_to(corpus)
    folder = tmp_path / "link" / out
    with pytest.raises(ConfigError, match=r"lies in the corpus .* learn from its own files"):
        run(small(), folder if out != "." else tmp_path / "link" / "new")
    assert {path.stem for path in corpus.iterdir()} == set(MODULES)


def test_one_folder_takes_one_run_at_a_time(whole: Run, copy: Path) -> None:
    script = f"import fcntl, time; f = open({str(copy / 'lock')!r}, 'ab'); "
    script += "fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        try:
            with pytest.raises(ValueError, match=f"another process runs in {copy}; wait for it"):
                run(whole.recipe, copy)
        finally:
            other.kill()
    assert run(whole.recipe, copy).report == whole.report


def test_a_run_holds_its_folder_to_the_end(
    whole: Run, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def meanwhile(*arguments: Any) -> None:
        with pytest.raises(ValueError, match="another process runs in"):
            run(whole.recipe, copy)
        tried.append(1)

    for name in ("prepare_tokenizer", "show_continuation"):
        kept = getattr(runner, name)
        monkeypatch.setattr(runner, name, lambda *a, kept=kept: (meanwhile(), kept(*a))[1])
    run(whole.recipe, copy)
    assert tried == [1, 1]


@pytest.mark.parametrize("lines", [0, 2, 3])
def test_a_log_that_was_cut_or_deleted_does_not_cost_the_model(
    whole: Run, copy: Path, lines: int
) -> None:
    """Before the report and after it; the last row of a log of 4 is lost."""
    log = copy / "tiny" / "metrics.jsonl"
    kept = log.read_text().splitlines(keepends=True)[:lines]
    log.write_text("".join(kept) + '{"step": ') if lines else log.unlink()
    assert run(whole.recipe, copy).report == whole.report
    (copy / "report.json").unlink()
    again = run(whole.recipe, copy).report
    assert again["bits_per_byte"] == whole.report["bits_per_byte"]
    assert again["stages"] == whole.report["stages"]


def test_deleted_weights_come_back_and_the_report_stays(whole: Run, copy: Path) -> None:
    shutil.rmtree(copy / "model")
    assert run(whole.recipe, copy).report == whole.report
    weights = "model/model.safetensors"
    assert (copy / weights).read_bytes() == (whole.out / weights).read_bytes()
