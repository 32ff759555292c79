"""Walks a recipe: tokenizer, token stores, stages, weights, evaluation, a continuation.

Every step leaves a file in the run folder and is skipped when its file is there, so the same
command goes on after any interruption:

    recipe.json              the resolved config
    tokenizer.json
    data/{train,heldout}/    token stores
    STAGE/checkpoints/       of the last steps
    STAGE/metrics.jsonl, STAGE/loss.png
    model/                   the trained weights, with config and tokenizer
    report.json              held-out bits per byte and speed
"""

import json
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch

from sferic.checkpoint import load, save
from sferic.config import ConfigError, PretrainStage, Recipe, dump
from sferic.data import (
    IncrementalDecoder,
    PackStream,
    Tokenizer,
    TokenStore,
    heldout_packs,
    read_corpus,
    split,
    tokenize,
    write_store,
)
from sferic.data.files import write_file
from sferic.evals import compression
from sferic.infer import generate_stream
from sferic.nn import HybridModel
from sferic.train import Trainer, read_metrics

VALIDATION_PACKS = 8
SAMPLE_TOKENS = 120

Say = Callable[[str], None]


def run(recipe: Recipe, out: Path, device: str | None = None, say: Say = print) -> dict[str, Any]:
    """Run every stage of a recipe and return the report.

    Args:
        recipe: what to run.
        out: the run folder; one with the same recipe is continued.
        device: "cpu", "cuda", ...; None takes the GPU if there is one.
        say: prints a line.

    Raises:
        ValueError: the folder holds another recipe's run, or the data does not serve.
        Interrupted, Diverged: from training.
    """
    begin = time.perf_counter()
    where = find_device(device)
    _claim(out, recipe)
    tokenizer = prepare_tokenizer(recipe, out, say)
    stores = prepare_stores(recipe, tokenizer, out, say)
    model: HybridModel | None = None
    for stage in recipe.stages:
        model = run_stage(recipe, stage, stores, tokenizer, out, where, model, say)
    assert model is not None
    return finish(recipe, model, tokenizer, stores, out, where, begin, say)


def find_device(name: str | None) -> torch.device:
    """The device of that name; None takes the GPU if there is one.

    Raises:
        ValueError: there is no such device here.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.zeros((), device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {name!r} can't be used ({reason}); try --device cpu") from error


def _claim(out: Path, recipe: Recipe) -> None:
    """Make the folder this recipe's, or check that it is."""
    file = out / "recipe.json"
    text = dump(recipe) + "\n"
    if file.exists():
        differences = _differences(json.loads(file.read_text("utf-8")), json.loads(text))
        if differences:
            raise ConfigError(
                f"{out} holds a run of another recipe ({'; '.join(differences[:5])}); "
                "choose another folder with --out, or delete this one"
            )
        return
    out.mkdir(parents=True, exist_ok=True)
    write_file(file, text.encode())


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(k for k in new if k not in old)]
        return [d for k in keys for d in _differences(old.get(k), new.get(k), f"{path}.{k}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [d for i, (a, b) in pairs for d in _differences(a, b, f"{path}.{i}")]
    return [] if old == new else [f"{path[1:]} was {old!r}, now {new!r}"]


def prepare_tokenizer(recipe: Recipe, out: Path, say: Say) -> Tokenizer:
    """Load the run's tokenizer; train or copy it first."""
    file = out / "tokenizer.json"
    if not file.exists():
        if recipe.tokenizer.path is not None:
            Tokenizer.load(recipe.tokenizer.path).save(file)
        else:
            assert recipe.tokenizer.vocab_size is not None
            say(f"training a tokenizer of {recipe.tokenizer.vocab_size:,} entries")
            train, _ = split(read_corpus(recipe.data.corpus), recipe.data.heldout, recipe.seed)
            Tokenizer.train((d.text for d in train), recipe.tokenizer.vocab_size).save(file)
    tokenizer = Tokenizer.load(file)
    if tokenizer.vocab_size > recipe.model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} entries, model.vocab_size is "
            f"{recipe.model.vocab_size}; raise it to at least as many"
        )
    return tokenizer


def prepare_stores(
    recipe: Recipe, tokenizer: Tokenizer, out: Path, say: Say
) -> dict[str, TokenStore]:
    """The training and held-out token stores, written on the first run and verified after."""
    names = ("train", "heldout")
    paths = {name: out / "data" / name for name in names}
    if not all(path.exists() for path in paths.values()):
        sides = split(read_corpus(recipe.data.corpus), recipe.data.heldout, recipe.seed)
        for name, documents in zip(names, sides, strict=True):
            shutil.rmtree(paths[name], ignore_errors=True)
            store = write_store(
                paths[name],
                tokenize(documents, tokenizer),
                tokenizer_hash=tokenizer.hash,
                vocab_size=tokenizer.vocab_size,
            )
            size = sum(len(d.text.encode()) for d in documents)
            say(
                f"{name}: {len(store):,} documents, {size / 1e6:.2f} MB, {store.num_tokens:,} "
                f"tokens ({size / store.num_tokens:.2f} bytes each)"
            )
    stores = {name: TokenStore(path) for name, path in paths.items()}
    for store in stores.values():
        store.verify()
        if store.tokenizer_hash != tokenizer.hash:
            raise ValueError(
                f"{store.path} was made with another tokenizer than {out / 'tokenizer.json'}; "
                "delete the folder to make it again"
            )
    return stores


def run_stage(
    recipe: Recipe,
    stage: PretrainStage,
    stores: dict[str, TokenStore],
    tokenizer: Tokenizer,
    out: Path,
    device: torch.device,
    before: HybridModel | None,
    say: Say,
) -> HybridModel:
    """Train one stage, from the model of the stage before it or from fresh weights."""
    config = recipe.model
    if stage.rope_base is not None:
        config = config.model_copy(update={"rope_base": stage.rope_base})
    model = HybridModel(config).init_weights(recipe.seed)
    if before is not None:
        model.load_state_dict(before.state_dict())
    model.to(device)
    stream = PackStream(stores["train"], stage.seq_len, recipe.seed, tokenizer.pad_id)
    heldout = heldout_packs(stores["heldout"], stage.seq_len, tokenizer.pad_id)
    packing = stream.report()
    parameters = sum(p.numel() for p in model.parameters())
    trainer = Trainer(
        stage, model, stream, list(islice(heldout, VALIDATION_PACKS)), out / stage.name, device
    )
    precision = "bf16" if model.compute_dtype is torch.bfloat16 else "fp32"
    say(
        f"{stage.name}: {parameters / 1e6:.2f} M parameters in {precision} on {device.type}, "
        f"packs of {stage.seq_len:,} tokens {packing['fill']:.1%} full"
    )
    trainer.run()
    return model


def finish(
    recipe: Recipe,
    model: HybridModel,
    tokenizer: Tokenizer,
    stores: dict[str, TokenStore],
    out: Path,
    device: torch.device,
    begin: float,
    say: Say,
) -> dict[str, Any]:
    """Save the weights, load them again, score the held-out text and continue the prompt."""
    folder = out / "model"
    report_file = out / "report.json"
    if not (report_file.exists() and folder.exists()):
        save(model, folder)
        tokenizer.save(folder / "tokenizer.json")
    loaded = load(folder, device=str(device))
    loaded.compute_dtype = model.compute_dtype
    if report_file.exists():
        report: dict[str, Any] = json.loads(report_file.read_text("utf-8"))
    else:
        stage = recipe.stages[-1]
        say("scoring the held-out text")
        scores = compression(loaded, tokenizer, stores["train"], stores["heldout"], stage.seq_len)
        report = {"bits_per_byte": asdict(scores), "stages": {}, "machine": machine(device)}
        for s in recipe.stages:
            rows = read_metrics(out / s.name / "metrics.jsonl")
            report["stages"][s.name] = {
                "steps": rows[-1]["step"],
                "tokens": rows[-1]["tokens"],
                "training_seconds": _seconds(rows),
                "tokens_per_second": round(rows[-1]["tokens"] / _seconds(rows)),
                "validation_loss": rows[-1]["validation_loss"],
                "skipped": rows[-1]["skipped"],
            }
        # of this call; a run that was interrupted had others before it
        report["seconds"] = round(time.perf_counter() - begin, 1)
        write_file(report_file, (json.dumps(report, indent=2) + "\n").encode())
    _print_scores(report["bits_per_byte"], say)
    if recipe.prompt:
        say(f"\nA continuation of {recipe.prompt!r} by the saved weights:\n")
        for text in continue_text(
            loaded, tokenizer, recipe.prompt, max_new_tokens=SAMPLE_TOKENS, temperature=0.7
        ):
            sys.stdout.write(text)
        sys.stdout.write("\n\n")
    return report


def _seconds(rows: list[dict[str, Any]]) -> float:
    """Time spent in optimizer steps, over all resumes."""
    ends = [0, *(row["tokens"] for row in rows)]
    return sum(
        (b - a) / row["tokens_per_second"] for row, (a, b) in zip(rows, pairwise(ends), strict=True)
    )


def machine(device: torch.device) -> dict[str, str | int]:
    """What a measurement ran on."""
    name = platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    elif (info := Path("/proc/cpuinfo")).exists():
        models = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        name = models[0].split(":", 1)[1].strip() if models else name
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _print_scores(scores: dict[str, float], say: Say) -> None:
    say(f"\nBits per byte on {scores['heldout_bytes']:,} held-out bytes (lower is better):\n")
    names = {"model": "this model", "xz": "xz -9e", "zlib": "zlib -9", "unigram": "unigram tokens"}
    for key, name in names.items():
        say(f"  {name:<16}{scores[key]:.3f}")
    gain = 1 - scores["model"] / scores["unigram"]
    say(f"\nThe model needs {abs(gain):.0%} {'fewer' if gain > 0 else 'more'} bits than unigrams.")


def continue_text(
    model: HybridModel,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Iterator[str]:
    """Yield the prompt, then its continuation in pieces of whole characters."""
    yield prompt
    ids = tokenizer.encode(prompt) or [tokenizer.end_id]
    decoder = IncrementalDecoder(tokenizer)
    for (token,) in generate_stream(
        model,
        [ids],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop_ids=(tokenizer.end_id,),
        vocab_size=tokenizer.vocab_size,
    ):
        assert token is not None
        yield decoder.push(token)
    yield decoder.flush()
