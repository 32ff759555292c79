"""Counted sizes against published numbers, and against a count by hand."""

import pytest

from sferic.config import load_model, sizes


def test_text_01_has_the_published_sizes() -> None:
    count = sizes(load_model("text-01"))
    assert count["total_params"] == pytest.approx(456.09e9, rel=1e-5)
    assert count["active_params_no_vocab"] == pytest.approx(45.94e9, rel=2e-4)
    assert count["kv_bytes_per_token"] == 40_960
    assert count["state_bytes_per_sequence"] == 293_601_280
    assert count["weight_bytes"]["bf16"] == 2 * count["total_params"]
    # all but the two vocabulary matrices near one byte
    assert count["weight_bytes"]["int8"] == pytest.approx(458.8e9, rel=1e-3)


@pytest.mark.parametrize(("length", "gflops"), [("8192", 9.352), ("1048576", 26.398)])
def test_slice8_flops(length: str, gflops: float) -> None:
    config = load_model("text-01-slice8")
    head = 2 * config.vocab_size * config.hidden_size
    count = sizes(config)["flops_per_token"][length] - head
    assert count == pytest.approx(gflops * 1e9, rel=1e-4)


def test_a_small_dense_hybrid_by_hand() -> None:
    changes = [
        "ffn={kind='dense', size=7}",
        "hidden_size=5",
        "num_layers=2",
        "layer_pattern=['lightning', 'softmax']",
        "vocab_size=11",
    ]
    count = sizes(load_model("tiny", changes))  # H 4, G 2, K 16
    lightning = 5 * 3 * 64 + 5 * 64 + 64 * 5
    softmax = 5 * 64 + 2 * 5 * 32 + 64 * 5
    ffn = 3 * 5 * 7
    norms = 64 + 5 * 5
    matrices = lightning + softmax + 2 * ffn
    assert count["active_params_no_vocab"] == matrices + norms
    assert count["total_params"] == matrices + norms + 2 * 5 * 11
    channels = (3 * 64 + 64 + 5) + (64 + 2 * 32 + 5) + 2 * (2 * 7 + 5)
    assert count["weight_bytes"]["int8"] == matrices + 4 * channels + 2 * (norms + 2 * 5 * 11)
    assert count["kv_bytes_per_token"] == 2 * 2 * 2 * 16
    assert count["state_bytes_per_sequence"] == 4 * 4 * 16 * 16
    flops = 2 * (matrices + 5 * 11) + 4 * 16 * 16 * 4 + 2 * 131_072 * 4 * 16
    assert count["flops_per_token"]["131072"] == flops


def test_experts_count_whole_in_total_and_by_top_k_in_active() -> None:
    one, two = (sizes(load_model("tiny", [f"ffn.top_k={k}"])) for k in (1, 2))
    expert = 3 * 32 * 64
    assert two["total_params"] == one["total_params"]
    assert two["active_params_no_vocab"] - one["active_params_no_vocab"] == 4 * expert
    more = sizes(load_model("tiny", ["ffn.num_experts=5"]))
    assert more["total_params"] - two["total_params"] == 4 * (expert + 32)  # and a router row
    assert more["active_params_no_vocab"] - two["active_params_no_vocab"] == 4 * 32
    scales = 4 * (2 * 64 + 32)
    extra = 4 * (expert + scales + 2 * 32)  # the router row stays bf16
    assert more["weight_bytes"]["int8"] - two["weight_bytes"]["int8"] == extra
