"""Twenty steps of a tiny hybrid in float64, held to the losses of losses.json.

A change that is meant to keep the arithmetic keeps them.  One that is meant to change it records
them again: `python tests/golden/test_losses.py`.
"""

import json
import tempfile
from pathlib import Path

import pytest
import torch

from sferic.config import load_recipe
from sferic.data import PackStream, write_store
from sferic.nn import HybridModel
from sferic.train import Trainer

HERE = Path(__file__).parent
STEPS = 20
END, PAD = 256, 257
KEYS = ("loss", "auxiliary_loss", "drop_rate")
OPTIONS = (
    "seed=0",
    "stages.0.seq_len=64",
    "stages.0.batch=[{tokens=128}]",
    f"stages.0.budget={{steps={STEPS}}}",
    "stages.0.lr=[{shape='linear', to=1e-2, length=4}, {shape='cosine', to=1e-3}]",
    "stages.0.optimizer={betas=[0.9, 0.95], weight_decay=0.1, eps=1e-8, clip_norm=1.0}",
    "stages.0.precision=fp32",
)


def train(folder: Path) -> dict[str, list[float]]:
    """Train on the bytes of the text, a document per paragraph."""
    text = (HERE / "text.txt").read_bytes().replace(b"\r\n", b"\n")
    store = write_store(
        folder / "store",
        [[*paragraph, END] for paragraph in text.split(b"\n\n")],
        tokenizer_hash="bytes",
        vocab_size=PAD + 1,
    )
    recipe = load_recipe("tiny", OPTIONS)
    (stage,) = recipe.stages
    model = HybridModel(recipe.model).init_weights(recipe.seed).double()
    stream = PackStream(store, stage.seq_len, recipe.seed, PAD)
    trainer = Trainer(stage, model, stream, [], folder / "stage", torch.device("cpu"))
    rows = [trainer.step() for _ in range(STEPS)]
    return {key: [row[key] for row in rows] for key in KEYS}


def test_losses_are_those_recorded(tmp_path: Path) -> None:
    expected = json.loads((HERE / "losses.json").read_text())
    found = train(tmp_path)
    assert [len(found[key]) for key in KEYS] == [STEPS] * len(KEYS)
    assert max(found["drop_rate"]) > 0  # tokens are dropped
    assert found["loss"][-1] < found["loss"][0] - 1  # and it learns
    for key in KEYS:
        assert found[key] == pytest.approx(expected[key], rel=1e-9, abs=1e-12), key


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        content = json.dumps(train(Path(temporary)), indent=1)
    (HERE / "losses.json").write_text(content + "\n")
