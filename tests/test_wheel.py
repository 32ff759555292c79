"""What a user gets who installs the wheel, in an environment that has nothing else."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from sferic import __version__

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
MODULES = ("bisect", "heapq", "keyword", "queue", "sched", "stat")
LIMIT = 900  # seconds that one command may take; torch is large
SHRUNK = (
    "data.corpus=corpus", "data.heldout=0.3", "tokenizer.vocab_size=400", "prompt='x'",
    "model={extends='models/tiny'}", "stages.0.budget.steps=2", "stages.0.seq_len=64",
    "stages.0.batch.0.tokens=64",
)  # fmt: skip


def call(*command: object, cwd: Path) -> str:
    """Run a command that sees none of this environment's packages; its stdout."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, so both are complete."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    return path


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = (p for p in (SOURCE / "sferic").rglob("*") if p.is_file())
    expected = {p.relative_to(SOURCE).as_posix() for p in package if p.suffix != ".pyc"}
    assert found == expected
    assert {"sferic/recipes/demo.toml", "sferic/recipes/models/text-01.toml"} <= found


def install(wheel: Path, folder: Path) -> Path:
    """An environment that holds the wheel and what it asks for; the folder of its programs."""
    venv.create(folder, with_pip=True)
    pip = (folder / "bin" / "python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt")
    call(*pip, "torch", cwd=folder)
    call(*pip, wheel, cwd=folder)
    return folder / "bin"


def test_the_program_of_the_wheel_works_in_a_bare_environment(wheel: Path, tmp_path: Path) -> None:
    """One test, so that torch is installed once however tests are spread over processes."""
    programs, place = install(wheel, tmp_path / "bare"), tmp_path / "empty"
    place.mkdir()

    def sferic(*arguments: object) -> str:
        return call(programs / "sferic", *arguments, cwd=place)

    where = call(programs / "python", "-c", "import sferic; print(sferic.__file__)", cwd=place)
    assert Path(where).is_relative_to(tmp_path / "bare")
    version = f"sferic {__version__}\n"
    assert sferic("--version") == version
    assert call(programs / "python", "-m", "sferic", "--version", cwd=place) == version
    assert sferic("info", "demo").startswith("demo\n  parameters")

    (place / "corpus").mkdir()
    for name in MODULES:
        shutil.copy(Path(sysconfig.get_path("stdlib"), f"{name}.py"), place / "corpus")
    sets = [x for item in SHRUNK for x in ("--set", item)]
    text = sferic("run", "demo", "--device", "cpu", *sets)
    assert "Bits per byte" in text
    assert "Weights are in runs/demo/model" in text
    assert (place / "runs" / "demo" / "demo" / "loss.png").is_file()
    given = ("--model", "runs/demo/model", "--prompt", "import ", "--max-new-tokens", 3)
    assert sferic("generate", *given).startswith("import ")


def imported() -> Iterator[str]:
    """The packages that modules of the package import, at their top or later."""
    for path in (SOURCE / "sferic").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                yield node.module.partition(".")[0]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: list[str]) -> set[str]:
    return {normal(re.split(r"[^\w.-]", text)[0]) for text in requirements}


def test_what_is_imported_is_declared_and_the_reverse() -> None:
    extras = PROJECT["optional-dependencies"]
    used = [extra for key, extra in extras.items() if key != "dev"]
    declared = names(PROJECT["dependencies"]).union(*map(names, used))
    foreign = set(imported()) - sys.stdlib_module_names - {"sferic"}
    homes = packages_distributions()
    needed = {normal(homes[package][0]) if package in homes else package for package in foreign}
    assert needed == declared


def test_what_development_needs_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pinned = names([line for line in lines if "==" in line])
    asked = names([*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]])
    assert asked == pinned
