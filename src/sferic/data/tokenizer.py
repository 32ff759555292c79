"""Byte-level BPE: training, encoding, exact decoding, and decoding token by token."""

import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from sferic.data.files import write_file
from sferic.data.sources import Document

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


class Tokenizer:
    """A byte-level BPE vocabulary whose special tokens follow the merges, at the top ids.

    Attributes:
        vocab_size: number of entries, special tokens included.
        end_id: closes every document.
        pad_id: fills the tail of a pack.
        token_bytes: [vocab_size], the bytes each id stands for; none for special tokens.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Wrap a vocabulary of the ``tokenizers`` library.

        Raises:
            ValueError: special tokens are missing, or an entry is not byte-level.
        """
        end_id, pad_id = backend.token_to_id(END), backend.token_to_id(PAD)
        if end_id is None or pad_id is None:
            raise ValueError(
                f"the tokenizer lacks the special token {END if end_id is None else PAD}: "
                "use one that Tokenizer.train made, or add it to the file's added_tokens"
            )
        # Text is data: "<pad>" written by a user is five characters, never the pad token.
        backend.encode_special_tokens = True
        self._backend = backend
        self.vocab_size = backend.get_vocab_size()
        self.end_id = end_id
        self.pad_id = pad_id
        self.token_bytes = _token_bytes(backend)

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
        """Read a ``tokenizer.json``.

        Raises:
            ValueError: the file is missing or not a byte-level tokenizer with our special tokens.
        """
        try:
            content = Path(path).read_text("utf-8")
            # The library raises bare Exception.
            backend = tokenizers.Tokenizer.from_str(content)
        except Exception as error:
            raise ValueError(f"{path} is not a readable tokenizer.json: {error}") from error
        try:
            return cls(backend)
        except ValueError as error:
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
    special = backend.get_added_tokens_decoder()
    tokens = sorted((id, token) for token, id in backend.get_vocab().items())
    if any(b - a != 1 for a, b in pairwise([-1, *(id for id, _ in tokens)])):
        raise ValueError(
            "the tokenizer's ids have gaps or repeats: they must run from 0 to vocab_size - 1"
        )
    result = []
    for id, token in tokens:
        if id in special:
            result.append(b"")
        elif all(character in alphabet for character in token):
            result.append(bytes(alphabet[character] for character in token))
        else:
            raise ValueError(
                f"token {id} {token!r} is not byte-level: only byte-level BPE decodes exactly"
            )
    return result
