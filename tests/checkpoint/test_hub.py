"""Hub ids, with the hub's own library on a cache that this test lays out; no network."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sferic

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(published: Path, tmp_path: Path) -> Path:
    """The hub's cache with one downloaded repository, `someone/tiny`, branch main."""
    repo = tmp_path / "cache" / "models--someone--tiny"
    shutil.copytree(published, repo / "snapshots" / COMMIT)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    return tmp_path / "cache"


def python(code: str, folder: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        timeout=120,
    )


@pytest.mark.parametrize("name", ["someone/tiny", "someone/tiny@main", f"someone/tiny@{COMMIT}"])
def test_a_downloaded_repository_loads(name: str, tmp_path: Path, cache: Path) -> None:
    done = python(f"import sferic; print(sferic.load({name!r}).config)", tmp_path, cache)
    assert done.stdout.strip() == str(
        sferic.load(cache / "models--someone--tiny" / "snapshots" / COMMIT).config
    )


def test_a_repository_that_is_not_there(tmp_path: Path, cache: Path) -> None:
    done = python("import sferic; sferic.load('someone/else')", tmp_path, cache)
    assert "ValueError: someone/else is no folder here, and the Hugging Face hub" in done.stderr


def test_without_the_library_the_extra_is_named(tmp_path: Path, cache: Path) -> None:
    code = "import sys; sys.modules['huggingface_hub'] = None; import sferic; sferic.load('a/b')"
    assert "pip install 'sferic[hub]'" in python(code, tmp_path, cache).stderr


def test_a_mistyped_path_asks_no_hub(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "someone").mkdir()
    for path in ("someone/tiny", "./tiny", "../tiny", "/nowhere/tiny"):
        done = python(f"import sferic; sferic.load({path!r})", tmp_path, cache)
        assert "is not there" in done.stderr
        assert "hub" not in done.stderr.splitlines()[-1]


def test_a_folder_of_that_name_wins(tmp_path: Path, cache: Path, published: Path) -> None:
    shutil.copytree(published, tmp_path / "someone" / "tiny")
    shutil.rmtree(cache)
    done = python("import sferic; sferic.load('someone/tiny')", tmp_path, cache)
    assert done.returncode == 0, done.stderr
