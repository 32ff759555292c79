"""The command line as a user meets it."""

import contextlib
import io
import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from sferic import __version__, runner
from sferic.cli import app, main
from sferic.config import load_recipe
from sferic.data import Tokenizer, TokenStore

Sferic = Callable[..., tuple[int, str, str]]
MODULES = ("bisect", "heapq", "keyword", "queue", "sched", "stat", "types")
SMALL = (
    "data.heldout=0.265", "tokenizer.vocab_size=400", "prompt='import '", "stages.0.seq_len=64",
    "stages.0.batch=[{tokens=128}]", "stages.0.budget={steps=2}", "stages.0.precision=fp32",
)  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for name in MODULES:
        shutil.copy(Path(sysconfig.get_path("stdlib"), f"{name}.py"), folder)
    return folder


@pytest.fixture
def sferic(capsys: pytest.CaptureFixture[str]) -> Sferic:
    """Runs a command line here: exit code, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = 0
        capsys.readouterr()
        try:
            main([str(a) for a in arguments])
        except SystemExit as error:
            code = int(error.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call


def small_run(corpus: Path, out: Path) -> list[str]:
    sets = [x for item in (f"data.corpus={corpus}", *SMALL) for x in ("--set", item)]
    return ["run", "tiny", "--out", str(out), "--device", "cpu", *sets]


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    out = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr(runner, "SAMPLE_TOKENS", 2)
        main(small_run(corpus, out))
    return out


def test_a_run_leaves_weights_and_says_where(sferic: Sferic, corpus: Path, finished: Path) -> None:
    for name in ("model/model.safetensors", "tiny/loss.png", "report.json", "tokenizer.json"):
        assert (finished / name).is_file()
    code, out, err = sferic(*small_run(corpus, finished))
    assert code == 0
    assert f"Weights are in {finished / 'model'}, losses in {finished / 'tiny/loss.png'}" in out
    assert "\nimport " in out
    assert f"{finished} holds the finished run\n" in out
    assert err == ""  # no line of a step
    code, _, err = sferic(*small_run(corpus, finished), "--set", "seed=3")
    assert code == 2
    assert err.startswith(f"sferic: {finished} holds a run of another recipe (seed was 0, now 3)")


def test_what_a_run_suggests_next_can_be_typed(
    sferic: Sferic, corpus: Path, finished: Path
) -> None:
    _, out, _ = sferic(*small_run(corpus, finished))
    lines = [line.split() for line in out.splitlines() if line.startswith("  sferic ")]
    assert [line[1] for line in lines] == ["generate", "info", "run"]
    code, _, _ = sferic(*lines[1][1:])
    assert code == 0
    assert load_recipe(lines[2][2], [lines[2][-1]]).stages[0].budget.steps == 2000


def test_a_file_of_prompts(sferic: Sferic, finished: Path, tmp_path: Path) -> None:
    rows, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows.write_text('{"prompt": "import "}\n{"prompt": "def f", "max_tokens": 3}\n')
    model = finished / "model"
    line = ["generate", "--model", model, "--input", rows, "--output", out, "--device", "cpu"]
    code, said, _ = sferic(*line, "--max-new-tokens", 5)
    assert (code, said) == (0, f"{out}: 2 rows, 8 new tokens\n")
    results = [json.loads(text) for text in out.read_text().splitlines()]
    assert [r["usage"]["completion_tokens"] for r in results] == [5, 3]
    _, alone, _ = sferic("generate", "--model", model, "--prompt", "import ", "--max-new-tokens", 5)
    assert alone == "import " + results[0]["text"] + "\n"


def test_a_profiled_run_says_where_the_trace_of_a_step_is(
    sferic: Sferic, corpus: Path, tmp_path: Path
) -> None:
    line = [*small_run(corpus, tmp_path / "run"), "--set", "stages.0.budget.steps=5", "--profile"]
    trace = tmp_path / "run" / "profile" / "trace.json"
    code, out, _ = sferic(*line)
    assert code == 0
    assert f"the trace of step 4 is in {trace}\n" in out
    assert json.loads(trace.read_text())["traceEvents"]
    code, out, _ = sferic(*line)  # nothing is left to train
    assert code == 0
    assert "no step was traced" in out


def test_the_version(sferic: Sferic) -> None:
    assert sferic("--version") == (0, f"sferic {__version__}\n", "")
    command = [sys.executable, "-m", "sferic", "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"sferic {__version__}\n")


def test_info_of_text_01(sferic: Sferic) -> None:
    code, out, _ = sferic("info", "text-01", "--json")
    assert code == 0
    numbers = json.loads(out)
    assert list(numbers) == [
        "total_params", "active_params_no_vocab", "kv_bytes_per_token", "state_bytes_per_sequence",
        "weight_bytes", "flops_per_token",
    ]  # fmt: skip
    assert numbers["total_params"] / 1e9 == pytest.approx(456.09, abs=0.005)
    assert numbers["active_params_no_vocab"] / 1e9 == pytest.approx(45.94, abs=0.005)
    assert numbers["kv_bytes_per_token"] == 40_960
    assert numbers["state_bytes_per_sequence"] == 280 * 2**20
    assert numbers["weight_bytes"].keys() == {"bf16", "int8"}
    assert len(numbers["flops_per_token"]) == 3


def test_info_for_people_and_with_a_change(sferic: Sferic) -> None:
    _, out, _ = sferic("info", "text-01")
    for part in ("456,0", "45,94", "40,960 bytes per token", "293,601,280 bytes per sequence"):
        assert part in out
    _, before, _ = sferic("info", "tiny", "--json")
    _, after, _ = sferic("info", "tiny", "--json", "--set", "num_layers=8")
    assert json.loads(after)["kv_bytes_per_token"] == 2 * json.loads(before)["kv_bytes_per_token"]


def verbs() -> Iterator[list[str]]:
    def walk(command: Any, path: list[str]) -> Iterator[list[str]]:
        yield path
        for name, child in getattr(command, "commands", {}).items():
            yield from walk(child, [*path, name])

    return walk(typer.main.get_command(app), [])


@pytest.mark.parametrize("path", list(verbs()), ids=" ".join)
def test_every_command_has_help(sferic: Sferic, path: list[str]) -> None:
    code, out, err = sferic(*path, "--help")
    assert (code, err) == (0, "")
    assert "Usage" in out
    assert len(out.splitlines()) > 5


def test_help_tells_the_defaults_that_depend(sferic: Sferic) -> None:
    for verb, defaults in (("run", ("runs/RECIPE", "cuda if there is one")), ("generate", ())):
        _, out, _ = sferic(verb, "--help")
        for default in (*defaults, "cuda if there is one"):
            assert f"[default: ({default})]" in " ".join(out.replace("│", " ").split())


def test_these_are_the_commands() -> None:
    assert {" ".join(path) for path in verbs()} >= {
        "info", "run", "generate", "data tokenize", "data pack", "tokenizer train",
    }  # fmt: skip


@pytest.mark.parametrize("path", [[], ["data"], ["tokenizer"]], ids=" ".join)
def test_a_command_without_its_verb_shows_help(sferic: Sferic, path: list[str]) -> None:
    code, out, err = sferic(*path)
    assert code == 2
    assert "Usage" in out + err
    assert "sferic: \n" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("info text-1", "unknown model 'text-1'; did you mean 'text-01'?"),
        ("run dmo", "unknown recipe 'dmo'; did you mean 'demo'?"),
        ("run nowhere.toml", "nowhere.toml: can't be read"),
        ("run tiny --set model.hiden_size=3", "'hiden_size'; did you mean 'hidden_size'?"),
        ("run tiny --set stages.0.seq_len=abc", "stages.0.seq_len = 'abc': must be a valid"),
        ("run tiny --set nonsense", "--set 'nonsense': write key=value"),
        ("run tiny --set stages.3.seq_len=1", "has no element '3'"),
        ("info tiny --set num_heads=3", "num_kv_heads 2 must divide num_heads 3"),
        ("run tiny --out {tmp}/run --set data.corpus={tmp}/none", "none' is not a folder"),
        ("run tiny --out {tmp}/run --device nothing", "device 'nothing' can't be used"),
        ("generate --model {tmp}/none --prompt x", "none is not there"),
        ("generate --model x", "give --prompt, or --input and --output"),
        ("generate --model x --prompt y --input z --output w", "give --prompt, or --input"),
        ("generate --model x --input z", "give --prompt, or --input and --output"),
        ("data tokenize {tmp} {tmp}/s --tokenizer {tmp}/t.json", "has no t.json: copy it"),
        ("data pack {tmp}/none", "none is not a token store"),
        ("tokenizer train {tmp}/none {tmp}/t.json", "none' is not a folder"),
        ("info", "Missing"),
        ("run tiny --bogus", "No such option: --bogus"),
        ("bogus", "No such command 'bogus'"),
        ("generate --model x --prompt y --max-new-tokens 0", "--max-new-tokens"),
        ("generate --model x --prompt y --seed z", "--seed"),
        ("generate --model x --prompt y --temperature nan", "temperature is nan, it must be 0 or"),
        ("generate --model x --prompt y --top-p 0", "top_p is 0.0, it must be a number above 0"),
        ("generate --model x --prompt y --top-k -1", "top_k is -1, it must be a whole number"),
        ("generate --model x --prompt y --min-p 2", "min_p is 2.0, it must be a number from 0"),
        ("generate --model x --prompt y --repetition-penalty 0", "use 1 for no penalty"),
    ],
)
def test_what_a_user_can_mend_is_a_short_message_and_code_2(
    sferic: Sferic, tmp_path: Path, arguments: str, message: str
) -> None:
    code, _, err = sferic(*(word.format(tmp=tmp_path) for word in arguments.split()))
    assert code == 2
    assert err.startswith("sferic: ")
    assert message in err
    assert len(err.splitlines()) <= 2
    assert not (tmp_path / "run").exists()


def test_errors_leave_the_process_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sferic", "info", "text-1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("sferic: unknown model 'text-1'; did you mean 'text-01'?")
    assert done.stderr.count("\n") == 1


def test_a_bug_keeps_its_traceback(sferic: Sferic, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("sferic.cli.sizes", broken)
    with pytest.raises(ZeroDivisionError):
        sferic("info", "tiny")


def test_generation_repeats_with_its_seed(sferic: Sferic, finished: Path) -> None:
    def text(*options: str) -> str:
        given = ("--model", finished / "model", "--prompt", "class ", "--max-new-tokens", 12)
        code, out, err = sferic("generate", *given, *options)
        assert (code, err) == (0, "")
        assert out.startswith("class ")
        assert out.endswith("\n")
        return out

    hot = ("--temperature", "1.5")
    assert text() == text("--seed", "5")  # greedy
    assert text(*hot, "--seed", "1") == text(*hot, "--seed", "1")
    assert text(*hot, "--seed", "1") != text(*hot, "--seed", "2")
    for one in (("--top-p", "1e-6"), ("--top-k", "1"), ("--min-p", "1")):
        assert text(*hot, *one) == text()
    assert text("--repetition-penalty", "0.001") != text()


def test_generation_streams(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Out:
        def write(self, text: str) -> None:
            events.append(text)

        def flush(self) -> None:
            events.append("<flush>")

    monkeypatch.setattr(sys, "stdout", Out())
    main(["generate", "--model", str(finished / "model"), "--prompt", "x", "--max-new-tokens", "9"])
    assert events[0].startswith("x")
    assert events.count("<flush>") >= 9
    assert all(b == "<flush>" for a, b in zip(events[:-1:2], events[1::2], strict=True))


def test_tokenizer_store_and_packs(sferic: Sferic, corpus: Path, tmp_path: Path) -> None:
    file, store = tmp_path / "tokenizer.json", tmp_path / "store"
    code, out, _ = sferic("tokenizer", "train", corpus, file, "--vocab-size", 300)
    tokenizer = Tokenizer.load(file)
    assert code == 0
    assert out == f"{file}: 300 entries, sha256 {tokenizer.hash[:16]}\n"
    code, out, _ = sferic("data", "tokenize", corpus, store, "--tokenizer", file)
    opened = TokenStore(store)
    assert code == 0
    assert out == f"{store}: {len(MODULES)} documents, {opened.num_tokens:,} tokens\n"
    first = tokenizer.decode(opened.document(0).tolist())
    assert first.encode() == (corpus / "bisect.py").read_bytes()
    code, out, _ = sferic("data", "pack", store, "--seq-len", 128, "--seed", 1)
    report = json.loads(out)
    assert code == 0
    assert report["tokens"] == opened.num_tokens
    assert report["seq_len"] == 128
    assert report["dropped"] == 0
    assert report["packs"] * 128 * report["fill"] == pytest.approx(opened.num_tokens)
    code, _, err = sferic("data", "tokenize", corpus, store, "--tokenizer", file)
    assert code == 2
    assert "a store is never overwritten" in err


def test_the_package_and_quick_commands_do_not_load_torch() -> None:
    script = """
import sys, sferic, sferic.cli
for arguments in (["info", "demo"], ["--help"], ["run", "dmo"]):
    try:
        sferic.cli.main(arguments)
    except SystemExit:
        pass
assert not {"torch", "numpy", "tokenizers", "matplotlib"} & set(sys.modules)
assert callable(sferic.load) and "torch" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_ctrl_c_outside_training_is_no_success(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(corpus: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sferic.data.read_corpus", interrupted)
    with pytest.raises(SystemExit) as stopped:
        main(["tokenizer", "train", "stdlib", str(tmp_path / "tokenizer.json")])
    assert stopped.value.code == 130
