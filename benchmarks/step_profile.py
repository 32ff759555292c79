"""Where one training step of a recipe spends its time: kernels, and the interpreter between them.

    python benchmarks/step_profile.py demo --out benchmarks/results/step-profile-cpu.json

Runs real packs of the recipe's corpus through the trainer's own `step`.  Two measurements: the
median speed of unprofiled steps, and by torch's profiler the share of each kernel and of everything
outside kernels, which bounds what all Python-level loops together cost.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from sferic.config import load_recipe
from sferic.data import PackStream
from sferic.nn import HybridModel
from sferic.ops.memory import keep_freed_memory
from sferic.runner import machine, prepare, read_inputs
from sferic.train import Trainer


def measure(recipe_name: str, steps: int) -> dict[str, Any]:
    """Profile the first stage of a recipe on the CPU; shares are of a step's wall time."""
    keep_freed_memory()  # as `sferic run` does
    recipe = load_recipe(recipe_name)
    stage = recipe.stages[0]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        run = prepare(recipe, out, torch.device("cpu"), print, read_inputs(recipe, out))
        model = HybridModel(recipe.model).init_weights(recipe.seed)
        stream = PackStream(run.train, stage.seq_len, recipe.seed, run.tokenizer.fill_id)
        trainer = Trainer(stage, model, stream, [], out, torch.device("cpu"))
        for _ in range(3):
            trainer.step()
        speeds = [trainer.step()["tokens_per_second"] for _ in range(steps)]
        with profile(activities=[ProfilerActivity.CPU]) as kernels:
            begin = time.perf_counter()
            trainer.step()
            wall = time.perf_counter() - begin
    events = sorted(kernels.key_averages(), key=lambda e: -e.self_cpu_time_total)
    share = {e.key: e.self_cpu_time_total * 1e-6 / wall for e in events if "::" in e.key}
    return {
        "recipe": recipe_name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_per_step": int(stage.batch[0].tokens),
        "tokens_per_second": round(statistics.median(speeds)),
        "tokens_per_second_range": [round(min(speeds)), round(max(speeds))],
        "steps": steps,
        "kernel_share": {name: round(share[name], 4) for name in list(share)[:12]},
        "outside_kernels": round(1 - sum(share.values()), 4),
        "machine": machine(torch.device("cpu")),
    }


def main() -> None:
    """Parse the command line, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", nargs="?", default="demo")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    text = json.dumps(measure(arguments.recipe, arguments.steps), indent=2) + "\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
