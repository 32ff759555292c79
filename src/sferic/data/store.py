"""The token store: a folder of tokenized documents, written once, then memory-mapped.

``tokens.bin`` holds all ids one after another (uint32, little-endian), ``ends.idx`` the end offset
of each document in tokens, exclusive (uint64, little-endian), ``meta.json`` the rest.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, get_type_hints

import numpy as np

from sferic.data.files import publish, sha256, sync, temporary

VERSION = 1
TOKENS_FILE, ENDS_FILE, META_FILE = "tokens.bin", "ends.idx", "meta.json"
TOKEN_DTYPE, END_DTYPE = np.dtype("<u4"), np.dtype("<u8")


class StoreError(ValueError):
    """A store that cannot be written, or cannot be trusted."""


@dataclass(frozen=True)
class StoreMeta:
    """What ``meta.json`` says."""

    version: int
    num_documents: int
    num_tokens: int
    tokens_sha256: str
    ends_sha256: str
    tokenizer_hash: str
    vocab_size: int


def write_store(
    path: str | Path,
    documents: Iterable[Sequence[int] | np.ndarray],
    *,
    tokenizer_hash: str,
    vocab_size: int,
) -> "TokenStore":
    """Write documents, one in memory at a time, and open the result.

    The store is written beside its target and renamed when complete, so a crash leaves no half
    store; what an earlier crash left there is removed first.

    Args:
        path: a folder that does not exist yet.
        documents: ids of each document, 1-D and closed by the tokenizer's end id.
        tokenizer_hash: ``Tokenizer.hash`` of the tokenizer that made the ids.
        vocab_size: all ids lie below it.

    Raises:
        StoreError: the path exists, there are no documents, or a document is empty, is not a
            1-D row of integers, or has an id outside the vocabulary.
    """
    path = Path(path)
    if path.exists():
        raise StoreError(f"{path} exists: a store is never overwritten, choose another path")
    folder = temporary(path)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    num_documents = num_tokens = 0
    with (folder / TOKENS_FILE).open("wb") as tokens, (folder / ENDS_FILE).open("wb") as ends:
        tokens_hash, ends_hash = hashlib.sha256(), hashlib.sha256()
        for document in documents:
            ids = _checked(document, num_documents, vocab_size)
            num_documents += 1
            num_tokens += ids.size
            _append(tokens, tokens_hash, ids.tobytes())
            _append(ends, ends_hash, END_DTYPE.type(num_tokens).tobytes())
    if not num_documents:
        raise StoreError(f"no documents for {path}: a store holds at least one")
    meta = StoreMeta(
        version=VERSION,
        num_documents=num_documents,
        num_tokens=num_tokens,
        tokens_sha256=tokens_hash.hexdigest(),
        ends_sha256=ends_hash.hexdigest(),
        tokenizer_hash=tokenizer_hash,
        vocab_size=vocab_size,
    )
    (folder / META_FILE).write_text(json.dumps(asdict(meta), indent=2) + "\n", "utf-8")
    for name in (TOKENS_FILE, ENDS_FILE, META_FILE):
        sync(folder / name)
    publish(path)
    return TokenStore(path)


class TokenStore:
    """A store opened for reading; its length is its number of documents.

    Attributes:
        path: the folder.
        meta: what ``meta.json`` says.
        lengths: [documents] int64, tokens of each.
    """

    def __init__(self, path: str | Path) -> None:
        """Open a store and check its structure without reading the tokens.

        Raises:
            StoreError: the folder is no store, its version is unknown, or its files disagree.
        """
        self.path = Path(path)
        self.meta = _read_meta(self.path)
        counts = {
            TOKENS_FILE: self.meta.num_tokens * TOKEN_DTYPE.itemsize,
            ENDS_FILE: self.meta.num_documents * END_DTYPE.itemsize,
        }
        for name, expected in counts.items():
            file = self.path / name
            size = file.stat().st_size if file.is_file() else 0
            if size != expected or not size:
                raise self._error(f"{name} has {size} bytes where {META_FILE} implies {expected}")
        self._tokens = np.asarray(np.memmap(self.path / TOKENS_FILE, TOKEN_DTYPE, "r"))
        self._ends = np.asarray(np.memmap(self.path / ENDS_FILE, END_DTYPE, "r"))
        if self._ends[-1] != self.meta.num_tokens:
            raise self._error(
                f"the last document ends at {self._ends[-1]}, "
                f"{META_FILE} counts {self.meta.num_tokens} tokens"
            )
        if self._ends[0] == 0 or (self._ends[1:] <= self._ends[:-1]).any():
            raise self._error(f"the document ends in {ENDS_FILE} do not increase")
        self.lengths = np.diff(self._ends.astype(np.int64), prepend=0)

    def __len__(self) -> int:
        return self.meta.num_documents

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return self.meta.num_tokens

    @property
    def vocab_size(self) -> int:
        """All ids lie below it."""
        return self.meta.vocab_size

    @property
    def tokenizer_hash(self) -> str:
        """``Tokenizer.hash`` of the tokenizer that made the ids."""
        return self.meta.tokenizer_hash

    def document(self, index: int) -> np.ndarray:
        """Ids of one document: [lengths[index]] uint32, a read-only view of the file.

        Raises:
            ValueError: the index is out of range.
        """
        if not 0 <= index < len(self):
            raise ValueError(f"document {index} is out of range: the store holds {len(self)}")
        start = self._ends[index - 1] if index else 0
        return self._tokens[start : self._ends[index]]

    def verify(self) -> None:
        """Read both files and compare their sha256 with ``meta.json``.

        Raises:
            StoreError: the content changed since it was written.
        """
        expected = {TOKENS_FILE: self.meta.tokens_sha256, ENDS_FILE: self.meta.ends_sha256}
        for name, digest in expected.items():
            found = sha256(self.path / name)
            if found != digest:
                raise self._error(f"{name} has sha256 {found} where {META_FILE} has {digest}")

    def _error(self, problem: str) -> StoreError:
        return StoreError(f"the token store {self.path} is damaged: {problem}; write it again")


def _append(file: BinaryIO, digest: "hashlib._Hash", content: bytes) -> None:
    file.write(content)
    digest.update(content)


def _checked(document: Sequence[int] | np.ndarray, index: int, vocab_size: int) -> np.ndarray:
    ids = np.asarray(document)
    if ids.ndim != 1 or ids.size == 0:
        raise StoreError(
            f"document {index} has shape {list(ids.shape)}: a document is a row of at least "
            "one id (its end id)"
        )
    if not np.issubdtype(ids.dtype, np.integer):
        raise StoreError(f"document {index} has {ids.dtype} ids: they must be integers")
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise StoreError(
            f"document {index} has id {outside[0]}, outside the vocabulary of {vocab_size}: "
            "tokenize it with the store's tokenizer"
        )
    return ids.astype(TOKEN_DTYPE)


def _read_meta(path: Path) -> StoreMeta:
    file = path / META_FILE
    if not file.is_file():
        raise StoreError(f"{path} is not a token store: it has no {META_FILE}")
    try:
        content = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise StoreError(f"{file} is not JSON ({error}): write the store again") from error
    version = content.get("version") if isinstance(content, dict) else None
    if version != VERSION:
        raise StoreError(
            f"{file} has version {version}, this code reads version {VERSION}: "
            "write the store again"
        )
    types = get_type_hints(StoreMeta)
    if content.keys() != types.keys():
        raise StoreError(
            f"{file} has the fields {sorted(content)}, it must have {sorted(types)}: "
            "write the store again"
        )
    for name, value in content.items():
        if not isinstance(value, types[name]):
            raise StoreError(
                f"{file} has {name}={value!r}, which must be {types[name].__name__}: "
                "write the store again"
            )
    return StoreMeta(**content)
