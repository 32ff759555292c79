"""What README and docs tell a reader to type, and the paths they name."""

import re
import shlex
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from mended_minimax import tiny_transformers
from sferic.cli import app, main
from sferic.config import load_model, load_recipe
from sferic.runner import run

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Language and text of each fenced block."""
    yield from re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)


def commands() -> list[str]:
    """Lines of the shell blocks, continued ones joined."""
    lines = []
    for page in PAGES:
        for language, text in blocks(page):
            if language in ("sh", "bash", "console"):
                joined = text.replace("\\\n", " ")
                lines += [line.strip().removeprefix("$ ") for line in joined.splitlines()]
    return sorted({line for line in lines if line.startswith(("sferic ", "make "))})


def test_the_readme_has_commands() -> None:
    assert any(line.startswith("sferic ") for line in commands())
    assert "make demo" in commands()


@pytest.mark.parametrize("line", [c for c in commands() if c.startswith("sferic ")])
def test_a_sferic_command_parses_and_its_recipe_or_model_loads(line: str) -> None:
    arguments = shlex.split(line, comments=True)[1:]
    command: Any = typer.main.get_command(app)
    path = []
    while arguments and arguments[0] in getattr(command, "commands", {}):
        path.append(arguments.pop(0))
        command = command.commands[path[-1]]
    assert not hasattr(command, "commands"), f"no such command: {line}"
    given = command.make_context(" ".join(path), arguments).params
    if path == ["run"] and "@" not in given["recipe"]:
        load_recipe(given["recipe"], given["overrides"] or ())
    if path == ["info"]:
        load_model(given["preset"], given["overrides"] or ())


@pytest.mark.parametrize("line", [c for c in commands() if c.startswith("make ")])
def test_a_make_command_names_targets_and_variables_of_the_makefile(line: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in shlex.split(line, comments=True)[1:]:
        if "=" in word:
            assert re.search(rf"^{word.partition('=')[0]} *[:?]?=", makefile, re.M), word
        else:
            assert re.search(rf"^{re.escape(word)}:", makefile, re.M), word


def tree() -> dict[Path, int]:
    """Paths that the README's tree names, each with its indentation."""
    text = (ROOT / "README.md").read_text("utf-8")
    match = re.search(r"^```\w*\n(src/sferic/.*?)^```", text, re.M | re.S)
    assert match is not None, "README.md has no block that starts with src/sferic/"
    paths: dict[Path, int] = {}
    folders: list[tuple[int, Path]] = [(-1, ROOT)]
    for line in match[1].splitlines():
        name = line.split()[0]
        indent = len(line) - len(line.lstrip())
        while folders[-1][0] >= indent:
            folders.pop()
        path = folders[-1][1] / name
        paths[path] = indent
        if name.endswith("/"):
            folders.append((indent, path))
    return paths


def test_paths_of_the_tree_exist() -> None:
    missing = [str(path) for path in tree() if not path.exists()]
    assert not missing


def test_the_tree_names_every_part_of_the_package() -> None:
    package = ROOT / "src" / "sferic"
    parts = {
        path
        for path in package.iterdir()
        if path.name not in ("__init__.py", "__main__.py", "__pycache__", "py.typed")
    }
    assert parts == {path for path in tree() if path.parent == package}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text("utf-8"))
    local = [t for t in targets if "://" not in t and not t.startswith("mailto:")]
    missing = [t for t in local if not (page.parent / t).exists()]
    assert not missing


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where `runs/demo` is a finished run, of the tiny model."""
    folder = tmp_path_factory.mktemp("readme")
    corpus = folder / "corpus"
    corpus.mkdir()
    for name in ("bisect", "heapq", "keyword", "queue", "sched", "stat"):
        shutil.copy(Path(sysconfig.get_path("stdlib"), f"{name}.py"), corpus)
    changes = [
        f"data.corpus={corpus}", "data.heldout=0.3", "tokenizer.vocab_size=400", "prompt=",
        "stages.0.budget.steps=2", "stages.0.batch.0.tokens=256",
    ]  # fmt: skip
    run(load_recipe("tiny", changes), folder / "runs" / "demo", "cpu", lambda line: None)
    (folder / "prompts.jsonl").write_text('{"prompt": "import "}\n{"prompt": "def "}\n')
    published = folder / "MiniMax-Text-01"
    tiny_transformers(vocab_size=400).save_pretrained(published)
    file = (folder / "runs" / "demo" / "tokenizer.json").read_text("utf-8")
    for i, name in enumerate(("beginning_of_sentence", "end_of_sentence")):
        file = file.replace(f"<reserved_{i}>", f"<{name}>")
    (published / "tokenizer.json").write_text(file, "utf-8")
    (published / "tokenizer_config.json").write_text('{"eos_token": "<end_of_sentence>"}')
    (published / "generation_config.json").unlink()
    return folder


@pytest.mark.parametrize(
    "page", [p for p in PAGES if "```python" in p.read_text("utf-8")], ids=lambda p: p.name
)
def test_python_blocks_run(
    page: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workplace)
    code = [text for language, text in blocks(page) if language == "python"]
    assert code
    for text in code:
        exec(compile(text, str(page), "exec"), {})


@pytest.mark.parametrize(
    ("name", "least"),
    [("README.md", 5), ("docs/weights.md", 4), ("docs/engine.md", 1)],
)
def test_the_quick_commands_run_in_the_order_of_the_page(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, least: int
) -> None:
    """All but `run`, whose recipes run shrunk elsewhere."""
    monkeypatch.chdir(workplace)
    page = (ROOT / name).read_text("utf-8")
    lines = [line for line in page.splitlines() if line.startswith("sferic ")]
    quick = [line for line in lines if not line.startswith("sferic run ")]
    assert len(quick) >= least
    for line in quick:
        main(shlex.split(line.replace("/tmp/", f"{tmp_path}/"))[1:])
