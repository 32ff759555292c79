"""A small real corpus, its tokenizer and store, and trainers of the tiny model on it."""

import shutil
import sysconfig
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch

from sferic.config import load_recipe
from sferic.data import (
    PackStream,
    Tokenizer,
    TokenStore,
    heldout_packs,
    read_corpus,
    tokenize,
    write_store,
)
from sferic.nn import HybridModel
from sferic.train import Trainer

MODULES = ("bisect", "heapq", "keyword", "opcode", "queue", "sched", "stat", "types")
SMALL = (
    "stages.0.seq_len=32",
    "stages.0.batch=[{tokens=64}]",
    "stages.0.budget={steps=6}",
    "stages.0.precision=fp32",
    "stages.0.validate_every=3",
    "stages.0.checkpoint_every=2",
)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a few modules of the standard library."""
    folder = tmp_path_factory.mktemp("corpus")
    for name in MODULES:
        shutil.copy(Path(sysconfig.get_path("stdlib"), f"{name}.py"), folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(corpus: Path) -> Tokenizer:
    return Tokenizer.train((d.text for d in read_corpus(str(corpus))), 400)


@pytest.fixture(scope="session")
def store(
    corpus: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> TokenStore:
    return write_store(
        tmp_path_factory.mktemp("data") / "store",
        tokenize(read_corpus(str(corpus)), tokenizer),
        tokenizer_hash=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
    )


@pytest.fixture
def trainer(store: TokenStore, tokenizer: Tokenizer, tmp_path: Path) -> Callable[..., Trainer]:
    """Makes trainers: `trainer("stages.0.recompute=true", folder=...)`."""

    def make(
        *overrides: str,
        folder: Path = tmp_path / "stage",
        dtype: torch.dtype = torch.float32,
        store: TokenStore = store,
    ) -> Trainer:
        recipe = load_recipe("tiny", (*SMALL, *overrides))
        (stage,) = recipe.stages
        model = HybridModel(recipe.model).init_weights(0).to(dtype)
        stream = PackStream(store, stage.seq_len, 0, tokenizer.fill_id)
        heldout = list(islice(heldout_packs(store, stage.seq_len, tokenizer.fill_id), 2))
        return Trainer(stage, model, stream, heldout, folder, torch.device("cpu"))

    return make
