"""A file of prompts to a file of completions, through the engine; an interrupted run goes on.

A row of the input is a JSON object with `prompt` (text) or `messages` (a chat), and what differs
from the defaults: `max_tokens` and the fields of `Sampling`.  The output has its rows in the same
order: `text`, `token_ids`, `finish_reason`, `usage`.  Rows are kept in OUTPUT.part as they end.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from sferic.data import Tokenizer
from sferic.data.files import write_file
from sferic.infer.engine import Engine
from sferic.infer.sampler import Sampling

Advance = Callable[[int, int], None]


class Job(BaseModel):
    """One row of the input."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None


class Work(BaseModel):
    """A row made ready."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    ids: list[int]
    max_tokens: int
    sampling: Sampling


class Result(BaseModel):
    """One row of the output."""

    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length", "abort", "error"]
    usage: dict[str, int]


def read_jobs(path: Path, tokenizer: Tokenizer, max_tokens: int, sampling: Sampling) -> list[Work]:
    """All rows, tokenised; an empty prompt begins a document.

    Args:
        path: a file of JSON objects, one a line; empty lines are left out.
        tokenizer: the model's.
        max_tokens, sampling: of rows that don't say.

    Raises:
        ValueError: a row can't be used; the message names the file and line.
    """
    work = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                work.append(_prepare(json.loads(line), tokenizer, max_tokens, sampling))
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"])) or "the row"
                raise ValueError(f"{path}, line {number}: {where}: {first['msg']}") from error
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not work:
        raise ValueError(f'{path} has no row: write one JSON object a line, {{"prompt": "..."}}')
    return work


def _prepare(row: Any, tokenizer: Tokenizer, max_tokens: int, sampling: Sampling) -> Work:
    job = Job.model_validate(row)
    if (job.prompt is None) == (job.messages is None):
        raise ValueError("give one of prompt and messages")
    if job.messages is not None:
        ids = tokenizer.encode_chat(job.messages).ids
    else:
        start = tokenizer.end_id if tokenizer.bos_id is None else tokenizer.bos_id
        ids = tokenizer.encode(job.prompt or "") or [start]
    ways = {
        name: getattr(sampling, name) if (value := getattr(job, name)) is None else value
        for name in Sampling.__dataclass_fields__
    }
    count = max_tokens if job.max_tokens is None else job.max_tokens
    if count < 1:
        raise ValueError(f"max_tokens is {count}, it must be at least 1")
    return Work(ids=ids, max_tokens=count, sampling=Sampling(**ways))


def room_for(work: list[Work], max_running: int, block_size: int) -> int:
    """The `kv_tokens` that the largest `max_running` rows need together."""
    needs = sorted((len(w.ids) + w.max_tokens - 1 for w in work), reverse=True)
    return sum(-(-need // block_size) * block_size for need in needs[:max_running])


def run_jobs(
    engine: Engine,
    tokenizer: Tokenizer,
    work: list[Work],
    output: Path,
    *,
    model: str,
    advance: Advance = lambda rows, tokens: None,
) -> None:
    """Complete all rows and write the output; rows that OUTPUT.part holds are not run again.

    Args:
        engine: nothing else runs in it.
        tokenizer: the model's.
        work: the rows.
        output: the file to write, beside and then renamed.
        model: the model's name; a part of another model's run is refused.
        advance: called with the rows ended and the tokens made since the last call.

    Raises:
        ValueError: OUTPUT.part is of other prompts, options or another model.
    """
    part = output.with_name(output.name + ".part")
    rows = "\n".join(w.model_dump_json() for w in work)
    name = hashlib.sha256(f"{model}\n{rows}".encode()).hexdigest()
    done = _resume(part, name)
    advance(len(done), 0)
    left = iter([i for i in range(len(work)) if i not in done])
    places: dict[int, int] = {}
    tokens: dict[int, list[int]] = {}
    with part.open("a", encoding="utf-8") as file:
        _fill(engine, work, left, places, tokenizer)
        while engine.busy:
            new = 0
            for event in engine.step():
                i = places[event.number]
                ids = tokens.setdefault(i, [])
                if event.token is not None:
                    ids.append(event.token)
                    new += 1
                if event.finish_reason is None:
                    continue
                shown = ids[:-1] if event.finish_reason == "stop" else ids
                done[i] = Result(
                    text=tokenizer.decode(shown),
                    token_ids=ids,
                    finish_reason=event.finish_reason,
                    usage={"prompt_tokens": len(work[i].ids), "completion_tokens": len(ids)},
                )
                file.write(json.dumps({"row": i, "result": done[i].model_dump()}) + "\n")
                file.flush()
                advance(1, 0)
            advance(0, new)
            _fill(engine, work, left, places, tokenizer)
    lines = [done[i].model_dump_json() + "\n" for i in range(len(work))]
    write_file(output, "".join(lines).encode())
    part.unlink()


def _fill(
    engine: Engine,
    work: list[Work],
    left: Iterator[int],
    places: dict[int, int],
    tokenizer: Tokenizer,
) -> None:
    """Keep as many requests waiting as can run at once."""
    while len(engine.scheduler.waiting) < engine.cache.slots.size:
        i = next(left, None)
        if i is None:
            return
        number = engine.add(
            work[i].ids,
            work[i].sampling,
            max_new_tokens=work[i].max_tokens,
            stop_ids=tokenizer.stop_ids,
        )
        places[number] = i


def _resume(part: Path, name: str) -> dict[int, Result]:
    """Rows that an earlier run has ended; starts the file if there is none."""
    lines = part.read_text("utf-8").splitlines(keepends=True) if part.exists() else []
    whole = [line for line in lines if line.endswith("\n")]  # the last may be cut
    if not whole:
        part.write_text(json.dumps({"of": name}) + "\n", "utf-8")
        return {}
    first, *rows = (json.loads(line) for line in whole)
    if first != {"of": name}:
        raise ValueError(
            f"{part} is of other prompts, options or another model: remove it, or use the same"
        )
    if len(whole) < len(lines):
        part.write_text("".join(whole), "utf-8")
    return {row["row"]: Result.model_validate(row["result"]) for row in rows}
