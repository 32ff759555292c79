"""A step's gradient does not depend on how its tokens are cut into micro-batches."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import pytest
import torch

from sferic.data import Pack, PackStream, TokenStore, make_pack
from sferic.nn import Batch
from sferic.train import Trainer
from sferic.train.losses import micro_batch_loss

Make = Callable[..., Trainer]
PAD = 1
MOE = "model.ffn={kind='moe', size=64, num_experts=4, top_k=2, capacity_factor=100.0, aux_coef=%s}"


class Given(PackStream):
    """Hands out packs that were made by hand."""

    def __init__(self, store: TokenStore, packs: Sequence[Pack]) -> None:
        self.store, self.packs = store, packs

    def pack(self, index: int) -> Pack:
        return self.packs[index]


@pytest.fixture
def pieces(store: TokenStore) -> list[list[Any]]:
    """For two packs of 32 tokens; the second pack holds little, so their label counts differ."""
    ids = iter(store.document(0))
    return [[list(islice(ids, n)) for n in lengths] for lengths in ((17, 15), (3, 6))]


def test_one_micro_batch_equals_two_with_unequal_label_counts(
    trainer: Make, store: TokenStore, pieces: list[list[Any]]
) -> None:
    two = [make_pack(part, 32, PAD) for part in pieces]
    assert [int((pack.labels >= 0).sum()) for pack in two] == [30, 7]
    losses, grads = [], []
    for packs in (two, [make_pack(pieces[0] + pieces[1], 64, PAD)]):
        made = trainer(
            f"stages.0.seq_len={64 // len(packs)}",
            "stages.0.optimizer.clip_norm=1e9",
            MOE % 0,  # dropless, and without the loss that depends on the cut
            dtype=torch.float64,
        )
        made.stream = Given(store, packs)
        losses.append(made.step()["loss"])
        assert (made.progress.tokens, made.progress.pack) == (64, len(packs))
        grads.append([p.grad for p in made.model.parameters()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-13)


def test_the_auxiliary_loss_of_a_step_is_the_mean_over_its_micro_batches(
    trainer: Make, store: TokenStore, pieces: list[list[Any]]
) -> None:
    made = trainer(MOE % 0.5, dtype=torch.float64)
    packs = [make_pack(part, 32, PAD) for part in pieces]
    alone = [
        micro_batch_loss(made.model, Batch.from_pack(pack, "cpu"), 1, 1)[1].item() for pack in packs
    ]
    made.stream = Given(store, packs)
    assert made.step()["auxiliary_loss"] == pytest.approx(sum(alone) / 2, rel=1e-12)
    assert alone[0] != alone[1]


def test_pads_take_no_part_in_the_loss(
    trainer: Make, store: TokenStore, pieces: list[list[Any]]
) -> None:
    """A pack that is mostly pads costs what its few tokens cost."""
    rows = []
    for seq_len in (16, 64):
        made = trainer(
            f"stages.0.seq_len={seq_len}",
            f"stages.0.batch=[{{tokens={seq_len}}}]",
            dtype=torch.float64,
        )
        made.stream = Given(store, [make_pack(pieces[1], seq_len, PAD)])
        rows.append(made.step())
    for key in ("loss", "auxiliary_loss", "grad_norm", "drop_rate", "max_load", "router_entropy"):
        assert rows[0][key] == pytest.approx(rows[1][key], rel=1e-10)
