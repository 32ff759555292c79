"""Files of prompts: order, options, bad rows, and runs that were interrupted."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sferic.data import ChatTemplate, Tokenizer
from sferic.infer import Engine, Sampling, generate
from sferic.infer.jobs import read_jobs, room_for, run_jobs
from sferic.nn import HybridModel

MakeModel = Callable[..., HybridModel]
MakeConfig = Callable[..., Any]
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TEXTS = ("import os", "", "def f(x):\n    return x", "é", "class A:", "#")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer.train([Path(json.__file__).read_text("utf-8")], 300)
    made.chat_template = ChatTemplate(CHAT)
    return made


@pytest.fixture(scope="module")
def model(make_model: MakeModel, make_config: MakeConfig) -> HybridModel:
    return make_model(make_config(vocab_size=300))


def written(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def run(
    model: HybridModel, tokenizer: Tokenizer, rows: Sequence[Any], out: Path, **options: Any
) -> list[dict[str, Any]]:
    work = read_jobs(written(out.with_suffix(".in"), rows), tokenizer, 6, Sampling())
    engine = Engine(model, max_running=2, kv_tokens=room_for(work, 2, 8), block_size=8)
    run_jobs(engine, tokenizer, work, out, model="small", **options)
    return [json.loads(line) for line in out.read_text("utf-8").splitlines()]


def test_rows_come_out_in_their_order_with_their_own_options(
    model: HybridModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [{"prompt": text} for text in TEXTS]
    rows[0] |= {"max_tokens": 20}
    rows[2] |= {"temperature": 1.2, "seed": 3, "top_k": 9}
    rows.append({"messages": [{"role": "user", "content": "hello"}]})
    got = run(model, tokenizer, rows, tmp_path / "out.jsonl")
    assert len(got) == len(rows)
    for row, result in zip(rows, got, strict=True):
        if "messages" in row:
            ids = tokenizer.encode_chat(row["messages"]).ids
        else:
            ids = tokenizer.encode(row["prompt"]) or [tokenizer.end_id]
        options = {k: row[k] for k in ("temperature", "seed", "top_k") if k in row}
        count = row.get("max_tokens", 6)
        (want,) = generate(model, ids, max_new_tokens=count, stop_ids=tokenizer.stop_ids, **options)
        assert result["token_ids"] == want
        assert result["text"] == tokenizer.decode(want)
        assert result["finish_reason"] == ("stop" if want[-1] in tokenizer.stop_ids else "length")
        assert result["usage"] == {"prompt_tokens": len(ids), "completion_tokens": len(want)}
    assert not list(tmp_path.glob("*.part"))


class Stopped(Exception):
    """What a test interrupts a run with."""


@pytest.mark.parametrize("torn", [False, True])
def test_an_interrupted_run_goes_on(
    torn: bool, model: HybridModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    rows = [{"prompt": text} for text in TEXTS]
    want = run(model, tokenizer, rows, tmp_path / "whole.jsonl")
    ended = 0

    def stop(new: int, tokens: int) -> None:
        nonlocal ended
        ended += new
        if ended >= 3:
            raise Stopped

    out, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    with pytest.raises(Stopped):
        run(model, tokenizer, rows, out, advance=stop)
    assert not out.exists()
    kept = len(part.read_text("utf-8").splitlines()) - 1
    assert 3 <= kept < len(rows)
    if torn:
        text = part.read_text("utf-8")
        part.write_text(text[:-9], "utf-8")
        kept -= 1
    counts: list[int] = []
    assert run(model, tokenizer, rows, out, advance=lambda n, t: counts.append(n)) == want
    assert counts[0] == kept
    assert sum(counts) == len(rows)


def test_a_part_of_other_rows_is_not_taken(
    model: HybridModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    (tmp_path / "out.jsonl.part").write_text('{"of": "another"}\n')
    with pytest.raises(ValueError, match="other prompts"):
        run(model, tokenizer, [{"prompt": "a"}], out)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "line 2: the row: Input should be"),
        ("{", "line 2: Expecting property name"),
        ('{"prompt": 3}', "line 2: prompt: Input should be a valid string"),
        ('{"prompt": "a", "sed": 3}', "line 2: sed: Extra inputs"),
        ('{"prompt": "a", "messages": []}', "line 2: give one of"),
        ('{"max_tokens": 3}', "line 2: give one of"),
        ('{"prompt": "a", "max_tokens": 0}', "line 2: max_tokens is 0"),
        ('{"prompt": "a", "top_p": 2.0}', "line 2: top_p is 2.0, it must be"),
        ('{"messages": [{"role": "cook"}]}', "line 2: .*cook"),
    ],
)
def test_a_bad_row_is_named(line: str, message: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(ValueError, match=message):
        read_jobs(path, tokenizer, 5, Sampling())


def test_no_row(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="has no row"):
        read_jobs(tmp_path / "in.jsonl", tokenizer, 5, Sampling())
