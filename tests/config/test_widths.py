"""Widths that the experts' grouped product can take."""

import pytest

from sferic.config import ConfigError, load_model


@pytest.mark.parametrize("change", ["hidden_size=30", "ffn.size=100"])
def test_experts_need_widths_of_whole_rows(change: str) -> None:
    with pytest.raises(ConfigError, match="multiples of 8"):
        load_model("tiny", [change])


def test_a_dense_model_takes_any_width() -> None:
    changes = ["ffn.kind=dense", "ffn.size=100", "hidden_size=30"]
    assert load_model("tiny", changes).hidden_size == 30
