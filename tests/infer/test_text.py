from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sferic.data import Tokenizer
from sferic.infer import continue_text


@pytest.mark.parametrize(("bos_id", "start"), [(None, 3), (7, 7)])
def test_ids_of_the_tokenizer_begin_and_stop_a_text(
    monkeypatch: pytest.MonkeyPatch, bos_id: int | None, start: int
) -> None:
    trained = Tokenizer.train(["some text"], 272)
    tokenizer = Tokenizer(trained._backend, end_id=3, bos_id=bos_id, stop_ids=(5, 6))
    seen: list[Any] = []

    def stream(
        model: Any, prompts: list[list[int]], sampling: Any, **options: Any
    ) -> Iterator[tuple[int]]:
        seen.append((prompts, options["stop_ids"]))
        yield (tokenizer.encode("x")[0],)

    monkeypatch.setattr("sferic.infer.text.generate_stream", stream)
    model: Any = SimpleNamespace()
    assert "".join(continue_text(model, tokenizer, "", max_new_tokens=1)) == "x"
    assert "".join(continue_text(model, tokenizer, "a", max_new_tokens=1)) == "ax"
    assert seen == [([[start]], (5, 6)), ([tokenizer.encode("a")], (5, 6))]
