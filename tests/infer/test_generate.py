"""Generation against a loop that runs the whole sequence again for every token."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from sferic.infer import Sampling, generate, generate_stream, sample
from sferic.nn import HybridModel
from sferic.ops import matmul
from sferic.ops.blocked import BlockedWeights

MakeModel = Callable[..., HybridModel]
MODULE = importlib.import_module("sferic.infer.generate")  # not the function of that name
PROMPTS = [[3, 14, 15, 9, 2, 6, 5], [8], [2, 7, 1, 8], [31, 4, 15, 9, 2, 6, 5, 35, 8, 9, 7]]
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_p": 0.8, "seed": 4},
    {"temperature": 1.1, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.4, "seed": 1},
    {"repetition_penalty": 3.0},
]


@pytest.fixture(scope="module")
def model(make_model: MakeModel) -> HybridModel:
    return make_model()


@torch.no_grad()
def naive(
    model: HybridModel,
    prompt: Sequence[int],
    new: int,
    *,
    vocab_size: int | None = None,
    **options: Any,
) -> list[int]:
    ids = list(prompt)
    for _ in range(new):
        logits = model(torch.tensor([ids]))[0, -1:, :vocab_size]
        seen = torch.tensor([[i in ids for i in range(logits.shape[1])]])
        ids.append(int(sample(logits, Sampling(**options), [len(ids)], seen)))
    return ids[len(prompt) :]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_generation_equals_full_forwards(
    model: HybridModel, prompt: list[int], sampling: dict[str, Any]
) -> None:
    expected = naive(model, prompt, 12, **sampling)
    assert generate(model, prompt, max_new_tokens=12, **sampling) == [expected]
    assert len(set(expected)) > 2


def test_copies_of_the_weights_give_the_same_tokens(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(dtype=torch.float32)
    plain = generate(model, PROMPTS, max_new_tokens=9)
    made: list[BlockedWeights] = []

    def remembered() -> BlockedWeights:
        made.append(BlockedWeights())
        return made[-1]

    monkeypatch.setattr(MODULE, "BlockedWeights", remembered)
    monkeypatch.setattr(MODULE, "BLOCKED_FROM", 8)
    monkeypatch.setattr(matmul, "SMALL", 0)
    assert generate(model, PROMPTS, max_new_tokens=9) == plain
    assert made[0].bytes > 0.5 * sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("sampling", SAMPLING)
def test_prompts_together_equal_prompts_alone(model: HybridModel, sampling: dict[str, Any]) -> None:
    together = generate(model, PROMPTS, max_new_tokens=9, **sampling)
    assert together == [naive(model, prompt, 9, **sampling) for prompt in PROMPTS]


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 7])
def test_prompts_longer_than_a_chunk(
    model: HybridModel, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(MODULE, "PREFILL_CHUNK", chunk)
    expected = [naive(model, prompt, 6) for prompt in PROMPTS]
    assert generate(model, PROMPTS, max_new_tokens=6) == expected


def test_prompts_may_be_a_row_rows_or_a_tensor(model: HybridModel) -> None:
    row = PROMPTS[0]
    expected = naive(model, row, 3)
    for prompts in (row, [row], tuple(row), torch.tensor([row]), torch.tensor(row)):
        assert generate(model, prompts, max_new_tokens=3) == [expected]


def test_a_stop_id_ends_its_own_prompt_only(model: HybridModel) -> None:
    free = generate(model, PROMPTS, max_new_tokens=10)
    stop = free[0][3]
    expected = [ids[: ids.index(stop) + 1] if stop in ids else ids for ids in free]
    assert len({len(ids) for ids in expected}) > 1
    assert generate(model, PROMPTS, max_new_tokens=10, stop_ids={stop}) == expected


def test_the_stream_yields_none_after_a_stop_and_ends_when_all_have(model: HybridModel) -> None:
    free = generate(model, PROMPTS[:2], max_new_tokens=10)
    stops = (free[0][1], free[1][4])
    ends = [min(ids.index(s) for s in stops if s in ids) for ids in free]
    steps = list(generate_stream(model, PROMPTS[:2], max_new_tokens=10, stop_ids=stops))
    assert len(steps) == max(ends) + 1 < 10
    for row, ids in enumerate(free):
        assert [step[row] for step in steps] == [
            ids[i] if i <= ends[row] else None for i in range(len(steps))
        ]


def test_the_stream_hands_out_each_token_before_it_computes_the_next(model: HybridModel) -> None:
    calls = []
    handle = model.norm.register_forward_hook(lambda *_: calls.append(1))
    stream = generate_stream(model, [[1, 2]], max_new_tokens=3)
    for i, _ in enumerate(stream, 1):
        assert len(calls) == i
    handle.remove()
    assert len(calls) == 3


def test_rows_of_the_head_without_a_token_are_never_chosen(model: HybridModel) -> None:
    free = naive(model, PROMPTS[0], 8)
    limit = max(free)
    expected = naive(model, PROMPTS[0], 8, vocab_size=limit)
    assert expected != free
    steps = generate_stream(model, PROMPTS[:1], max_new_tokens=8, vocab_size=limit)
    assert [step[0] for step in steps] == expected


def test_the_penalty_is_for_the_prompt_and_what_came_after(model: HybridModel) -> None:
    """With a penalty that nothing outweighs, greedy decoding says each positive token once."""
    free, penalised = (
        generate(model, PROMPTS[2], max_new_tokens=12, repetition_penalty=p)[0] for p in (1.0, 1e6)
    )
    assert len({*PROMPTS[2], *free}) < 4 + 12
    assert len({*PROMPTS[2], *penalised}) == 4 + 12


def test_the_penalty_knows_prompts_of_ids_that_are_never_chosen(model: HybridModel) -> None:
    prompt = [39, 3, 38]
    expected = naive(model, prompt, 8, vocab_size=20, repetition_penalty=2.0)
    found = generate(model, prompt, max_new_tokens=8, vocab_size=20, repetition_penalty=2.0)
    assert found == [expected]


def test_weights_that_give_nan_are_an_error_not_text(make_model: MakeModel) -> None:
    model = make_model()
    with torch.no_grad():
        model.embed_tokens.weight[7] = torch.nan
    message = "logits of prompt 1 after 2 tokens are NaN or infinite; check that the weights"
    for options in SAMPLING:
        with pytest.raises(ValueError, match=message):
            generate(model, [[1, 2], [3, 7]], max_new_tokens=3, **options)


def test_a_prompt_that_has_stopped_may_turn_nan(make_model: MakeModel) -> None:
    model = make_model()
    free = generate(model, PROMPTS, max_new_tokens=4)
    (stop,) = {free[3][0]} - {t for ids in (*PROMPTS, *free[:3]) for t in ids}
    with torch.no_grad():
        model.embed_tokens.weight[stop] = torch.nan
    found = generate(model, PROMPTS, max_new_tokens=4, stop_ids={stop})
    assert found == [*free[:3], [stop]]


def test_options_are_checked_before_the_model_runs(model: HybridModel) -> None:
    with pytest.raises(ValueError, match="top_p is 2, it must be"):
        generate(model, PROMPTS, max_new_tokens=3, top_p=2)


def test_a_model_in_training_mode_drops_no_token(model: HybridModel) -> None:
    expected = generate(model, PROMPTS, max_new_tokens=4)
    model.train()
    assert generate(model, PROMPTS, max_new_tokens=4) == expected


def test_bf16_branches_generate(make_model: MakeModel) -> None:
    model = make_model(dtype=torch.float32)
    model.compute_dtype = torch.bfloat16
    assert [len(ids) for ids in generate(model, PROMPTS, max_new_tokens=3)] == [3] * 4


@pytest.mark.parametrize(
    ("prompts", "new", "message"),
    [
        ([], 1, "at least one token"),
        ([[1], []], 1, "at least one token"),
        ([[1, 40]], 1, "token id 40 lies outside the model's vocabulary of 40"),
        ([[-1]], 1, "token id -1 lies outside"),
        ([[1]], 0, "max_new_tokens is 0"),
    ],
)
def test_what_cannot_be_generated(
    model: HybridModel, prompts: list[list[int]], new: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        generate(model, prompts, max_new_tokens=new)
