"""Learning rate and batch size of every step."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sferic.config import PretrainStage, batch_tokens_at, load_recipe, lr_at


def stage(lr: str, batch: str = "{tokens=256}", budget: str = "steps=10") -> PretrainStage:
    overrides = [f"stages.0.{k}" for k in (f"lr=[{lr}]", f"batch=[{batch}]", f"budget.{budget}")]
    return load_recipe("tiny", overrides).stages[0]


def rates(found: PretrainStage, steps: int) -> list[float]:
    return [lr_at(found, step, 256 * step) for step in range(steps)]


def test_linear_warm_up_starts_above_zero_and_reaches_its_end() -> None:
    found = stage("{shape='linear', to=1.0, length=4}, {shape='constant', to=0.25}")
    assert rates(found, 6) == [0.25, 0.5, 0.75, 1.0, 0.25, 0.25]


def test_linear_goes_from_the_value_before_it() -> None:
    found = stage("{shape='constant', to=1.0, length=2}, {shape='linear', to=0.0, length=4}")
    assert rates(found, 7) == [1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


def test_cosine_lasts_to_the_end_of_the_budget() -> None:
    found = stage("{shape='constant', to=1.0, length=2}, {shape='cosine', to=0.2}")
    wanted = [0.2 + 0.4 * (1 + math.cos(math.pi * k / 8)) for k in range(1, 9)]
    assert rates(found, 10)[2:] == pytest.approx(wanted)
    assert rates(found, 10)[-1] == 0.2


def test_the_last_value_stays_past_the_end() -> None:
    found = stage("{shape='linear', to=1.0, length=2}")
    assert rates(found, 5) == [0.5, 1.0, 1.0, 1.0, 1.0]


def test_a_budget_that_ends_in_the_warm_up_cuts_it() -> None:
    found = stage("{shape='linear', to=1.0, length=20}, {shape='cosine', to=0.1}")
    assert rates(found, 10) == pytest.approx([(step + 1) / 20 for step in range(10)])


def test_tokens_as_the_unit() -> None:
    found = stage(
        "{shape='linear', to=1.0, length=1024, unit='tokens'}, "
        "{shape='linear', to=0.0, unit='tokens'}",
        budget="tokens=2048",
    )
    assert rates(found, 8) == [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_a_step_across_the_end_of_a_segment_stops_at_its_value() -> None:
    found = stage("{shape='linear', to=1.0, length=300, unit='tokens'}", "{tokens=256}")
    assert rates(found, 3) == [256 / 300, 1.0, 1.0]


def test_batch_grows_by_steps() -> None:
    found = stage("{shape='constant', to=1.0}", "{tokens=256, length=3}, {tokens=512}")
    assert [batch_tokens_at(found, step, 0) for step in range(5)] == [256, 256, 256, 512, 512]


def test_batch_grows_by_tokens() -> None:
    found = stage(
        "{shape='constant', to=1.0}",
        "{tokens=256, length=512, unit='tokens'}, {tokens=512, length=512, unit='tokens'}",
    )
    assert [batch_tokens_at(found, 0, n) for n in (0, 511, 512, 1023, 1024, 9999)] == [
        256, 256, 512, 512, 512, 512,
    ]  # fmt: skip


def test_a_rate_by_tokens_counts_the_batch_of_the_step() -> None:
    found = stage(
        "{shape='linear', to=1.0, length=1024, unit='tokens'}",
        "{tokens=256, length=1}, {tokens=512}",
    )
    assert lr_at(found, 0, 0) == 0.25
    assert lr_at(found, 1, 256) == 0.75


@given(
    shape=st.sampled_from(["linear", "cosine"]),
    peak=st.floats(1e-6, 1.0),
    low=st.floats(0.0, 1e-6),
    warm_up=st.integers(1, 9),
)
def test_rates_rise_to_the_peak_then_fall_to_the_end(
    shape: str, peak: float, low: float, warm_up: int
) -> None:
    found = stage(
        f"{{shape='{shape}', to={peak!r}, length={warm_up}}}, {{shape='{shape}', to={low!r}}}"
    )
    values = rates(found, 10)
    assert all(value > 0 for value in values[:warm_up])
    assert values[warm_up - 1] == peak
    assert values[-1] == low
    assert values[:warm_up] == sorted(values[:warm_up])
    assert values[warm_up - 1 :] == sorted(values[warm_up - 1 :], reverse=True)
