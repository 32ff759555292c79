import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from sferic.data import Document, IncrementalDecoder, Tokenizer, tokenize
from sferic.data.tokenizer import MAX_TOKEN_LENGTH, SPLIT_PATTERN, special_tokens

SPECIAL_TOKENS = special_tokens(512)

# A fixture that never changes is safe under hypothesis; one per module spares a health check.
TOKENIZER = Tokenizer.train([Path(__file__).read_text("utf-8")], 400)

TRICKY = [
    "",
    "\0",
    "a\0b",
    "line\r\nline\r\n\r\n",
    "trailing   ",
    "   leading\t\t",
    "\n\n\n",
    "👩‍👩‍👧‍👦 family",
    "e\u0301 é",
    "漢字かな交じり文",
    "\U0010ffff",
    "\ufeffBOM \u2028 \u00a0",
    "don't DON'T HTTPServer2024 12345678",
    " ".join(SPECIAL_TOKENS),
]
TEXT = st.text() | st.sampled_from(TRICKY) | st.lists(st.sampled_from(TRICKY)).map("".join)


@pytest.mark.parametrize("text", TRICKY)
def test_round_trip_of_tricky_texts(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(TEXT)
@settings(max_examples=300, deadline=None)
def test_round_trip(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode(np.array(ids, np.uint32)) == text
    assert b"".join(TOKENIZER.token_bytes[i] for i in ids) == text.encode()


def test_round_trip_of_real_text(tokenizer: Tokenizer, documents: list[Document]) -> None:
    texts = [document.text for document in documents]
    batch = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(ids) for ids in batch] == texts
    assert batch[:5] == [tokenizer.encode(text) for text in texts[:5]]
    assert sum(map(len, texts)) > 2 * sum(map(len, batch))


@pytest.mark.parametrize("character", [" ", "A"])
def test_a_long_run_does_not_abort(character: str) -> None:
    # Ten million is the regex engine's limit on backing up.
    text = character * 10_000_001
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    assert split.pre_tokenize_str(text) == [(text, (0, len(text)))]


@given(TEXT, st.sampled_from(SPECIAL_TOKENS), TEXT)
@settings(deadline=None)
def test_special_strings_in_text_stay_text(left: str, special: str, right: str) -> None:
    ids = TOKENIZER.encode(left + special + right)
    assert max(ids) < TOKENIZER.vocab_size - len(SPECIAL_TOKENS)
    assert TOKENIZER.decode(ids) == left + special + right


def test_special_tokens_are_the_top_ids_and_give_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == len(tokenizer.token_bytes) == 1024
    assert tokenizer.end_id == 1024 - 16
    assert tokenizer.pad_id == 1024 - 15
    assert tokenizer.token_bytes[-16:] == [b""] * 16
    assert all(0 < len(token) <= MAX_TOKEN_LENGTH for token in tokenizer.token_bytes[:-16])
    assert len(set(tokenizer.token_bytes[:-16])) == 1024 - 16
    ids = [*tokenizer.encode("one"), tokenizer.end_id, *tokenizer.encode("two"), tokenizer.pad_id]
    assert tokenizer.decode(ids) == "onetwo"


def test_digits_and_case_split_words(tokenizer: Tokenizer) -> None:
    def pieces(text: str) -> list[str]:
        split = tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)  # type: ignore[union-attr]
        return [text[start:end] for _, (start, end) in split]

    assert pieces("HTTPServer parseXML") == ["HTTPServer", " parse", "XML"]
    assert pieces("12345678") == ["123", "456", "78"]
    assert pieces("it's DON'T") == ["it's", " DON'T"]
    assert pieces("x = (1)\n\n    y") == ["x", " =", " (", "1", ")\n\n", "   ", " y"]
    assert pieces("a  \n \nb") == ["a", "  \n \n", "b"]


@pytest.mark.parametrize("bad", ["\ud800", "text \udfff text"])
def test_lone_surrogates_are_refused(tokenizer: Tokenizer, bad: str) -> None:
    for call in (
        lambda: tokenizer.encode(bad),
        lambda: tokenizer.encode_batch(["good", bad]),
        lambda: Tokenizer.train([bad], 300),
    ):
        with pytest.raises(ValueError, match="lone surrogate U\\+D"):
            call()


def test_training_is_deterministic(tokenizer: Tokenizer, documents: list[Document]) -> None:
    texts = [document.text for document in documents]
    assert Tokenizer.train(iter(texts), 1024).hash == tokenizer.hash
    assert Tokenizer.train(texts[:30], 1024).hash != tokenizer.hash


def test_training_is_deterministic_across_processes() -> None:
    code = (
        "import sys; from pathlib import Path; from sferic.data import Tokenizer; "
        f"print(Tokenizer.train([Path({__file__!r}).read_text('utf-8')], 400).hash)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == TOKENIZER.hash, result.stderr


def test_vocab_size_is_exact_or_refused() -> None:
    assert Tokenizer.train([], 272).vocab_size == 272
    with pytest.raises(ValueError, match="vocab_size is 271, it must be at least 272"):
        Tokenizer.train(["text"], 271)
    with pytest.raises(ValueError, match=r"fill only 27. of vocab_size=5000"):
        Tokenizer.train(["few words"], 5000)


def test_decode_refuses_ids_outside_the_vocabulary(tokenizer: Tokenizer) -> None:
    for bad in (-1, 1024):
        with pytest.raises(ValueError, match=f"token id {bad} lies outside"):
            tokenizer.decode([0, bad])


def test_save_and_load(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("old")
    tokenizer.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.json"]
    loaded = Tokenizer.load(path)
    assert loaded.hash == tokenizer.hash
    assert loaded.token_bytes == tokenizer.token_bytes
    text = "def f(x): return '<pad>' + x  # 漢字"
    assert loaded.encode(text) == tokenizer.encode(text)


def test_load_refuses_what_is_no_tokenizer_of_ours(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ValueError, match=r"has no tokenizer\.json: copy it"):
        Tokenizer.load(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="not a readable tokenizer"):
        Tokenizer.load(path)
    tokenizer.save(path)
    good = path.read_text("utf-8")
    path.write_text(good.replace("<pad>", "<fill>"), "utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json: .*lacks the special token <pad>"):
        Tokenizer.load(path)
    path.write_text(good.replace('"!": 0', '"中": 0'), "utf-8")
    with pytest.raises(ValueError, match="token 0 '中' is not byte-level"):
        Tokenizer.load(path)


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1)))
@settings(deadline=None)
def test_incremental_decoding_of_any_ids(ids: list[int]) -> None:
    decoder = IncrementalDecoder(TOKENIZER)
    # Twice: flush leaves a fresh decoder.
    for _ in range(2):
        assert "".join(map(decoder.push, ids)) + decoder.flush() == TOKENIZER.decode(ids)


@given(TEXT)
@settings(deadline=None)
def test_incremental_decoding_never_emits_half_a_character(text: str) -> None:
    decoder = IncrementalDecoder(TOKENIZER)
    emitted = ""
    # One id per byte, the finest split there is.
    single = {token: id for id, token in enumerate(TOKENIZER.token_bytes) if len(token) == 1}
    for byte in text.encode():
        emitted += decoder.push(single[bytes([byte])])
        assert text.startswith(emitted)
    assert emitted == text
    assert decoder.flush() == ""


def test_incremental_decoding_holds_back_and_flushes(tokenizer: Tokenizer) -> None:
    decoder = IncrementalDecoder(tokenizer)
    single = {token: id for id, token in enumerate(tokenizer.token_bytes) if len(token) == 1}
    emitted = [decoder.push(single[bytes([byte])]) for byte in "é👍".encode()]
    assert emitted == ["", "é", "", "", "", "👍"]
    assert decoder.push(single["é".encode()[:1]]) == ""
    assert decoder.flush() == "\ufffd"


def test_tokenize_closes_each_document(
    tokenizer: Tokenizer, documents: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small batches, so that order and the last batch count.
    monkeypatch.setattr("sferic.data.tokenizer.BATCH_CHARACTERS", 50_000)
    rows = list(tokenize(documents, tokenizer))
    assert len(rows) == len(documents)
    for row, document in zip(rows, documents, strict=True):
        assert row.dtype == np.uint32
        assert row[-1] == tokenizer.end_id
        assert tokenizer.end_id not in row[:-1]
        assert tokenizer.decode(row) == document.text


def test_a_large_vocabulary_keeps_more_names_for_later() -> None:
    assert len(special_tokens(32_767)) == 16
    assert len(special_tokens(200_000)) == 256
    assert special_tokens(200_000)[:16] == SPECIAL_TOKENS
