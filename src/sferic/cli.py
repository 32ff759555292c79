"""The command line: one verb per thing a user does."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sferic import __version__
from sferic.config import (
    Sizes,
    load_model,
    load_recipe,
    sizes,
)

if TYPE_CHECKING:
    from sferic.data import Tokenizer
    from sferic.infer import Sampling
    from sferic.nn import HybridModel

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Hybrid lightning-attention MoE models: train, score, generate.",
)
data_app = typer.Typer(no_args_is_help=True, help="Token stores and packs.")
tokenizer_app = typer.Typer(no_args_is_help=True, help="Tokenizers.")
app.add_typer(data_app, name="data")
app.add_typer(tokenizer_app, name="tokenizer")

# the parser's base class of wrong command lines, which typer doesn't export
UsageError: Any = typer.BadParameter.__mro__[1]

# a default in brackets within a help text would be taken for markup, and vanish
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, ...", show_default="cuda if there is one")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=VALUE", help="Change one field of the config; repeatable."),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sferic {__version__}")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command()
def info(
    preset: Annotated[str, typer.Argument(help="A model preset, or a config file.")],
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Parameters, memory and FLOPs of a model."""
    numbers = sizes(load_model(preset, overrides or ()))
    if as_json:
        typer.echo(json.dumps(numbers, indent=2))
        return
    typer.echo(f"{preset}")
    for line in _describe(numbers):
        typer.echo(f"  {line}")


def _describe(numbers: Sizes) -> list[str]:
    flops = "   ".join(
        f"{int(n):,} tokens: {f / 1e9:,.3g} GFLOP" for n, f in numbers["flops_per_token"].items()
    )
    weights = "   ".join(f"{k}: {b / 1e9:,.2f} GB" for k, b in numbers["weight_bytes"].items())
    return [
        f"parameters              {numbers['total_params'] / 1e6:,.2f} M",
        f"active, no vocabulary   {numbers['active_params_no_vocab'] / 1e6:,.2f} M per token",
        f"weights                 {weights}",
        f"KV cache                {numbers['kv_bytes_per_token']:,} bytes per token (bf16)",
        f"lightning state         {numbers['state_bytes_per_sequence']:,} bytes per sequence",
        f"forward, per token      {flops}",
    ]


class LayoutName(StrEnum):
    """The layouts of model folders."""

    sferic = "sferic"
    minimax = "minimax"
    transformers = "transformers"


class DtypeName(StrEnum):
    """Dtypes of stored weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="A model folder of any layout, or a hub id.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    layout: Annotated[LayoutName, typer.Option(help="Names and config to write.")],
    dtype: Annotated[DtypeName | None, typer.Option(help="Of the weights, else as stored.")] = None,
    shard_gb: Annotated[float, typer.Option(help="Largest file of weights.", min=0.001)] = 5.0,
) -> None:
    """Write a model folder in another layout or dtype, in the memory of one file."""
    import torch

    from sferic.checkpoint import convert as convert_folder

    convert_folder(
        source,
        out,
        layout=layout.value,
        dtype=None if dtype is None else getattr(torch, dtype.value),
        shard_bytes=int(shard_gb * 1e9),
    )
    typer.echo(f"{out}: layout {layout.value}")


@app.command()
def check(
    model: Annotated[Path, typer.Argument(help="A model folder of any layout.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare a model folder with its architecture, from headers alone; exit 1 if it won't load."""
    from sferic.checkpoint.check import check as check_folder

    report = check_folder(model)
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
    else:
        typer.echo("\n".join(report.lines()))
    if report.problems:
        raise typer.Exit(1)


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or a TOML or JSON file.")],
    out: Annotated[
        Path | None, typer.Option(help="Run folder.", show_default="runs/RECIPE")
    ] = None,
    overrides: Overrides = None,
    device: Device = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Trace one training step to profile/trace.json.")
    ] = False,
) -> None:
    """Train a recipe's stages, score the result and let it write; continues an interrupted run."""
    loaded = load_recipe(recipe, overrides or ())
    from sferic.ops.memory import keep_freed_memory
    from sferic.runner import run as run_recipe

    keep_freed_memory()
    folder = out or Path("runs") / Path(recipe).stem
    run_recipe(loaded, folder, device, typer.echo, profile=profile)
    stage, me = loaded.stages[-1].name, _my_name()
    typer.echo(
        f"Weights are in {folder / 'model'}, losses in {folder / stage / 'loss.png'}. Next:\n"
        f"  {me} generate --model {folder / 'model'} --prompt 'import os'\n"
        f"  {me} info {recipe}\n"
        f"  {me} run {recipe} --out runs/longer --set stages.0.budget.steps=2000"
    )


def _my_name() -> str:
    """What to type to run this program again from here."""
    program = Path(sys.argv[0])
    if program.name != "sferic":
        return "sferic"
    found = shutil.which("sferic")
    return "sferic" if found and Path(found).samefile(program) else os.path.relpath(program)


@app.command()
def generate(
    model: Annotated[str, typer.Option(help="A model folder of any layout, or a hub id.")],
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    input: Annotated[
        Path | None,
        typer.Option(help='Rows {"prompt": "..."} or {"messages": [...]}, with options of theirs.'),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Completions of the rows; again to go on.")
    ] = None,
    max_running: Annotated[int, typer.Option(min=1, help="Rows of the input at once.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the smallest set this probable.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from this many tokens; 0: from all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the best.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: repeat less.")] = 1.0,
    seed: Annotated[int, typer.Option()] = 0,
    device: Device = None,
) -> None:
    """Continue a prompt, whose text streams to the terminal, or a file of prompts."""
    if (prompt is None) == (input is None) or (input is None) != (output is None):
        raise UsageError("give --prompt, or --input and --output")
    from sferic.checkpoint import load, load_tokenizer
    from sferic.infer import Sampling, continue_text
    from sferic.ops.memory import keep_freed_memory
    from sferic.runner import find_device
    from sferic.train import compute_dtype

    sampling = Sampling(temperature, top_p, top_k, min_p, repetition_penalty, seed)
    keep_freed_memory()
    where = find_device(device)
    loaded = load(model, device=str(where), dtype=compute_dtype("auto", where))
    tokenizer = load_tokenizer(model)
    if input is not None and output is not None:
        _complete(loaded, tokenizer, model, input, output, max_new_tokens, sampling, max_running)
        return
    assert prompt is not None
    for text in continue_text(loaded, tokenizer, prompt, sampling, max_new_tokens=max_new_tokens):
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _complete(
    model: "HybridModel",
    tokenizer: "Tokenizer",
    name: str,
    input: Path,
    output: Path,
    max_new_tokens: int,
    sampling: "Sampling",
    max_running: int,
) -> None:
    """Run a file of prompts, with rows, speed and the time left on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from sferic.infer import Engine
    from sferic.infer.jobs import read_jobs, room_for, run_jobs

    block = 256
    work = read_jobs(input, tokenizer, max_new_tokens, sampling)
    engine = Engine(
        model,
        max_running=max_running,
        kv_tokens=room_for(work, max_running, block),
        block_size=block,
        vocab_size=tokenizer.vocab_size,
    )
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    begin, made = time.perf_counter(), 0
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("completing", total=len(work))

        def advance(rows: int, tokens: int) -> None:
            nonlocal made
            made += tokens
            speed = made / (time.perf_counter() - begin)
            progress.update(task, advance=rows, description=f"{speed:.0f} tokens/s")

        run_jobs(engine, tokenizer, work, output, model=name, advance=advance)
    print(f"{output}: {len(work)} rows, {made} new tokens")


@tokenizer_app.command("train")
def tokenizer_train(
    corpus: Annotated[str, typer.Argument(help="A folder of text, or 'stdlib'.")],
    out: Annotated[Path, typer.Argument(help="The tokenizer.json to write.")],
    vocab_size: Annotated[int, typer.Option(help="Entries, special tokens included.")] = 4096,
) -> None:
    """Train a byte-level BPE tokenizer."""
    from sferic.data import Tokenizer, read_corpus

    tokenizer = Tokenizer.train((d.text for d in read_corpus(corpus)), vocab_size)
    tokenizer.save(out)
    typer.echo(f"{out}: {tokenizer.vocab_size:,} entries, sha256 {tokenizer.hash[:16]}")


@data_app.command("tokenize")
def data_tokenize(
    corpus: Annotated[str, typer.Argument(help="A folder of text, or 'stdlib'.")],
    out: Annotated[Path, typer.Argument(help="The token store to write, a new folder.")],
    tokenizer: Annotated[Path, typer.Option(help="A tokenizer.json.")],
) -> None:
    """Tokenize a corpus into a token store."""
    from sferic.data import Tokenizer, read_corpus, tokenize, write_store

    loaded = Tokenizer.load(tokenizer)
    store = write_store(
        out,
        tokenize(read_corpus(corpus), loaded),
        tokenizer_hash=loaded.hash,
        vocab_size=loaded.vocab_size,
    )
    typer.echo(f"{out}: {len(store):,} documents, {store.num_tokens:,} tokens")


@data_app.command("pack")
def data_pack(
    store: Annotated[Path, typer.Argument(help="A token store.")],
    seq_len: Annotated[int, typer.Option(help="Tokens of a pack.")] = 8192,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Verify a store and report how its first epoch packs."""
    from sferic.data import TokenStore, plan

    opened = TokenStore(store)
    opened.verify()
    report = plan(opened.lengths, seq_len, seed, 0).report()
    typer.echo(json.dumps({"tokens": opened.num_tokens, "seq_len": seq_len, **report}, indent=2))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; what a user can mend is one line on stderr and exit code 2."""
    try:
        code = app(arguments, standalone_mode=False)
        if isinstance(code, int) and code:  # the parser returns 130 for Ctrl-C
            sys.exit(code)
        return
    except typer.Exit as error:
        sys.exit(error.exit_code)
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
        else:
            sys.stderr.write(f"sferic: {error.format_message()}\n")
        sys.exit(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        code, message = _explain(error)
        if code is None:
            raise
        sys.stderr.write(f"sferic: {message}\n")
        sys.exit(code)


def _explain(error: Exception) -> tuple[int | None, str]:
    """Exit code and line of an error that is the user's to mend; code None for any other."""
    if isinstance(error, ValueError | OSError):
        return 2, str(error)
    from sferic.train import Diverged, Interrupted

    if isinstance(error, Interrupted):
        return 128 + error.signum, str(error)
    if isinstance(error, Diverged):
        return 1, str(error)
    return None, ""


if __name__ == "__main__":
    main()
