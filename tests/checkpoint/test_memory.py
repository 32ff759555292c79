"""Loading costs the model and less than one file; converting costs a file, not the model."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sferic
from sferic.config import ModelConfig, MoEFFN
from sferic.nn import HybridModel

SHARD = 20_000_000
MEGABYTE = 1_000_000

# VmHWM, the highest resident memory of a process, starts again at this write
SCRIPT = """
import sys
import torch
import sferic
from sferic.checkpoint import convert

def field(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

work, source, target = sys.argv[1:]
sferic.load(target + "/warm")  # all imports are paid
before = field("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
if work == "load":
    model = sferic.load(source)
else:
    convert(source, target + "/out", layout="transformers", shard_bytes=20_000_000)
print(field("VmHWM") - before)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """160 MB of weights in files of at most 20 MB, and a very small model."""
    folder = tmp_path_factory.mktemp("memory")
    ffn = MoEFFN(kind="moe", size=512, num_experts=4, top_k=2)
    config = ModelConfig(
        vocab_size=2048, hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=2, head_dim=64,
        layer_pattern=("lightning", "softmax"), ffn=ffn,
    )  # fmt: skip
    model = HybridModel(config).init_weights(0)
    sferic.save(model, folder / "model", layout="minimax", shard_bytes=SHARD)
    small = config.model_copy(update={"num_layers": 1, "depth": 1, "vocab_size": 8})
    sferic.save(HybridModel(small).init_weights(0), folder / "warm")
    return folder


def peak(work: str, folder: Path) -> int:
    arguments = [sys.executable, "-c", SCRIPT, work, str(folder / "model"), str(folder)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=120)
    return int(done.stdout)


def test_loading(folder: Path) -> None:
    model = sum(p.numel() * 4 for p in sferic.load(folder / "model").parameters())
    assert model > 100 * MEGABYTE
    largest = max(p.stat().st_size for p in (folder / "model").glob("*.safetensors"))
    assert largest <= SHARD + MEGABYTE
    assert peak("load", folder) < 1.1 * model + largest


def test_converting(folder: Path) -> None:
    used = peak("convert", folder)
    model = sum(p.stat().st_size for p in (folder / "model").glob("*.safetensors"))
    assert used < 4 * SHARD < model
    a, b = sferic.load(folder / "model"), sferic.load(folder / "out")
    for (name, left), right in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(left, right), name
