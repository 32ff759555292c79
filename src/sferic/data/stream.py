"""The endless stream of packs that training reads, and the single pass that evaluation reads."""

from bisect import bisect_right
from collections.abc import Iterator

from sferic.data.packing import Pack, Plan, make_pack, plan
from sferic.data.store import TokenStore


class PackStream:
    """Packs of a store over endless epochs: pack i is a pure function of (seed, i).

    There is no state to save. To resume, go on at the next index; to spread packs over ranks, give
    each its own indices. Epochs may differ by a few packs, so reaching an epoch for the first time
    plans those before it once.

    Attributes:
        store: the documents.
        seq_len: T, tokens of a pack.
        seed: another seed, another order.
        pad_id: fills the tail of a pack.
    """

    def __init__(self, store: TokenStore, seq_len: int, seed: int, pad_id: int) -> None:
        """Plan the first epoch.

        Raises:
            ValueError: ``pad_id`` lies outside the store's vocabulary, ``seq_len`` is below 2 or
                ``seed`` is negative.
        """
        if not 0 <= pad_id < store.vocab_size:
            raise ValueError(
                f"pad_id {pad_id} lies outside the store's vocabulary of {store.vocab_size}: "
                "use the pad id of the store's tokenizer"
            )
        self.store = store
        self.seq_len = seq_len
        self.seed = seed
        self.pad_id = pad_id
        self._plans: dict[int, Plan] = {}
        # First index of every epoch planned so far, and of the one after.
        self._firsts = [0]
        self._extend()

    def pack(self, index: int) -> Pack:
        """The pack at a global index, counted from 0 over all epochs."""
        epoch = self.epoch_of(index)
        packs = self._plan(epoch)
        i = index - self._firsts[epoch]
        pieces = [
            self.store.document(document)[start : start + length]
            for document, start, length in zip(
                *(
                    column[packs.pack_offsets[i] : packs.pack_offsets[i + 1]].tolist()
                    for column in (packs.document, packs.start, packs.length)
                ),
                strict=True,
            )
        ]
        return make_pack(pieces, self.seq_len, self.pad_id)

    def epoch_of(self, index: int) -> int:
        """The epoch, from 0, that a global index belongs to."""
        if index < 0:
            raise ValueError(f"pack index {index} must not be negative")
        while self._firsts[-1] <= index:
            self._extend()
        return bisect_right(self._firsts, index) - 1

    def packs_per_epoch(self, epoch: int = 0) -> int:
        """Packs of one epoch."""
        if epoch < 0:
            raise ValueError(f"epoch {epoch} must not be negative")
        while len(self._firsts) <= epoch + 1:
            self._extend()
        return self._firsts[epoch + 1] - self._firsts[epoch]

    def report(self, epoch: int = 0) -> dict[str, float]:
        """``Plan.report`` of one epoch."""
        return self._plan(epoch).report()

    def _extend(self) -> None:
        self._firsts.append(self._firsts[-1] + len(self._plan(len(self._firsts) - 1)))

    def _plan(self, epoch: int) -> Plan:
        if epoch not in self._plans:
            made = plan(self.store.lengths, self.seq_len, self.seed, epoch)
            # Two: around an epoch's edge, ranks and prefetching read from both sides.
            if len(self._plans) == 2:
                del self._plans[next(iter(self._plans))]
            self._plans[epoch] = made
        return self._plans[epoch]


def heldout_packs(store: TokenStore, seq_len: int, pad_id: int) -> Iterator[Pack]:
    """Every token of a store once, always in the same packs.

    The order mixes the documents, so the first packs already are a fair sample of the whole.
    """
    packs = PackStream(store, seq_len, 0, pad_id)
    return map(packs.pack, range(packs.packs_per_epoch()))
