"""Drawing tokens."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sferic.infer import Sampling, sample
from sferic.infer.sampler import distribution, penalise

DRAWS = 4000


def draw(logits: Tensor, *, temperature: float = 1.0, **options: Any) -> Counter:
    """Frequencies of one distribution at many positions."""
    rows = logits.expand(DRAWS, -1)
    tokens = sample(rows, Sampling(temperature, **options), list(range(DRAWS)))
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
    out = sample(logits, Sampling(0, top_p=0.1, seed=5), [1, 2, 3])
    assert out.tolist() == [1, 0, 2]
    assert out.dtype == torch.int64


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("seed", [0, 1, -7, 2**70])
def test_frequencies_follow_the_softmax(temperature: float, seed: int) -> None:
    found = draw(LOGITS, seed=seed, temperature=temperature)
    assert_fits(found, probabilities(temperature))


def test_frequencies_follow_the_softmax_over_seeds_too() -> None:
    found = Counter(int(sample(LOGITS, Sampling(1, seed=seed), [12])) for seed in range(DRAWS))
    assert_fits(found, probabilities(1.0))


def test_neighbouring_positions_and_seeds_are_independent() -> None:
    """Pairs of draws of a fair coin fall evenly on the four pairs."""
    coin = torch.zeros(1, 2)
    for step in ((0, 1), (1, 0), (1, -1)):
        pairs = Counter()
        for i in range(DRAWS):
            seed, position = divmod(i, 64)
            two = [
                int(sample(coin, Sampling(1, seed=s), [p]))
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
    sampling = Sampling(1.3, top_p=0.9, top_k=7, min_p=0.01, repetition_penalty=1.2, seed=3)
    seen = torch.rand(16, 9) < 0.3
    together = sample(logits, sampling, positions, seen)
    for i, position in enumerate(positions):
        alone = sample(logits[i : i + 1], sampling, [position], seen[i : i + 1])
        assert alone[0] == together[i]
    assert len(set(together.tolist())) > 3


def test_seed_and_position_decide() -> None:
    logits = torch.zeros(64, 50)
    positions = list(range(64))

    def tokens(seed: int, first: int = 0) -> list[int]:
        return sample(logits, Sampling(1, seed=seed), [first + p for p in positions]).tolist()

    assert tokens(1) == tokens(1)
    assert sum(a == b for a, b in zip(tokens(1), tokens(2), strict=True)) < 10
    assert tokens(1)[5:] == tokens(1, first=5)[:-5]


def test_bf16_logits_are_drawn_in_float32() -> None:
    assert_fits(draw(LOGITS.bfloat16()), torch.softmax(LOGITS.bfloat16().float(), -1)[0].tolist())


SPAN = "1e-06 to 1e+06"


@pytest.mark.parametrize(
    ("option", "values", "allowed", "remedy"),
    [
        (
            "temperature",
            [-0.1, math.nan, math.inf, 1e-42, 1e30, True, "1", None],
            f"0 or a number from {SPAN}",
            "use 0 for the most probable token",
        ),
        (
            "top_p",
            [0.0, -1.0, 1.1, math.nan, True, None],
            "a number above 0 and at most 1",
            "use 1 for all tokens",
        ),
        (
            "top_k",
            [-1, 2.0, math.nan, True],
            "a whole number of at least 0, or None",
            "use 0 for all tokens",
        ),
        (
            "min_p",
            [-0.1, 1.1, math.nan, False, None],
            "a number from 0 to 1",
            "use 0 for all tokens",
        ),
        (
            "repetition_penalty",
            [0.0, -1.0, 1e-9, math.inf, math.nan, True, None],
            f"a number from {SPAN}",
            "use 1 for no penalty",
        ),
        ("seed", [1.5, True, None], "a whole number", "use 0"),
    ],
)
def test_what_cannot_be_asked_for(
    option: str, values: list[Any], allowed: str, remedy: str
) -> None:
    for value in values:
        with pytest.raises(ValueError, match="must be") as error:
            Sampling(**{option: value})
        assert str(error.value) == f"{option} is {value!r}, it must be {allowed}; {remedy}"


def test_numbers_of_numpy_serve() -> None:
    options: dict[str, Any] = {
        "temperature": np.float32(1),
        "top_p": np.float64(0.9),
        "top_k": np.int64(2),
        "seed": np.int32(3),
    }
    plain = Sampling(1, top_p=0.9, top_k=2, seed=3)
    rows, positions = LOGITS.expand(64, -1), list(range(64))
    found = sample(rows, Sampling(**options), positions)
    assert found.tolist() == sample(rows, plain, positions).tolist()


@pytest.mark.parametrize(
    ("option", "kept"),
    [
        ({"top_k": 1}, {2}),
        ({"top_k": 3}, {0, 2, 3}),
        ({"top_k": 0}, {0, 1, 2, 3, 4}),
        ({"top_k": None}, {0, 1, 2, 3, 4}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"min_p": 1.0}, {2}),
        ({"min_p": 0.3}, {2, 3}),
        ({"min_p": 0.0}, {0, 1, 2, 3, 4}),
        ({"top_p": 1e-50}, {2}),
        ({"temperature": 1e-6}, {2}),
        # of the two left by top-k the first has 0.75; of all five it has 0.55
        ({"top_k": 2, "top_p": 0.7}, {2}),
        ({"top_p": 0.7}, {2, 3}),
    ],
)
def test_what_stays(option: dict[str, Any], kept: set[int]) -> None:
    assert set(draw(LOGITS, **option)) == kept


def test_equals_of_the_best_survive_any_min_p() -> None:
    assert set(draw(torch.zeros(1, 4), min_p=1.0)) == {0, 1, 2, 3}


def test_probabilities_stay_finite_at_the_ends_of_float32() -> None:
    for logits, sampling in (
        (LOGITS, Sampling(1.0, top_p=1e-50)),
        (LOGITS * 1e37, Sampling(1e-6)),
    ):
        probs, tokens = distribution(logits, sampling)
        assert probs.tolist() == [[1, 0, 0, 0, 0]]
        assert tokens[0, 0] == 2


def test_a_huge_temperature_draws_evenly_from_what_is_possible() -> None:
    logits = torch.tensor([[9.0, -math.inf, 0.0]])
    assert_fits(draw(logits, temperature=1e6), [0.5, 0, 0.5])


def warped(logits: Tensor, sampling: Sampling, ids: Tensor) -> Tensor:
    """Probabilities [S, V] by transformers' own processors."""
    scores: Any = logits
    given: Any = ids  # annotated as the tensor type of old
    for processor in (
        RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
        TemperatureLogitsWarper(sampling.temperature),
        TopKLogitsWarper(sampling.top_k or logits.shape[-1]),
        TopPLogitsWarper(sampling.top_p),
        MinPLogitsWarper(sampling.min_p),
    ):
        scores = processor(given, scores)
    return scores.softmax(-1)


def by_token(logits: Tensor, sampling: Sampling, seen: Tensor) -> Tensor:
    logits = penalise(logits, seen, sampling.repetition_penalty)
    probs, tokens = distribution(logits, sampling)
    return torch.zeros_like(probs).scatter(1, tokens, probs)


samplings = st.builds(
    Sampling,
    temperature=st.floats(0.05, 5),
    top_p=st.floats(0.01, 1),
    top_k=st.none() | st.integers(0, 40),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.25, 4),
    seed=st.integers(),
)


@settings(max_examples=200)
@given(sampling=samplings, size=st.integers(1, 33), draws=st.integers(0, 2**31))
def test_the_distribution_is_that_of_transformers(
    sampling: Sampling, size: int, draws: int
) -> None:
    torch.manual_seed(draws)
    logits = 3 * torch.randn(4, size, dtype=torch.float64)
    ids = torch.randint(size, (4, 7))
    seen = torch.zeros(4, size, dtype=torch.bool).scatter(1, ids, True)
    expected = warped(logits, sampling, ids)
    found = by_token(logits, sampling, seen)
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@given(sampling=samplings, draws=st.integers(0, 2**31))
def test_a_token_that_is_drawn_survived(sampling: Sampling, draws: int) -> None:
    torch.manual_seed(draws)
    logits = torch.randn(16, 9).mul(4).bfloat16()
    logits[torch.rand(16, 9) < 0.3] = -math.inf
    logits[:, draws % 9] = 0.5
    seen = torch.rand(16, 9) < 0.5
    tokens = sample(logits, sampling, list(range(draws, draws + 16)), seen)
    probs = by_token(logits, sampling, seen)
    torch.testing.assert_close(probs.sum(-1), torch.ones(16))
    assert bool((probs.gather(1, tokens[:, None]) > 0).all())
    assert torch.equal(tokens, sample(logits, sampling, list(range(draws, draws + 16)), seen))
    best = penalise(logits, seen, sampling.repetition_penalty).argmax(-1)
    greedy = Sampling(repetition_penalty=sampling.repetition_penalty)
    assert torch.equal(sample(logits, greedy, [0] * 16, seen), best)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_turns_away_from_what_was_seen(temperature: float) -> None:
    """Seen logits of 4 and -1 become 2 and -2; the unseen ones stay."""
    logits = torch.tensor([[4.0, 2.5, -1.0, -1.5]])
    seen = torch.tensor([[True, False, True, False]])
    assert penalise(logits, seen, 2.0).tolist() == [[2.0, 2.5, -2.0, -1.5]]
    sampling = Sampling(temperature, top_k=1, repetition_penalty=2.0)
    assert sample(logits, sampling, [0], seen).tolist() == [1]
    assert sample(logits, sampling, [0], ~seen).tolist() == [0]


def test_a_penalty_needs_to_know_what_was_seen() -> None:
    with pytest.raises(ValueError, match=r"repetition_penalty 1.5 needs `seen`.*\[1, 5\]"):
        sample(LOGITS, Sampling(repetition_penalty=1.5), [0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_no_distribution_gets_no_token(temperature: float, bad: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    logits[2] = -math.inf
    tokens = sample(logits, Sampling(temperature, top_p=0.9), [0, 1, 2]).tolist()
    assert tokens[0] >= 0
    assert tokens[1:] == [-1, -1]


def test_the_device_is_never_waited_for(no_host_sync: Callable[[], Any]) -> None:
    sampling = Sampling(1.0, top_p=0.5, top_k=3, min_p=0.1, repetition_penalty=1.5)
    with no_host_sync() as fake:
        seen = fake(torch.zeros(1, 5, dtype=torch.bool))
        assert sample(fake(LOGITS), sampling, [7], seen).shape == (1,)
