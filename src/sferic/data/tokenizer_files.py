"""The files beside a `tokenizer.json` in a model's folder, which name its special tokens."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from sferic.data.chat import ChatTemplate
from sferic.data.files import write_file

VOCABULARY, SETTINGS, SPECIAL = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
TEMPLATE, GENERATION, MODEL = "chat_template.jinja", "generation_config.json", "config.json"
# All that make the tokenizer; the model's own config is not among them.
TOKENIZER_FILES = (VOCABULARY, SETTINGS, SPECIAL, TEMPLATE, GENERATION)
# What a JSON file must hold for ids to be those of the text, the whole of it and nothing else.
PLAIN = {
    ("truncation",): "it would cut texts",
    ("padding",): "it would add ids to texts",
    ("normalizer",): "it changes texts, and ids would not decode to them",
    ("model", "dropout"): "it makes ids random",
    ("model", "continuing_subword_prefix"): "ids would not decode to their text",
    ("model", "end_of_word_suffix"): "ids would not decode to their text",
}
# NFC is how nearly all text is written already
HARMLESS = ({"type": "Sequence", "normalizers": []}, {"type": "NFC"})


@dataclass(frozen=True)
class SpecialTokens:
    """What a folder's files say; None or empty where they say nothing.

    Attributes:
        end_id: closes a document or a turn.
        bos_id: begins a text.
        pad_id: fills up.
        stop_ids: end a generation.
        chat_template: of the folder.
    """

    end_id: int | None
    bos_id: int | None
    pad_id: int | None
    stop_ids: tuple[int, ...]
    chat_template: ChatTemplate | None


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files of one model folder to another, over those of the same name.

    `tokenizer.json` is the last: where it is, the others are.
    """
    for name in reversed(TOKENIZER_FILES):
        if (source / name).is_file():
            write_file(target / name, (source / name).read_bytes())


def read_backend(file: Path) -> tokenizers.Tokenizer:
    """Read a `tokenizer.json` whose ids decode to the text that they were made of.

    Raises:
        ValueError: the file is missing or damaged, or one of its settings forbids that.
    """
    folder = file.parent
    if not file.exists() and (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        raise ValueError(
            f"{folder} has vocab.json and merges.txt but no {VOCABULARY}: convert it once with "
            f"transformers.AutoTokenizer.from_pretrained({str(folder)!r})"
            f".save_pretrained({str(folder)!r})"
        )
    if not file.exists():
        raise ValueError(
            f"{folder} has no {file.name}: copy it, with {SETTINGS}, from the model's repository"
        )
    try:
        content = file.read_text("utf-8")
        # The library raises bare Exception.
        backend = tokenizers.Tokenizer.from_str(content)
    except Exception as error:
        raise ValueError(f"{file} is not a readable tokenizer.json: {error}") from error
    _check_settings(file, json.loads(content), backend)
    return backend


def read_special_tokens(folder: Path, backend: tokenizers.Tokenizer, end: str) -> SpecialTokens:
    """Read the files of a folder beside its `tokenizer.json`.

    Args:
        folder: a model folder.
        backend: its vocabulary.
        end: name of an end token that counts where no tokenizer file names one.

    Raises:
        ValueError: a file is damaged, or names a token or an id that the vocabulary lacks.
    """
    settings = _json(folder / SETTINGS)
    special = _json(folder / SPECIAL)
    files = {**dict.fromkeys(special, SPECIAL), **dict.fromkeys(settings, SETTINGS)}
    merged = special | {key: value for key, value in settings.items() if value is not None}
    names = {
        key: name
        for key in ("bos_token", "eos_token", "pad_token", "unk_token")
        if (name := _name(merged.get(key), folder / files.get(key, SETTINGS), key)) is not None
    }
    ids = {
        key: _id(backend, name, folder / files[key], key)
        for key, name in names.items()
        if key != "unk_token"
    }
    generation = _eos_ids(folder / GENERATION, backend)
    end_id = ids.get("eos_token", backend.token_to_id(end))
    stop_ids = generation or (() if end_id is None else (end_id,))
    if not stop_ids:
        stop_ids = _eos_ids(folder / MODEL, backend)
    return SpecialTokens(
        end_id=stop_ids[0] if end_id is None and stop_ids else end_id,
        bos_id=ids.get("bos_token"),
        pad_id=ids.get("pad_token"),
        stop_ids=stop_ids,
        chat_template=_chat_template(folder, settings.get("chat_template"), names),
    )


def _check_settings(file: Path, content: dict[str, Any], backend: tokenizers.Tokenizer) -> None:
    for path, reason in PLAIN.items():
        value: Any = content
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if value and value not in HARMLESS:
            raise ValueError(
                f"{file} sets {'.'.join(path)} to {json.dumps(value)[:80]}: {reason}; "
                "set it to null"
            )
    byte_level = list(_parts(content.get("pre_tokenizer"), "ByteLevel"))
    if any(part.get("add_prefix_space") for part in byte_level):
        raise ValueError(
            f"{file} sets add_prefix_space of the pre_tokenizer: it adds a space to texts; "
            "set it to false"
        )
    if content["model"].get("type") != "BPE" or not byte_level:
        raise ValueError(
            f"{file} is no byte-level BPE (a model of type BPE behind a ByteLevel pre_tokenizer): "
            "only that decodes exactly"
        )
    for token in content.get("added_tokens") or []:
        # Of a token that the model's vocabulary lacks the library counts the id, whatever the file
        # says; it may even be that of another token.
        if backend.token_to_id(token["content"]) != token["id"]:
            raise ValueError(
                f"{file} gives the token {token['content']!r} the id {token['id']}, which the "
                f"tokenizers library reads as {backend.token_to_id(token['content'])}: name it "
                "with its id in model.vocab too"
            )
        if token.get("lstrip") or token.get("rstrip"):
            raise ValueError(
                f"{file} lets the token {token['content']!r} take the white space beside it, "
                "which decoding could not bring back: set its lstrip and rstrip to false"
            )


def _parts(part: Any, kind: str) -> list[dict[str, Any]]:
    """The pre-tokenizers of a kind in one that may be a sequence of them."""
    if not isinstance(part, dict):
        return []
    inner = [p for item in part.get("pretokenizers") or [] for p in _parts(item, kind)]
    return [part, *inner] if part.get("type") == kind else inner


def _json(file: Path) -> dict[str, Any]:
    """The object in a file; empty when there is none."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is damaged ({error}): copy it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} is damaged (it holds no JSON object): copy it again")
    return value


def _name(value: Any, file: Path, key: str) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    if value is None or isinstance(value, str):
        return value
    raise ValueError(f"{file}: {key} is {value!r}, it must be the text of a token")


def _id(backend: tokenizers.Tokenizer, token: str, file: Path, key: str) -> int:
    id = backend.token_to_id(token)
    if id is None:
        raise ValueError(
            f"{file}: {key} is {token!r}, which {VOCABULARY} lacks: take both from one model"
        )
    return id


def _eos_ids(file: Path, backend: tokenizers.Tokenizer) -> tuple[int, ...]:
    value = _json(file).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for id in ids:
        if not isinstance(id, int) or isinstance(id, bool) or backend.id_to_token(id) is None:
            raise ValueError(
                f"{file}: eos_token_id is {value!r}, and {id!r} is no id of {VOCABULARY}: "
                "take both from one model"
            )
    return tuple(ids)


def _chat_template(folder: Path, value: Any, names: dict[str, str]) -> ChatTemplate | None:
    file = folder / TEMPLATE
    if file.is_file():
        try:
            source = file.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} is damaged ({error}): copy it again") from error
        return ChatTemplate(source, name=str(file), variables=names)
    file = folder / SETTINGS
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        if "default" not in named:
            raise ValueError(
                f"{file}: the chat templates are {list(named)}: name one of them 'default'"
            )
        value = named["default"]
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError(f"{file}: chat_template is {value!r}, it must be a template's text")
    return ChatTemplate(value, name=f"chat_template of {file}", variables=names)
