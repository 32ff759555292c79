"""Drawing tokens."""

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from sferic.infer import sample

DRAWS = 4000


def draw(logits: Tensor, *, seed: int = 0, top_p: float = 1.0, temperature: float = 1.0) -> Counter:
    """Frequencies of one distribution at many positions."""
    rows = logits.expand(DRAWS, -1)
    tokens = sample(
        rows, temperature=temperature, top_p=top_p, seed=seed, positions=list(range(DRAWS))
    )
    return Counter(tokens.tolist())


def assert_fits(found: Counter, expected: list[float]) -> None:
    """A chi-square test that a fair sampler passes in all but one of 10,000 cases."""
    assert set(found) <= {i for i, p in enumerate(expected) if p > 0}
    terms = [(found[i] - p * DRAWS) ** 2 / (p * DRAWS) for i, p in enumerate(expected) if p > 0]
    bound = {1: 15.2, 2: 18.5, 3: 21.2, 4: 23.6}[len(terms) - 1]
    assert sum(terms) < bound


LOGITS = torch.tensor([[0.3, -1.2, 1.9, 0.8, -0.1]])


def probabilities(temperature: float) -> list[float]:
    weights = [math.exp(x / temperature) for x in LOGITS[0].tolist()]
    return [w / sum(weights) for w in weights]


def test_temperature_zero_takes_the_largest_logit() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, 1.0], [-9.0, -8.0, -7.0]])
    out = sample(logits, temperature=0, top_p=0.1, seed=5, positions=[1, 2, 3])
    assert out.tolist() == [1, 0, 2]
    assert out.dtype == torch.int64


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("seed", [0, 1, -7, 2**70])
def test_frequencies_follow_the_softmax(temperature: float, seed: int) -> None:
    found = draw(LOGITS, seed=seed, temperature=temperature)
    assert_fits(found, probabilities(temperature))


def test_frequencies_follow_the_softmax_over_seeds_too() -> None:
    found = Counter(
        int(sample(LOGITS, temperature=1, top_p=1, seed=seed, positions=[12]))
        for seed in range(DRAWS)
    )
    assert_fits(found, probabilities(1.0))


def test_neighbouring_positions_and_seeds_are_independent() -> None:
    """Pairs of draws of a fair coin fall evenly on the four pairs."""
    coin = torch.zeros(1, 2)
    for step in ((0, 1), (1, 0), (1, -1)):
        pairs = Counter()
        for i in range(DRAWS):
            seed, position = divmod(i, 64)
            two = [
                int(sample(coin, temperature=1, top_p=1, seed=s, positions=[p]))
                for s, p in ((seed, position + 1), (seed + step[0], position + 1 + step[1]))
            ]
            pairs[two[0] * 2 + two[1]] += 1
        assert_fits(pairs, [0.25] * 4)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (1e-9, {2}),
        (0.66, {2}),
        (0.68, {2, 3}),
        (0.83, {2, 3}),
        (0.85, {2, 3, 0}),
        (0.94, {2, 3, 0, 4}),
        (0.99, {2, 3, 0, 4, 1}),
        (1.0, {2, 3, 0, 4, 1}),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: set[int]) -> None:
    probs = probabilities(0.8)
    smallest, total = set(), 0.0
    for i in sorted(range(5), key=lambda i: -probs[i]):
        if total >= top_p:
            break
        smallest.add(i)
        total += probs[i]
    assert smallest == kept
    expected = [p / total if i in kept else 0.0 for i, p in enumerate(probs)]
    found = draw(LOGITS, temperature=0.8, top_p=top_p)
    if len(kept) == 1:
        assert set(found) == kept
    else:
        assert_fits(found, expected)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.2, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.51, 3), (1, 4)]
)
def test_top_p_at_the_edge_and_among_equals(top_p: float, kept: int) -> None:
    """Four equal tokens of exactly 1/4: the first ones stay."""
    assert set(draw(torch.zeros(1, 4), top_p=top_p)) == set(range(kept))


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    assert set(draw(logits)) == {1, 3}


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    logits, positions = torch.randn(16, 9), list(range(100, 116))
    together = sample(logits, temperature=1.3, top_p=0.9, seed=3, positions=positions)
    for i, position in enumerate(positions):
        alone = sample(logits[i : i + 1], temperature=1.3, top_p=0.9, seed=3, positions=[position])
        assert alone[0] == together[i]
    assert len(set(together.tolist())) > 3


def test_seed_and_position_decide() -> None:
    logits = torch.zeros(64, 50)
    positions = list(range(64))

    def tokens(seed: int, first: int = 0) -> list[int]:
        return sample(
            logits, temperature=1, top_p=1, seed=seed, positions=[first + p for p in positions]
        ).tolist()

    assert tokens(1) == tokens(1)
    assert sum(a == b for a, b in zip(tokens(1), tokens(2), strict=True)) < 10
    assert tokens(1)[5:] == tokens(1, first=5)[:-5]


def test_bf16_logits_are_drawn_in_float32() -> None:
    assert_fits(draw(LOGITS.bfloat16()), torch.softmax(LOGITS.bfloat16().float(), -1)[0].tolist())


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(-0.1, 1.0), (1.0, 0.0), (1.0, 1.1), (0.0, -1.0)]
)
def test_what_cannot_be_asked_for(temperature: float, top_p: float) -> None:
    with pytest.raises(ValueError, match="must be >= 0 and top_p"):
        sample(LOGITS, temperature=temperature, top_p=top_p, seed=0, positions=[0])
