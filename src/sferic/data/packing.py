"""Packing documents into rows of one fixed length, without losing or mixing a token.

A document longer than a pack is cut into pieces; each piece is then a document of its own. The
documents of an epoch are permuted, taken in windows, and each window is packed by best-fit
decreasing: a piece goes to the fullest pack that still has room, longest pieces first. On
log-normal lengths this fills packs almost completely while cutting few documents.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# A window is at least this many documents and about this many packs: each leaves about one pack
# partly empty, which must not weigh when packs are long and documents short.
WINDOW_DOCUMENTS = 1024
WINDOW_PACKS = 256
IGNORE = -100
# What the paper's varlen LASP+ pads each document to; only reported.
PADDING = 256


@dataclass(frozen=True, eq=False)
class Plan:
    """Which pieces form which pack; pack i has pieces pack_offsets[i] .. pack_offsets[i + 1].

    Attributes:
        seq_len: T, tokens of a pack.
        num_tokens: tokens of all documents.
        pack_offsets: [packs + 1] int64.
        document: [pieces] int64, where a piece comes from.
        start: [pieces] int64, its first token within the document.
        length: [pieces] int64, its tokens, at most T.
    """

    seq_len: int
    num_tokens: int
    pack_offsets: np.ndarray
    document: np.ndarray
    start: np.ndarray
    length: np.ndarray

    def __len__(self) -> int:
        return len(self.pack_offsets) - 1

    def report(self) -> dict[str, float]:
        """Numbers that tell how good the plan is.

        ``packs``; ``fill``, used share of their tokens; ``split_documents``, share of documents
        cut; ``padding_to_256_waste``, what padding each piece to a multiple of 256 would add
        per true token (no pack is padded so); ``dropped``, tokens in no pack.
        """
        used = int(self.length.sum())
        padded = int((-(-self.length // PADDING) * PADDING).sum())
        return {
            "packs": len(self),
            "fill": used / (len(self) * self.seq_len),
            "split_documents": np.unique(self.document[self.start > 0]).size
            / np.unique(self.document).size,
            "padding_to_256_waste": padded / used - 1,
            "dropped": self.num_tokens - used,
        }


@dataclass(frozen=True, eq=False)
class Pack:
    """One row of training data. S sequences: its pieces, then the pad document if T is not full.

    Attributes:
        tokens: [T] int64.
        labels: [T] int64, the next token; -100 at the last token of a piece and on pads.
        cu_seqlens: [S + 1] int32, from 0 to T.
        positions: [T] int32, from 0 within each sequence.
        valid: [T] bool, False on pads.
        max_seqlen: tokens of the longest sequence, the pad document included.
    """

    tokens: np.ndarray
    labels: np.ndarray
    cu_seqlens: np.ndarray
    positions: np.ndarray
    valid: np.ndarray
    max_seqlen: int


def plan(lengths: np.ndarray, seq_len: int, seed: int, epoch: int) -> Plan:
    """Plan one epoch, a pure function of its arguments: every token is in exactly one pack.

    Args:
        lengths: [documents] integers, tokens of each document, all positive.
        seq_len: T, tokens of a pack, at least 2.
        seed: not negative.
        epoch: not negative; each has its own order.

    Raises:
        ValueError: an argument is out of range.
    """
    lengths = np.asarray(lengths, np.int64)
    if lengths.ndim != 1 or lengths.size == 0 or lengths.min() < 1:
        raise ValueError(
            f"lengths of shape {list(lengths.shape)} must be one row of positive numbers, "
            "one per document: drop empty documents"
        )
    if seq_len < 2:
        raise ValueError(f"seq_len is {seq_len}, it must be at least 2: one token has no label")
    if seed < 0 or epoch < 0:
        raise ValueError(f"seed {seed} and epoch {epoch} must not be negative")
    num_tokens = int(lengths.sum())
    size = max(WINDOW_DOCUMENTS, -(-WINDOW_PACKS * seq_len * lengths.size // num_tokens))
    order = _permutation(lengths.size, seed, epoch)
    windows = []
    sizes = []
    for window, first in enumerate(range(0, lengths.size, size)):
        documents = order[first : first + size]
        document, start, length = _cut(documents, lengths[documents], seq_len)
        packs = _best_fit_decreasing(length, seq_len)
        packs = [packs[i] for i in _permutation(len(packs), seed, epoch, window)]
        pieces = np.concatenate(packs)
        windows.append((document[pieces], start[pieces], length[pieces]))
        sizes.extend(map(len, packs))
    document, start, length = map(np.concatenate, zip(*windows, strict=True))
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return Plan(seq_len, num_tokens, offsets, document, start, length)


def make_pack(pieces: Sequence[np.ndarray], seq_len: int, pad_id: int) -> Pack:
    """Lay pieces of 1-D ids side by side and fill up to ``seq_len`` with a pad document.

    Raises:
        ValueError: a piece is empty, or the pieces exceed ``seq_len``.
    """
    lengths = [len(piece) for piece in pieces]
    used = sum(lengths)
    if used > seq_len or 0 in lengths:
        raise ValueError(
            f"pieces of {lengths} tokens do not fit: none may be empty, and their sum "
            f"must be at most seq_len={seq_len}"
        )
    if used < seq_len:
        lengths.append(seq_len - used)
    tokens = np.full(seq_len, pad_id, np.int64)
    if pieces:
        tokens[:used] = np.concatenate(pieces)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    labels = np.full(seq_len, IGNORE, np.int64)
    labels[:-1] = tokens[1:]
    labels[cu_seqlens[1:] - 1] = IGNORE
    labels[used:] = IGNORE
    positions = np.arange(seq_len, dtype=np.int32) - np.repeat(cu_seqlens[:-1], lengths)
    valid = np.arange(seq_len) < used
    return Pack(tokens, labels, cu_seqlens, positions, valid, max(lengths))


def _permutation(size: int, seed: int, *key: int) -> np.ndarray:
    # Raw bits of a bit generator never change between numpy versions; Generator methods may.
    bits = np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)).random_raw(size)
    return np.argsort(bits, kind="stable")


def _cut(
    documents: np.ndarray, lengths: np.ndarray, seq_len: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pieces (document, start, length) of at most ``seq_len`` tokens, in the given order."""
    counts = -(-lengths // seq_len)
    first = np.cumsum(counts) - counts
    start = (np.arange(counts.sum()) - np.repeat(first, counts)) * seq_len
    length = np.minimum(np.repeat(lengths, counts) - start, seq_len)
    return np.repeat(documents, counts), start, length


def _best_fit_decreasing(lengths: np.ndarray, seq_len: int) -> list[list[int]]:
    """Indices of the pieces of each pack."""
    order = np.argsort(-lengths, kind="stable")
    packs: list[list[int]] = []
    # Packs with room as (room, pack), sorted: the first with enough room is the best fit.
    rooms: list[tuple[int, int]] = []
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        at = bisect_left(rooms, (length, 0))
        if at < len(rooms):
            room, pack = rooms.pop(at)
            packs[pack].append(piece)
        else:
            room, pack = seq_len, len(packs)
            packs.append([piece])
        if room > length:
            insort(rooms, (room - length, pack))
    return packs
