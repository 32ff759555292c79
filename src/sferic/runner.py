"""Walks a recipe: tokenizer, token stores, stages, weights, evaluation, a continuation.

Every step leaves a file in the run folder and is skipped when its file is there, so the same
command goes on after any interruption:

    lock                     held while a run works here
    recipe.json              the resolved config
    tokenizer.json
    data/{train,heldout}/    token stores
    STAGE/checkpoints/       of the last steps
    STAGE/metrics.jsonl, STAGE/loss.png
    profile/trace.json       of one step, if it was asked for
    model/                   the trained weights, with config and tokenizer
    report.json              held-out bits per byte and speed
"""

import json
import platform
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from sferic.checkpoint import load, save
from sferic.config import ConfigError, PretrainStage, Recipe, dump
from sferic.data import (
    Document,
    PackStream,
    Tokenizer,
    TokenStore,
    copy_tokenizer,
    heldout_packs,
    read_corpus,
    split,
    tokenize,
    write_store,
)
from sferic.data.files import locked, write_file
from sferic.data.sources import STDLIB
from sferic.evals import compression
from sferic.infer import Sampling, continue_text
from sferic.nn import HybridModel
from sferic.train import StepProfile, Trainer, compute_dtype

VALIDATION_PACKS = 8
SAMPLE_TOKENS = 120

Say = Callable[[str], None]
Sides = tuple[list[Document], list[Document]]  # training and held-out


@dataclass(frozen=True)
class Run:
    """What every step of a run needs."""

    recipe: Recipe
    out: Path
    device: torch.device
    say: Say  # prints a line
    tokenizer: Tokenizer
    train: TokenStore
    heldout: TokenStore
    profile: StepProfile | None = None


def run(
    recipe: Recipe,
    out: Path,
    device: str | None = None,
    say: Say = print,
    *,
    profile: bool = False,
) -> dict[str, Any]:
    """Run every stage of a recipe and return the report.

    Args:
        recipe: what to run.
        out: the run folder; one with the same recipe is continued.
        device: "cpu", "cuda", ...; None takes the GPU if there is one.
        say: prints a line.
        profile: trace one training step to profile/trace.json.

    Raises:
        ValueError: the folder holds another recipe's run, or the data does not serve.
        Interrupted, Diverged: from training.
    """
    begin = time.perf_counter()
    where = find_device(device)
    _check_folder(out, recipe)
    sides = None if _is_prepared(out) else read_inputs(recipe, out)
    out.mkdir(parents=True, exist_ok=True)
    taken = f"another process runs in {out}; wait for it, or choose another folder with --out"
    with locked(out / "lock", taken):
        _check_folder(out, recipe)  # another run may have come first
        if _is_new(out):
            write_file(out / "recipe.json", (dump(recipe) + "\n").encode())
        this = prepare(recipe, out, where, say, sides)
        if profile:
            this = replace(this, profile=StepProfile(out / "profile" / "trace.json", where))
        del sides  # a large corpus
        model, report = reopen(this) if _is_finished(out) else complete(this, begin)
        if this.profile is not None:
            say(this.profile.outcome())
        _print_scores(report["bits_per_byte"], say)
        if recipe.prompt:
            show_continuation(this, model)
    return report


def read_inputs(recipe: Recipe, out: Path) -> Sides:
    """The training and the held-out documents, looked at before the folder is taken.

    Raises:
        ValueError: the corpus can't be read or split, or holds the run folder; or the recipe's
            tokenizer file can't be used.
    """
    if recipe.tokenizer.path is not None:
        _check_size(Tokenizer.load(recipe.tokenizer.path), recipe)
    corpus = recipe.data.corpus
    if corpus != STDLIB and out.resolve().is_relative_to(Path(corpus).resolve()):
        raise ConfigError(
            f"the run folder {out} lies in the corpus {corpus}, so the run would learn from its "
            "own files; choose a folder elsewhere with --out"
        )
    return split(read_corpus(corpus), recipe.data.heldout, recipe.seed)


def prepare(recipe: Recipe, out: Path, device: torch.device, say: Say, sides: Sides | None) -> Run:
    """Make tokenizer and token stores from the two sides, or (None) find them in the folder."""
    tokenizer = prepare_tokenizer(recipe, out, say, sides)
    train, heldout = prepare_stores(out, say, tokenizer, sides)
    return Run(recipe, out, device, say, tokenizer, train, heldout)


def complete(this: Run, begin: float) -> tuple[HybridModel, dict[str, Any]]:
    """Run every stage, save, score and report; returns the saved model and the report.

    A report that is there already stays: a run whose weights were deleted only makes them again.

    Args:
        this: the run.
        begin: `time.perf_counter()` when it began.
    """
    model: HybridModel | None = None
    stages: dict[str, Any] = {}
    for stage in this.recipe.stages:
        model, stages[stage.name] = run_stage(this, stage, model)
    assert model is not None
    loaded = save_weights(this, model)
    file = this.out / "report.json"
    if not file.exists():
        report = {
            "bits_per_byte": score(this, loaded),
            "stages": stages,
            "machine": machine(this.device),
            # of this call; a run that was interrupted had others before it
            "seconds": round(time.perf_counter() - begin, 1),
        }
        write_file(file, (json.dumps(report, indent=2) + "\n").encode())
    return loaded, json.loads(file.read_text("utf-8"))


def reopen(this: Run) -> tuple[HybridModel, dict[str, Any]]:
    """The saved model and the report of a run that has ended."""
    this.say(f"{this.out} holds the finished run")
    precision = compute_dtype(this.recipe.stages[-1].precision, this.device)
    model = load_weights(this, precision)
    return model, json.loads((this.out / "report.json").read_text("utf-8"))


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


def _is_new(out: Path) -> bool:
    """Whether there is nothing but what a run leaves that died or failed before its tokenizer."""
    left = {"lock", "recipe.json", "recipe.json.tmp", "tokenizer.json.tmp"}
    return not out.exists() or all(file.name in left for file in out.iterdir())


def _check_folder(out: Path, recipe: Recipe) -> None:
    """Refuse a folder that holds another recipe's run, or files of no run."""
    if _is_new(out):
        return
    file = out / "recipe.json"
    if not file.exists():
        raise ConfigError(
            f"{out} is not empty and holds no run (no recipe.json): its files could be "
            "overwritten; choose another folder with --out"
        )
    differences = _differences(json.loads(file.read_text("utf-8")), json.loads(dump(recipe)))
    if differences:
        raise ConfigError(
            f"{out} holds a run of another recipe ({'; '.join(differences[:5])}); "
            "choose another folder with --out, or delete this one"
        )


def _is_prepared(out: Path) -> bool:
    """Whether the corpus has been read for good."""
    return all((out / name).exists() for name in ("tokenizer.json", "data/train", "data/heldout"))


def _is_finished(out: Path) -> bool:
    files = all((out / name).exists() for name in ("report.json", "model/tokenizer.json"))
    return files and any((out / "model").glob("*.safetensors"))  # one, or several of a large model


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(k for k in new if k not in old)]
        return [d for k in keys for d in _differences(old.get(k), new.get(k), f"{path}.{k}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [d for i, (a, b) in pairs for d in _differences(a, b, f"{path}.{i}")]
    return [] if old == new else [f"{path[1:]} was {old!r}, now {new!r}"]


def prepare_tokenizer(recipe: Recipe, out: Path, say: Say, sides: Sides | None) -> Tokenizer:
    """Load the run's tokenizer; train or copy it first."""
    file = out / "tokenizer.json"
    path = recipe.tokenizer.path
    if not file.exists():
        if path is not None and Path(path).is_dir():
            copy_tokenizer(Path(path), out)
        elif path is not None:
            Tokenizer.load(path).save(file)
        else:
            assert recipe.tokenizer.vocab_size is not None
            assert sides is not None
            say(f"training a tokenizer of {recipe.tokenizer.vocab_size:,} entries")
            Tokenizer.train((d.text for d in sides[0]), recipe.tokenizer.vocab_size).save(file)
    tokenizer = Tokenizer.load(out)
    _check_size(tokenizer, recipe)
    return tokenizer


def _check_size(tokenizer: Tokenizer, recipe: Recipe) -> None:
    if tokenizer.vocab_size > recipe.model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} entries, model.vocab_size is "
            f"{recipe.model.vocab_size}; raise it to at least as many"
        )


def prepare_stores(
    out: Path, say: Say, tokenizer: Tokenizer, sides: Sides | None
) -> tuple[TokenStore, TokenStore]:
    """The training and held-out token stores, written on the first run and verified after."""
    paths = [out / "data" / "train", out / "data" / "heldout"]
    if not all(path.exists() for path in paths):
        assert sides is not None
        for path, documents in zip(paths, sides, strict=True):
            shutil.rmtree(path, ignore_errors=True)
            store = write_store(
                path,
                tokenize(documents, tokenizer),
                tokenizer_hash=tokenizer.hash,
                vocab_size=tokenizer.vocab_size,
            )
            size = sum(len(d.text.encode()) for d in documents)
            say(
                f"{path.name}: {len(store):,} documents, {size / 1e6:.2f} MB, {store.num_tokens:,} "
                f"tokens ({size / store.num_tokens:.2f} bytes each)"
            )
    train, heldout = (TokenStore(path) for path in paths)
    for store in (train, heldout):
        store.verify()
        if store.tokenizer_hash != tokenizer.hash:
            raise ValueError(
                f"{store.path} was made with another tokenizer than {out / 'tokenizer.json'}; "
                "delete the folder to make it again"
            )
    return train, heldout


def run_stage(
    this: Run, stage: PretrainStage, before: HybridModel | None
) -> tuple[HybridModel, dict[str, Any]]:
    """Train one stage, from the model of the stage before it or from fresh weights.

    Returns:
        The model and the stage's part of the report.
    """
    config = this.recipe.model
    if stage.rope_base is not None:
        config = config.model_copy(update={"rope_base": stage.rope_base})
    model = HybridModel(config).init_weights(this.recipe.seed)
    if before is not None:
        model.load_state_dict(before.state_dict())
    model.to(this.device)
    pad_id = this.tokenizer.fill_id
    stream = PackStream(this.train, stage.seq_len, this.recipe.seed, pad_id)
    heldout = islice(heldout_packs(this.heldout, stage.seq_len, pad_id), VALIDATION_PACKS)
    folder = this.out / stage.name
    trainer = Trainer(stage, model, stream, list(heldout), folder, this.device)
    parameters = sum(p.numel() for p in model.parameters())
    precision = "bf16" if model.compute_dtype is torch.bfloat16 else "fp32"
    this.say(
        f"{stage.name}: {parameters / 1e6:.2f} M parameters in {precision} on "
        f"{this.device.type}, packs of {stage.seq_len:,} tokens {stream.report()['fill']:.1%} full"
    )
    rows, progress = trainer.run(this.profile), trainer.progress
    # a log that somebody deleted or cut must not cost the trained model
    last = rows[-1] if rows and rows[-1]["step"] == progress.step else {}
    return model, {
        "steps": progress.step,
        "tokens": progress.tokens,
        "training_seconds": progress.seconds,
        "tokens_per_second": round(progress.tokens / progress.seconds),
        "validation_loss": last.get("validation_loss") or trainer.validate(),
        "skipped": progress.skipped,
    }


def save_weights(this: Run, model: HybridModel) -> HybridModel:
    """Write the model folder; returns the model read back from it."""
    save(model, this.out / "model")
    copy_tokenizer(this.out, this.out / "model")
    return load_weights(this, model.compute_dtype)


def load_weights(this: Run, precision: torch.dtype | None) -> HybridModel:
    """The saved model, to compute in this precision."""
    loaded = load(this.out / "model", device=str(this.device))
    loaded.compute_dtype = precision
    return loaded


def score(this: Run, model: HybridModel) -> dict[str, float]:
    """Bits per byte of the held-out text."""
    this.say("scoring the held-out text")
    seq_len = this.recipe.stages[-1].seq_len
    return asdict(compression(model, this.tokenizer, this.train, this.heldout, seq_len))


def show_continuation(this: Run, model: HybridModel) -> None:
    """Let the model write, as it decodes."""
    prompt = this.recipe.prompt
    this.say(f"\nA continuation of {prompt!r} by the saved weights:\n")
    sampling = Sampling(temperature=0.7)
    for text in continue_text(
        model, this.tokenizer, prompt, sampling, max_new_tokens=SAMPLE_TOKENS
    ):
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n\n")


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
