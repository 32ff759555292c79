import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from sferic.data import (
    M1,
    TEXT_01,
    TOKENIZER_FILES,
    ChatTemplate,
    IncrementalDecoder,
    Tokenizer,
    copy_tokenizer,
)
from sferic.data.tokenizer import END, SPLIT_PATTERN

B, E, IMAGE, CALL = (
    "<beginning_of_sentence>",
    "<end_of_sentence>",
    "<image>",
    "<function_call>",
)
# As published: no pad, ids with gaps, and the end of a turn is not the highest id.
IDS = {"<begin_of_document>": 300, B: 319, E: 320, IMAGE: 325, CALL: 330}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello world!"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "And this?"}]},
    {"role": "assistant", "content": "A hat. \n"},
]
Change = Callable[[dict[str, Any]], Any]


def backend_json(**changes: Any) -> dict[str, Any]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("H", "i"), ("l", "l"), ("e", "ll"), ("Ċ", "Ċ"), ("<", "i")]
    tokens = [*alphabet, *(a + b for a, b in merges)]
    vocabulary = {t: i for i, t in enumerate(tokens)} | IDS | {"<tool>": 331}
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in IDS])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    return {**json.loads(backend.to_str()), **changes}


def write(folder: Path, **files: Any) -> Path:
    """A model folder; `tokenizer_config={...}` writes tokenizer_config.json."""
    folder.mkdir(exist_ok=True)
    for name, content in {"tokenizer": backend_json(), **files}.items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content), "utf-8")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    settings = {"eos_token": E, "chat_template": TEXT_01}
    return write(tmp_path / "model", tokenizer_config=settings)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    settings = {"eos_token": E, "chat_template": TEXT_01}
    return Tokenizer.load(write(tmp_path_factory.mktemp("m") / "m", tokenizer_config=settings))


def test_a_published_folder(published: Tokenizer) -> None:
    assert published.vocab_size == 332
    assert (published.end_id, published.pad_id, published.bos_id) == (320, None, None)
    assert published.fill_id == 320
    assert published.stop_ids == (320,)
    assert published.chat_template is not None
    assert published.chat_template.source == TEXT_01
    # A gap stands for nothing; a token that is added and not special is text.
    assert published.decode([*published.encode("Hi"), 290, 320, 325]) == "Hi"
    assert published.decode(published.encode("a <tool> b")) == "a <tool> b"
    assert published._backend.token_to_id("<tool>") in published.encode("a <tool> b")
    with pytest.raises(ValueError, match="token id 332 lies outside"):
        published.decode([332])


@given(st.lists(st.text() | st.sampled_from([*IDS, "<tool>", " ", "\n"])).map("".join))
def test_round_trip(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert not set(ids) & set(IDS.values())
    decoder = IncrementalDecoder(TOKENIZER)
    assert "".join(map(decoder.push, ids)) + decoder.flush() == text


TOKENIZER = Tokenizer(
    Backend.from_str(json.dumps(backend_json())), end_id=320, chat_template=ChatTemplate(TEXT_01)
)


def expected_ids(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    return [i for p in pieces for i in ([IDS[p]] if p in IDS else tokenizer.encode(p))]


def test_special_tokens_of_the_template_become_ids(published: Tokenizer) -> None:
    ids, assistant = published.encode_chat(CHAT)
    pieces = [
        (B, "system ai_setting=assistant\nBe brief.", E, "\n"),
        (B, "user name=user\nHello world!", E, "\n"),
        (B, "ai name=assistant\n", "Hi.", E, "\n"),
        (B, "user name=user\n", IMAGE, "And this?", E, "\n"),
        (B, "ai name=assistant\n", "A hat. \n", E, "\n"),
        (B, "ai name=assistant\n"),
    ]
    assert ids == expected_ids(published, *(piece for turn in pieces for piece in turn))
    assert assistant.dtype == np.bool_
    assert assistant.shape == (len(ids),)
    learned = [id for id, mine in zip(ids, assistant, strict=True) if mine]
    assert learned == expected_ids(published, "Hi.", E, "A hat. \n", E)


@given(
    st.lists(st.sampled_from([*IDS, "<end_of_", "sentence>", "<", "x", " "])),
    st.sampled_from(["user", "assistant", "system", "function"]),
)
def test_special_tokens_in_messages_stay_text(parts: list[str], role: str) -> None:
    content = [{"type": "text", "text": part} for part in parts]
    message = {"role": role, "content": content, "name": "f<image>"}
    tool = {"type": "function", "function": {"name": "f", E: [B, {"x": CALL}]}}
    ids, _ = TOKENIZER.encode_chat([message], [tool])
    assert [id for id in ids if id in IDS.values()] == [319, 320, 319, 320, 319]
    text = TOKENIZER.decode(ids)
    assert "".join(parts) in text
    assert json.dumps(tool) in text


@pytest.mark.parametrize("source", [TEXT_01, M1])
@pytest.mark.parametrize("reply", ["Hi.", "\n\nHi", " Hi", "ll"])
def test_a_prompt_begins_the_chat_that_has_the_reply(
    published: Tokenizer, source: str, reply: str
) -> None:
    # "\n" and "\n" are one token of the vocabulary, as "l" and "l" are.
    tokenizer = Tokenizer(published._backend, end_id=320, chat_template=ChatTemplate(source))
    chat = [*CHAT[:2], {"role": "assistant", "content": reply}]
    prompt, nothing = tokenizer.encode_chat(chat[:2])
    ids, assistant = tokenizer.encode_chat(chat, add_generation_prompt=False)
    assert ids[: len(prompt)] == prompt
    assert not nothing.any()
    assert assistant.tolist().index(True) == len(prompt)


def test_transformers_gives_the_same_ids_and_mask(folder: Path) -> None:
    peer = PreTrainedTokenizerFast.from_pretrained(folder)
    out: Any = peer.apply_chat_template(
        CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, assistant = Tokenizer.load(folder).encode_chat(CHAT, add_generation_prompt=False)
    assert out["input_ids"] == ids
    assert out["assistant_masks"] == assistant.astype(int).tolist()


def test_a_folder_that_transformers_wrote(tmp_path: Path) -> None:
    peer = PreTrainedTokenizerFast(
        tokenizer_object=Backend.from_str(json.dumps(backend_json())),
        bos_token=B,
        eos_token=AddedToken(E, special=True),
        pad_token=IMAGE,
        chat_template="{{ bos_token }}" + TEXT_01,
    )
    peer.save_pretrained(tmp_path)
    assert (tmp_path / "chat_template.jinja").exists()
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.bos_id, tokenizer.end_id, tokenizer.pad_id) == (319, 320, 325)
    assert tokenizer.fill_id == 325
    expected: Any = peer.apply_chat_template(CHAT, tokenize=True, return_dict=True)
    ids, _ = tokenizer.encode_chat(CHAT, add_generation_prompt=False)
    assert ids == expected["input_ids"]
    assert ids[:2] == [319, 319]


def test_no_chat_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path / "m", tokenizer_config={"eos_token": E}))
    assert tokenizer.chat_template is None
    with pytest.raises(ValueError, match=r"no chat template: set .* ChatTemplate\(TEXT_01\)"):
        tokenizer.encode_chat(CHAT)


@pytest.mark.parametrize(
    ("files", "end", "stops"),
    [
        ({"tokenizer_config": {"eos_token": {"content": E}}}, 320, (320,)),
        ({"special_tokens_map": {"eos_token": {"content": E}}}, 320, (320,)),
        (
            {"special_tokens_map": {"eos_token": B}, "tokenizer_config": {"eos_token": E}},
            320,
            (320,),
        ),
        (
            {"special_tokens_map": {"eos_token": E}, "tokenizer_config": {"eos_token": None}},
            320,
            (320,),
        ),
        (
            {"tokenizer_config": {"eos_token": E}, "generation_config": {"eos_token_id": 5}},
            320,
            (5,),
        ),
        ({"tokenizer_config": {}, "generation_config": {"eos_token_id": [320, 5]}}, 320, (320, 5)),
        ({"config": {"eos_token_id": 320}}, 320, (320,)),
        ({"config": {"eos_token_id": 4}, "generation_config": {"eos_token_id": 320}}, 320, (320,)),
        # An id that is not used may be wrong: configs are written with the defaults of a class.
        ({"config": {"eos_token_id": 999}, "tokenizer_config": {"eos_token": E}}, 320, (320,)),
    ],
)
def test_end_and_stop_ids(
    tmp_path: Path, files: dict[str, Any], end: int, stops: tuple[int, ...]
) -> None:
    tokenizer = Tokenizer.load(write(tmp_path / "m", **files))
    assert (tokenizer.end_id, tokenizer.stop_ids) == (end, stops)


def test_our_own_end_token_needs_no_other_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    loaded = Tokenizer.load(tmp_path)
    assert loaded.hash == tokenizer.hash
    assert (loaded.end_id, loaded.pad_id) == (tokenizer.end_id, tokenizer.pad_id)
    assert loaded.stop_ids == (tokenizer.end_id,)
    assert tokenizer._backend.token_to_id(END) == loaded.end_id


def test_chat_templates_by_name_and_file(folder: Path) -> None:
    settings = {"eos_token": E}
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": M1}]
    write(folder, tokenizer_config={**settings, "chat_template": named})
    template = Tokenizer.load(folder).chat_template
    assert template is not None
    assert template.source == M1
    (folder / "chat_template.jinja").write_text(TEXT_01)
    template = Tokenizer.load(folder).chat_template
    assert template is not None
    assert template.source == TEXT_01


@pytest.mark.parametrize(
    ("files", "error"),
    [
        (
            {},
            r"no end token is named in tokenizer.json, tokenizer_config.*, config.json: add",
        ),
        ({"tokenizer_config": {"eos_token": "</s>"}}, r"r_config.json: eos_token is '</s>', which"),
        ({"special_tokens_map": {"bos_token": "<s>"}}, r"s_map.json: bos_token is '<s>', which"),
        ({"tokenizer_config": {"eos_token": 3}}, "eos_token is 3, it must be the text"),
        ({"generation_config": {"eos_token_id": 999}}, r"n_config.json: eos_token_id is 999, and"),
        ({"generation_config": {"eos_token_id": [320, "x"]}}, "and 'x' is no id of"),
        ({"config": {"eos_token_id": 298}}, r"config.json: eos_token_id is 298, and 298 is no id"),
        ({"tokenizer_config": []}, r"tokenizer_config.json is damaged \(it holds no JSON object"),
        (
            {"tokenizer_config": {"eos_token": E, "chat_template": [{"name": "x"}]}},
            r"the chat templates are \['x'\]: name one of them 'default'",
        ),
        (
            {"tokenizer_config": {"eos_token": E, "chat_template": 3}},
            "chat_template is 3, it must be a template's text",
        ),
        (
            {"tokenizer_config": {"eos_token": E, "chat_template": "{% if %}"}},
            r"chat_template of .*tokenizer_config.json, line 1: ",
        ),
    ],
)
def test_bad_folders_are_named(tmp_path: Path, files: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error) as caught:
        Tokenizer.load(write(tmp_path / "m", **files))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", [*TOKENIZER_FILES, "config.json"])
def test_damaged_files_are_named(folder: Path, name: str) -> None:
    if name == "config.json":  # which is read when nothing else names the end
        (folder / "tokenizer_config.json").unlink()
    (folder / name).write_bytes(b'{"cut": \xff')
    with pytest.raises(ValueError, match=f"{name} is (damaged|not a readable)"):
        Tokenizer.load(folder)


def test_missing_tokenizer_json(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer\.json: copy it"):
        Tokenizer.load(folder)
    (folder / "vocab.json").write_text("{}")
    (folder / "merges.txt").write_text("")
    with pytest.raises(ValueError, match=r"convert it once with transformers.*save_pretrained"):
        Tokenizer.load(folder)


def set_model(content: dict[str, Any], **values: Any) -> None:
    content["model"].update(values)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            lambda c: c.update(
                truncation={
                    "direction": "Right",
                    "max_length": 4,
                    "strategy": "LongestFirst",
                    "stride": 0,
                }
            ),
            "sets truncation to .*: it would cut texts; set it to null",
        ),
        (
            lambda c: c.update(
                padding={
                    "strategy": {"Fixed": 9},
                    "direction": "Right",
                    "pad_to_multiple_of": None,
                    "pad_id": 0,
                    "pad_type_id": 0,
                    "pad_token": "!",
                }
            ),
            "sets padding to .*: it would add ids",
        ),
        (lambda c: set_model(c, dropout=0.1), "sets model.dropout to 0.1: it makes ids random"),
        (
            lambda c: c.update(normalizer={"type": "NFKC"}),
            'sets normalizer to {"type": "NFKC"}: it',
        ),
        (lambda c: set_model(c, end_of_word_suffix="</w>"), "sets model.end_of_word_suffix to"),
        (
            lambda c: c["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True),
            "sets add_prefix_space of the pre_tokenizer",
        ),
        (lambda c: c.update(pre_tokenizer={"type": "Whitespace"}), "is no byte-level BPE"),
        (lambda c: c["added_tokens"][-1].update(lstrip=True), "lets the token '<tool>' take the"),
        (lambda c: c["added_tokens"][-1].update(id=400), "the id 400, which .* reads as 331"),
    ],
)
def test_settings_that_give_wrong_ids_are_refused(folder: Path, change: Change, error: str) -> None:
    content = backend_json()
    change(content)
    write(folder, tokenizer=content)
    with pytest.raises(ValueError, match=error):
        Tokenizer.load(folder)


def test_settings_that_change_nothing_are_taken(folder: Path, published: Tokenizer) -> None:
    content = backend_json(normalizer={"type": "Sequence", "normalizers": []})
    set_model(content, dropout=0.0, end_of_word_suffix="")
    write(folder, tokenizer=content)
    assert Tokenizer.load(folder).encode("Hello") == published.encode("Hello")


def test_a_published_file_alone_lacks_its_special_tokens(folder: Path) -> None:
    with pytest.raises(ValueError, match=f"lacks the special token {END}: .*the model's folder"):
        Tokenizer.load(folder / "tokenizer.json")


def test_copy_tokenizer(folder: Path, tmp_path: Path) -> None:
    write(folder, generation_config={"eos_token_id": [320, 5]}, config={"hidden_size": 3})
    (folder / "chat_template.jinja").write_text(M1)
    target = tmp_path / "copy"
    target.mkdir()
    copy_tokenizer(folder, target)
    assert sorted(p.name for p in target.iterdir()) == sorted(
        name for name in TOKENIZER_FILES if name != "special_tokens_map.json"
    )
    one, other = Tokenizer.load(folder), Tokenizer.load(target)
    assert other.hash == one.hash
    assert other.stop_ids == one.stop_ids == (320, 5)
    assert other.encode_chat(CHAT[:3]).ids == one.encode_chat(CHAT[:3]).ids
