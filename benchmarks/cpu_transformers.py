"""Forward and greedy decode on a CPU, beside transformers' MiniMax at its fastest.

    python benchmarks/cpu_transformers.py [--threads 2] [--out benchmarks/results]

Both hold the same random weights and run in one process, in turns; freed memory stays with it,
which favours both.  Nothing is timed unless logits and decoded tokens agree.  Of transformers'
experts implementations each case takes the fastest.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import sferic
from sferic.config import sizes
from sferic.infer import generate_stream
from sferic.nn import HybridModel
from sferic.ops.memory import keep_freed_memory

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from mended_minimax import mended_cache, recorded, rotate_part_of_each_head, tiny_transformers

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rotary_dim": 16,
    "intermediate_size": 384,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "block_size": 256,
}
TOKENS, FORWARD_ROWS = 8192, (8, 1)
ROWS, PROMPT, STEPS = 8, 64, 64
ROUNDS = 9
EXPERTS = ("eager", "grouped_mm", "batched_mm")
TOLERANCE = 3e-5

Row = dict[str, Any]
Timed = Callable[[], float]


def main() -> None:
    """Measure every case and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kept = keep_freed_memory()
    transformers.logging.disable_progress_bar()
    theirs = tiny_transformers(**SHAPE)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = sferic.load(folder)
    rotate_part_of_each_head(theirs)
    with torch.inference_mode():
        rows = [row for n in FORWARD_ROWS for row in forward_case(ours, theirs, n)]
        rows += decode_case(ours, theirs)
    common = {
        "threads": arguments.threads,
        "dtype": "float32",
        "freed_memory_kept": kept,
        "parameters": sum(p.numel() for p in ours.parameters()),
        "device": cpu_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    result = {"shape": SHAPE | {"layers": list(ours.config.mixers)}, "rows": []}
    for row in rows:
        result["rows"].append(row | common)
        print(json.dumps(row))
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "cpu-transformers.json"
    file.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    print(file)


def forward_case(ours: HybridModel, theirs: Any, rows: int) -> list[Row]:
    """Logits of 8,192 tokens in so many rows."""
    tokens = clear_tokens(ours, (rows, TOKENS // rows))
    rate = matmul_rate()
    at_8192 = sizes(ours.config)["flops_per_token"]["8192"]
    # of the FLOPs per token only softmax attention's grow with length, by this times the length
    softmax_width = ours.config.num_heads * ours.config.head_dim * ours.config.num_softmax
    flops = (at_8192 - 2 * softmax_width * (TOKENS - TOKENS // rows)) * TOKENS
    floor = flops / rate
    print(f"{flops / 1e9:.0f} GFLOP at {rate / 1e9:.0f} GFLOP/s: {floor * 1e3:.0f} ms")

    def us() -> float:
        return timed(lambda: ours(tokens))

    def them() -> float:
        return timed(lambda: theirs(tokens, use_cache=False))

    expected = ours(tokens)

    def differs() -> float:
        return error(expected, theirs(tokens, use_cache=False).logits)

    fastest, difference = fastest_experts(theirs, them, differs)
    return in_turns(
        f"forward of {rows} x {TOKENS // rows} tokens", us, them, fastest, floor, difference
    )


def decode_case(ours: HybridModel, theirs: Any) -> list[Row]:
    """One greedy token for each of several rows."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(ours.config.vocab_size, (ROWS, PROMPT), generator=generator)
    floor = sum(p.nbytes for p in ours.parameters()) / memory_rate()
    print(f"weights once from memory: {floor * 1e3:.1f} ms")
    expected = decode_ours(ours, prompts)[0]

    def differs() -> float:
        """The share of tokens that are not the same."""
        return float((expected != decode_theirs(theirs, prompts)[0]).float().mean())

    def us() -> float:
        return decode_ours(ours, prompts)[1]

    def them() -> float:
        return decode_theirs(theirs, prompts)[1]

    fastest, difference = fastest_experts(theirs, them, differs)
    return in_turns(f"greedy decode of batch {ROWS}", us, them, fastest, floor, difference)


def decode_ours(model: HybridModel, prompts: Tensor) -> tuple[Tensor, float]:
    """New tokens [ROWS, STEPS + 1] and the median seconds of a step after the first."""
    stream = generate_stream(model, prompts.tolist(), max_new_tokens=STEPS + 1)
    tokens, times = [next(stream)], []
    for _ in range(STEPS):
        begin = time.perf_counter()
        tokens.append(next(stream))
        times.append(time.perf_counter() - begin)
    return torch.tensor(tokens).T, statistics.median(times)


def decode_theirs(model: Any, prompts: Tensor) -> tuple[Tensor, float]:
    """The same by the shortest loop that transformers allows."""
    cache = mended_cache()
    new = model(prompts, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)
    tokens, times = [new], []
    for _ in range(STEPS):
        begin = time.perf_counter()
        new = model(new[:, None], cache=cache, use_cache=True).logits[:, -1].argmax(-1)
        new.tolist()  # as ours, which hands the ids out
        times.append(time.perf_counter() - begin)
        tokens.append(new)
    return torch.stack(tokens, 1), statistics.median(times)


def in_turns(
    case: str, us: Timed, them: Timed, experts: str, floor: float, difference: float
) -> list[Row]:
    """Both sides' medians over rounds in which they alternate."""
    pairs = [(us(), them()) for _ in range(ROUNDS)]
    ratio = statistics.median(b / a for a, b in pairs)
    rows = []
    for impl, times in (
        ("sferic", [a for a, _ in pairs]),
        (f"transformers, {experts} experts", [b for _, b in pairs]),
    ):
        ms = statistics.median(times) * 1e3
        rows.append(
            {
                "case": case,
                "impl": impl,
                "pass": True,
                "difference": difference,
                "ms": ms,
                "lo": min(times) * 1e3,
                "hi": max(times) * 1e3,
                "floor_ms": floor * 1e3,
                "share_of_floor": floor * 1e3 / ms,
                "times_faster": ratio if impl == "sferic" else 1.0,
            }
        )
    return rows


def fastest_experts(model: Any, run: Timed, differs: Timed) -> tuple[str, float]:
    """Set the experts implementation that runs fastest; returns it and its difference from ours.

    Each is checked, then tried warm, unless its check takes five times as long as another one.
    """
    times, differences, checks = {}, {}, {}
    for name in EXPERTS:
        model.set_experts_implementation(name)
        begin = time.perf_counter()
        differences[name] = differs()
        checks[name] = time.perf_counter() - begin
        if differences[name] > TOLERANCE:
            raise SystemExit(f"with {name} experts the two sides differ by {differences[name]:.1e}")
        if checks[name] > 5 * min(checks.values()):
            print(f"  transformers with {name} experts: the check alone {checks[name]:.0f} s")
            continue
        times[name] = min(run(), run())
        print(f"  transformers with {name} experts: {times[name] * 1e3:.1f} ms")
    best = min(times, key=lambda name: times[name])
    model.set_experts_implementation(best)
    return best, differences[best]


def matmul_rate() -> float:
    """The most float32 operations a second that any product here reaches."""
    x, w = torch.randn(2048, 384), torch.randn(384, 384)
    flops = 2 * 2048 * 384 * 384
    libraries = [lambda: x @ w.T, lambda: sferic.ops.linear(x, w)]
    return max(flops / min(timed(f) for _ in range(50)) for f in libraries)


def memory_rate() -> float:
    """Bytes a second that summing a long tensor reads."""
    x = torch.zeros(100_000_000)
    return x.nbytes / min(timed(x.sum) for _ in range(5))


def timed(run: Callable[[], Any]) -> float:
    """Seconds."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def clear_tokens(model: HybridModel, shape: tuple[int, int]) -> Tensor:
    """Random tokens none of which has its second and third expert nearly tied.

    At a tie rounding chooses, and two right implementations differ from there on.
    """
    blocks: list[Any] = list(model.layers.values())
    routers = [block.ffn.router for block in blocks]
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(model.config.vocab_size, shape, generator=generator)
        with recorded([], routers) as seen:
            model(tokens)
        top = torch.cat(seen["routers"]).topk(3).values
        if float((top[:, 1] - top[:, 2]).min()) > 2e-5:
            return tokens
    raise SystemExit("thirty random sequences all hold a near tie")


def error(a: Tensor, b: Tensor) -> float:
    """Largest difference over the largest value."""
    return float((a - b).abs().max() / b.abs().max())


def cpu_name() -> str:
    """The processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))


if __name__ == "__main__":
    main()
