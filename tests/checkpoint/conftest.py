"""A checkpoint as it is published."""

from pathlib import Path

import pytest

from mended_minimax import tiny_transformers


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that transformers wrote, with decay tables in it, in several files."""
    folder = tmp_path_factory.mktemp("published") / "model"
    tiny_transformers().save_pretrained(folder, max_shard_size="600KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder
