"""Byte-level BPE: training, encoding, exact decoding, and decoding token by token."""

import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from sferic.data.chat import MARKERS, ChatTemplate, Message
from sferic.data.files import write_file
from sferic.data.sources import Document
from sferic.data.tokenizer_files import (
    GENERATION,
    MODEL,
    SETTINGS,
    SPECIAL,
    VOCABULARY,
    read_backend,
    read_special_tokens,
)

END = "<end_of_document>"
PAD = "<pad>"
# The reserve lets later stages (chat, tools) name tokens without resizing the embedding; a small
# vocabulary can spare fewer.
RESERVE, SMALL_RESERVE = 254, 14
LARGE = 32_768
NUM_BYTES = 256
# In bytes. Without a limit, whole Chinese sentences and ruled lines become single tokens.
MAX_TOKEN_LENGTH = 24
BATCH_CHARACTERS = 1 << 20

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# The scheme of o200k: words split where case changes, digits in groups of at most three,
# punctuation with the line ends behind it, then white space. {0,256} where o200k has *: a longer
# run that has to back up step by step would run into the regex engine's limit, and abort.
SPLIT_PATTERN = "|".join(
    (
        f"{_LEAD}{_UPPER}{{0,256}}{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s{0,256}[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def special_tokens(vocab_size: int) -> tuple[str, ...]:
    """End, pad and the reserve of a vocabulary of that size, in the order of their ids."""
    reserve = RESERVE if vocab_size >= LARGE else SMALL_RESERVE
    return (END, PAD, *(f"<reserved_{i}>" for i in range(reserve)))


class ChatTokens(NamedTuple):
    """A chat as ids: T of them.

    Attributes:
        ids: [T].
        assistant: [T] bool, the ids that the model writes, each turn's end among them.
    """

    ids: list[int]
    assistant: np.ndarray


class Tokenizer:
    """A byte-level BPE vocabulary, one that `train` made or one of a published model.

    Attributes:
        vocab_size: highest id + 1; ids may have gaps.
        end_id: closes every document.
        pad_id: fills the tail of a pack; None where the vocabulary names none.
        fill_id: the pad id, or else the end id: a pack's tail takes no label, so that either does.
        bos_id: begins a text; None where the vocabulary names none.
        stop_ids: end a generation.
        chat_template: None where the tokenizer has none.
        token_bytes: [vocab_size], the bytes each id stands for; none for special tokens and gaps.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        end_id: int | None = None,
        pad_id: int | None = None,
        bos_id: int | None = None,
        stop_ids: Sequence[int] = (),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """Wrap a vocabulary of the ``tokenizers`` library.

        Without ``end_id`` it must have the end and pad tokens of ``train``; without ``stop_ids``
        the end id stops.

        Raises:
            ValueError: special tokens are missing, or an entry is not byte-level.
        """
        if pad_id is None:
            pad_id = backend.token_to_id(PAD)
        if end_id is None:
            end_id = backend.token_to_id(END)
            if end_id is None or pad_id is None:
                raise ValueError(
                    f"the tokenizer lacks the special token {END if end_id is None else PAD}: use "
                    "one that Tokenizer.train made, or give the model's folder, whose other files "
                    "name its special tokens"
                )
        # Text is data: "<pad>" written by a user is five characters, never the pad token.
        backend.encode_special_tokens = True
        self._backend = backend
        self.token_bytes = _token_bytes(backend)
        self.vocab_size = len(self.token_bytes)
        self.end_id = end_id
        self.pad_id = pad_id
        self.fill_id = end_id if pad_id is None else pad_id
        self.bos_id = bos_id
        self.stop_ids = tuple(stop_ids) or (end_id,)
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self._special = {token.content: id for id, token in added.items() if token.special}

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learn a vocabulary of exactly ``vocab_size`` entries; the same texts give the same one.

        Memory grows with the distinct words of the texts: sample a corpus beyond a few GB.

        Raises:
            ValueError: ``vocab_size`` has no room for bytes and special tokens, or the texts are
                too few to fill it.
        """
        special = special_tokens(vocab_size)
        smallest = NUM_BYTES + len(special)
        if vocab_size < smallest:
            raise ValueError(
                f"vocab_size is {vocab_size}, it must be at least {smallest}: "
                f"{NUM_BYTES} bytes and {len(special)} special tokens"
            )
        backend = tokenizers.Tokenizer(models.BPE(byte_fallback=False))
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - len(special),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            max_token_length=MAX_TOKEN_LENGTH,
            show_progress=False,
        )
        backend.train_from_iterator(map(_checked, texts), trainer)
        backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
        if backend.get_vocab_size() != vocab_size:
            raise ValueError(
                f"the texts fill only {backend.get_vocab_size()} of vocab_size={vocab_size} "
                "entries: train on more text, or ask for fewer entries"
            )
        return cls(backend)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read a model folder's tokenizer, or a ``tokenizer.json`` that ``train`` made.

        Of a folder, ``tokenizer_config.json``, ``special_tokens_map.json``,
        ``generation_config.json`` and ``config.json`` name the special tokens, in this order, and
        ``chat_template.jinja`` or ``tokenizer_config.json`` holds the chat template.

        Raises:
            ValueError: a file is missing or damaged, the files name no end token or one that the
                vocabulary lacks, or the vocabulary is not byte-level or does not decode exactly.
        """
        path = Path(path)
        try:
            if not path.is_dir():
                return cls(read_backend(path))
            backend = read_backend(path / VOCABULARY)
            found = read_special_tokens(path, backend, END)
            if found.end_id is None:
                names = ", ".join((VOCABULARY, SETTINGS, SPECIAL, GENERATION, MODEL))
                raise ValueError(f"no end token is named in {names}: add eos_token to {SETTINGS}")
            return cls(
                backend,
                end_id=found.end_id,
                pad_id=found.pad_id,
                bos_id=found.bos_id,
                stop_ids=found.stop_ids,
                chat_template=found.chat_template,
            )
        except ValueError as error:
            if str(path) in str(error):
                raise
            raise ValueError(f"{path}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write a ``tokenizer.json``, replacing the file if it exists."""
        write_file(Path(path), self._backend.to_str(pretty=True).encode())

    @cached_property
    def hash(self) -> str:
        """sha256 of the canonical serialisation: equal hashes, equal ids for every text."""
        canonical = json.dumps(
            json.loads(self._backend.to_str()), sort_keys=True, separators=(",", ":")
        )
        return hashlib.sha256(canonical.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without an end id. The names of special tokens in it stay text.

        Raises:
            ValueError: the text holds a lone surrogate, which UTF-8 cannot write.
        """
        return self._backend.encode(_checked(text), add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """``encode`` for many texts, on all cores."""
        encodings = self._backend.encode_batch_fast(
            [_checked(text) for text in texts], add_special_tokens=False
        )
        return [encoding.ids for encoding in encodings]

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> ChatTokens:
        """Ids of a chat in the tokenizer's template; arguments as of ``ChatTemplate.render``.

        Special tokens that the template writes become their ids; in messages and tools the same
        names stay text. No token reaches over the beginning or the end of what the model writes,
        so that the ids up to there are those of the chat with ``add_generation_prompt``.

        Raises:
            ValueError: there is no chat template, it cannot render the chat, or it is made for
                other special tokens.
        """
        if self.chat_template is None:
            raise ValueError(
                "the tokenizer has no chat template: set its chat_template, for example to "
                "ChatTemplate(TEXT_01)"
            )
        text, spans, controls = self.chat_template.render(
            messages, tools, add_generation_prompt, {*self._special, *MARKERS}
        )
        foreign = {text[start:end] for start, end in controls} - self._special.keys()
        if foreign:
            raise ValueError(
                f"the chat template writes {', '.join(sorted(foreign))}, which the tokenizer has "
                "not among its special tokens: take both from one model"
            )
        bounds = {0, len(text), *(position for span in (*spans, *controls) for position in span)}
        special = set(controls)
        ids: list[int] = []
        assistant: list[bool] = []
        for start, end in pairwise(sorted(bounds)):
            piece = text[start:end]
            new = [self._special[piece]] if (start, end) in special else self.encode(piece)
            ids += new
            assistant += [any(a <= start and end <= b for a, b in spans)] * len(new)
        return ChatTokens(ids, np.array(assistant, bool))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids: the exact inverse of ``encode``; special tokens give no text.

        Bytes that form no UTF-8 character (a cut sequence) give U+FFFD.

        Raises:
            ValueError: an id lies outside the vocabulary.
        """
        return b"".join(map(self.bytes_of, ids)).decode("utf-8", "replace")

    def bytes_of(self, id: int) -> bytes:
        """The bytes of one id; ValueError when it lies outside the vocabulary."""
        if not 0 <= id < self.vocab_size:
            raise ValueError(
                f"token id {id} lies outside the vocabulary of {self.vocab_size} entries: "
                "use the tokenizer that made it"
            )
        return self.token_bytes[id]


class IncrementalDecoder:
    """Decodes a stream of ids, and never emits half a character.

    The pieces from ``push`` and the last from ``flush`` join to ``tokenizer.decode`` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The text that this id completes; empty while a character is open."""
        return self._utf8.decode(self._tokenizer.bytes_of(id))

    def flush(self) -> str:
        """What an open character leaves (U+FFFD, or nothing); the decoder is then fresh."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


def tokenize(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Ids of each document, closed by the end id, in order: uint32 arrays [tokens + 1].

    Works on batches of about a million characters: all cores busy, bounded memory.
    """
    for texts in _batches(document.text for document in documents):
        for ids in tokenizer.encode_batch(texts):
            ids.append(tokenizer.end_id)
            yield np.array(ids, np.uint32)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _checked(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text holds a lone surrogate U+{ord(text[error.start]):04X} at character "
            f"{error.start}, which is not Unicode text: decode its source as UTF-8"
        ) from error
    return text


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's map of printable characters to bytes: a visible byte is itself, others move up."""
    visible = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), 256),
    ]
    hidden = [b for b in range(NUM_BYTES) if b not in visible]
    return {chr(b): b for b in visible} | {chr(NUM_BYTES + i): b for i, b in enumerate(hidden)}


def _token_bytes(backend: tokenizers.Tokenizer) -> list[bytes]:
    alphabet = _byte_alphabet()
    added = backend.get_added_tokens_decoder()
    vocabulary = backend.get_vocab()
    result = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, id in sorted(vocabulary.items(), key=lambda item: item[1]):
        if id in added:
            # One that is not special is found in texts, and stands for its own name.
            result[id] = b"" if added[id].special else added[id].content.encode()
        elif all(character in alphabet for character in token):
            result[id] = bytes(alphabet[character] for character in token)
        else:
            raise ValueError(
                f"token {id} {token!r} is not byte-level: only byte-level BPE decodes exactly"
            )
    return result
