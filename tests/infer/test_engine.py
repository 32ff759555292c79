"""The engine against generation of each prompt alone, and against a model made of hashes."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sferic.infer import Engine, Sampling, generate, scheduler
from sferic.infer.pools import PagedCache, Pool
from sferic.nn import HybridModel
from sferic.nn.batch import Batch

MakeModel = Callable[..., HybridModel]
GRID = 8
LENGTHS = (1, 2, 7, 8, 9, 30)
WAYS = (
    Sampling(),
    Sampling(temperature=0.9, top_p=0.8, seed=4),
    Sampling(temperature=1.1, top_k=7, repetition_penalty=1.4, seed=1),
)


@pytest.fixture(scope="module", autouse=True)
def small_grid() -> Iterator[None]:
    """Prompts of a few tokens are cut, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "GRID", GRID)
        yield


@pytest.fixture(scope="module")
def model(make_model: MakeModel) -> HybridModel:
    return make_model()


def prompt(n: int, seed: int = 0) -> list[int]:
    return torch.randint(40, (n,), generator=torch.Generator().manual_seed(100 * n + seed)).tolist()


def new_engine(model: Any, **options: Any) -> Engine:
    values = {"max_running": 3, "kv_tokens": 160, "block_size": 4, "step_tokens": 12, **options}
    return Engine(model, **values)


def idle(engine: Engine) -> bool:
    """Nothing runs, waits or is held."""
    cache, plan = engine.cache, engine.scheduler
    free = cache.blocks.free == cache.blocks.size and cache.slots.free == cache.slots.size
    return free and not engine.busy and not plan.waiting and not plan.running


def options(way: Sampling) -> dict[str, Any]:
    return {name: getattr(way, name) for name in Sampling.__dataclass_fields__}


@pytest.mark.parametrize("block_size", [1, 4, 64])
def test_together_equals_alone(block_size: int, model: HybridModel) -> None:
    engine = new_engine(model, block_size=block_size)
    prompts = [prompt(n, i) for i, n in enumerate(LENGTHS * 2)]
    ways = [WAYS[i % 3] for i in range(len(prompts))]
    got = engine.generate(prompts, ways, max_new_tokens=11)
    want = [
        generate(model, p, max_new_tokens=11, **options(way))[0]
        for p, way in zip(prompts, ways, strict=True)
    ]
    assert [c.token_ids for c in got] == want
    assert {c.finish_reason for c in got} == {"length"}
    assert idle(engine)


def test_a_stop_id_ends_its_request(model: HybridModel) -> None:
    (whole,) = generate(model, prompt(7), max_new_tokens=9)
    (got,) = new_engine(model).generate([prompt(7)], max_new_tokens=9, stop_ids=[whole[3]])
    assert got.token_ids == whole[: whole.index(whole[3]) + 1]
    assert got.finish_reason == "stop"


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(LENGTHS), st.integers(1, 9)),
        st.tuples(st.just("abort"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
    ),
    max_size=25,
)


def play(engine: Engine, actions: list[tuple[str, int, int]]) -> dict[int, tuple[Any, list[int]]]:
    """Do the actions and then run to the end; each whole request's prompt and new tokens."""
    asked: dict[int, tuple[list[int], int]] = {}
    tokens: dict[int, list[int]] = {}
    ended: set[int] = set()

    def step() -> None:
        chunks = 0
        for event in engine.step():
            assert event.number in asked
            assert event.number not in ended
            assert event.token is not None
            tokens[event.number].append(event.token)
            if event.finish_reason is not None:
                ended.add(event.number)
            chunks += 1
        held = [b for s in engine.scheduler.running for b in s.blocks]
        assert len(held) == len(set(held)) == engine.cache.blocks.size - engine.cache.blocks.free
        assert chunks <= engine.cache.slots.size

    for action, a, b in actions:
        if action == "add":
            number = engine.add(prompt(a, b), max_new_tokens=b)
            asked[number], tokens[number] = (prompt(a, b), b), []
        elif action == "abort" and a in asked:
            engine.abort(a)
            if a not in ended:
                del asked[a]
                tokens.pop(a)
        elif action == "step":
            for _ in range(a):
                step()
    for _ in range(1000):
        if not engine.busy:
            break
        step()
    assert idle(engine)
    assert ended >= set(asked)
    return {n: (asked[n], tokens[n]) for n in asked}


@given(actions=ACTIONS)
@settings(max_examples=20, deadline=None)
def test_any_order_of_adding_aborting_and_stepping(
    actions: list[tuple[str, int, int]], model: HybridModel
) -> None:
    for (ids, count), tokens in play(new_engine(model, kv_tokens=60), actions).values():
        assert tokens == generate(model, ids, max_new_tokens=count)[0]


class Hashes:
    """A model whose state is a hash of all tokens so far; what is stale can't look right."""

    PRIME = 1_000_003

    def __init__(self) -> None:
        self.config = SimpleNamespace(vocab_size=40)
        self.embed_tokens = SimpleNamespace(weight=torch.zeros(1))
        self.compute_dtype = None

    def eval(self) -> None:
        """Like a model's."""

    @classmethod
    def after(cls, state: int, token: int) -> int:
        return (state * 31 + token + 1) % cls.PRIME

    def hidden(self, batch: Batch, cache: Any) -> tuple[Tensor, None]:
        """The hash after each token, from slots and blocks as the real layers use them."""
        assert batch.tokens is not None
        assert batch.slots is not None
        assert batch.has_state is not None
        assert batch.block_table is not None
        states, cells = cache.states, cache.cells
        ends = batch.cu_seqlens.tolist()
        assert len(set(batch.slots.tolist())) == len(batch.slots)
        out = []
        for s, slot in enumerate(batch.slots.tolist()):
            a, b = ends[s], ends[s + 1]
            assert (s < batch.decodes) == (b - a == 1 and bool(batch.has_state[s]))
            state, position = states[slot] if batch.has_state[s] else (0, 0)
            assert position == int(batch.positions[a])
            size = cache.block_size
            for t in range(a, b):
                state = self.after(state, int(batch.tokens[t]))
                block = int(batch.block_table[s, position // size])
                assert block > 0
                cells[block, position % size] = state, position
                out.append(state)
                position += 1
            states[slot] = state, position
            table = batch.block_table[s].tolist()
            read = [cells[table[p // size], p % size] for p in range(position)]
            assert [p for _, p in read] == list(range(position))
            assert read[-1][0] == state
            if s < batch.decodes:
                assert batch.max_context >= position
        return torch.tensor(out, dtype=torch.float64)[:, None], None

    def head(self, h: Tensor) -> Tensor:
        """The next token is the hash modulo the vocabulary."""
        return torch.nn.functional.one_hot(h[:, 0].long() % 40, 40).double()


def by_hash(ids: list[int], count: int) -> list[int]:
    state = 0
    for token in ids:
        state = Hashes.after(state, token)
    new: list[int] = []
    for _ in range(count):
        new.append(state % 40)
        state = Hashes.after(state, new[-1])
    return new


@given(actions=ACTIONS, block_size=st.sampled_from([1, 3, 8, 64]))
@settings(max_examples=100, deadline=None)
def test_a_model_of_hashes(actions: list[tuple[str, int, int]], block_size: int) -> None:
    def cache(config: Any, *, blocks: int, block_size: int, slots: int, **_: Any) -> Any:
        return SimpleNamespace(
            block_size=block_size,
            blocks=Pool("blocks", range(1, blocks + 1)),
            slots=Pool("slots", range(slots)),
            blocks_for=lambda n: -(-n // block_size),
            states={},
            cells={},
            clear=lambda slot, blocks: None,
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sferic.infer.engine.HybridModel", Hashes)
        patch.setattr("sferic.infer.engine.PagedCache", cache)
        engine = new_engine(Hashes(), kv_tokens=64, block_size=block_size)
    for (ids, count), tokens in play(engine, actions).values():
        assert tokens == by_hash(ids, count)


def test_every_step_decodes_while_a_long_prompt_is_read(model: HybridModel) -> None:
    engine = new_engine(model)
    first = engine.add(prompt(2), max_new_tokens=9)
    engine.step()
    engine.add(prompt(60), max_new_tokens=2)
    for _ in range(5):
        assert [event.number for event in engine.step()] == [first]
        assert engine.scheduler.running[1].computed % GRID == 0


def test_logits_that_are_nan_end_their_request_alone(make_model: MakeModel) -> None:
    model = make_model()
    with torch.no_grad():
        model.embed_tokens.weight[39] = float("nan")
    good = [t if t != 39 else 38 for t in prompt(9)]
    want = generate(model, good, max_new_tokens=6, vocab_size=39)
    engine = new_engine(model, vocab_size=39)
    bad, other = engine.generate([[39] * 60, good], max_new_tokens=6)
    assert (bad.token_ids, bad.finish_reason) == ([], "error")
    assert (other.token_ids, other.finish_reason) == (want[0], "length")
    # what is left in the last block of the shorter one is read with weight 0 beside the longer one
    longer = [t % 39 for t in prompt(30)]
    want += generate(model, longer, max_new_tokens=6, vocab_size=39)
    again = engine.generate([longer, good], max_new_tokens=6)
    assert [c.token_ids for c in again] == want[::-1]
    assert idle(engine)


def test_an_aborted_request_leaves_no_nan_behind(make_model: MakeModel) -> None:
    model = make_model()
    with torch.no_grad():
        model.embed_tokens.weight[39] = float("nan")
    engine = new_engine(model, vocab_size=39)
    number = engine.add([39] * 60, max_new_tokens=6)
    for _ in range(3):
        assert engine.step() == []  # in the middle of its prompt
    engine.abort(number)
    prompts = [[t % 39 for t in prompt(n)] for n in (9, 30)]
    got = engine.generate(prompts, max_new_tokens=6)
    want = [generate(model, p, max_new_tokens=6, vocab_size=39)[0] for p in prompts]
    assert [c.token_ids for c in got] == want


def test_a_step_that_fails_aborts_its_requests_and_no_other(
    model: HybridModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(model, max_running=2)
    first, second, third = (engine.add(prompt(n), max_new_tokens=4) for n in (3, 4, 5))
    engine.step()

    def fails(h: Tensor) -> Tensor:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(model, "head", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.step()
    tokens = [event.token for _ in range(9) for event in engine.step() if event.number == third]
    assert tokens == generate(model, prompt(5), max_new_tokens=4)[0]
    assert idle(engine)
    engine.abort(first)
    engine.abort(second)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda m: new_engine(m).add([], max_new_tokens=1), "no token"),
        (lambda m: new_engine(m).add([40], max_new_tokens=1), "40 lies outside .* of 40"),
        (lambda m: new_engine(m).add([1], max_new_tokens=0), "max_new_tokens is 0"),
        (lambda m: new_engine(m).add([1] * 100, max_new_tokens=62), "160 tokens of the whole"),
        (lambda m: new_engine(m).generate([[1]], [], max_new_tokens=1), "0 ways .* 1 prompts"),
        (lambda m: new_engine(m, step_tokens=10), "step_tokens is 10: .* at least 11"),
        (lambda m: new_engine(m, max_running=0), "max_running is 0"),
        (lambda m: new_engine(m, kv_tokens=-1), "kv_tokens is -1"),
    ],
)
def test_what_is_refused(action: Callable[[Any], Any], message: str, model: HybridModel) -> None:
    with pytest.raises(ValueError, match=message):
        action(model)


def test_a_refused_prompt_ends_the_others_of_its_call(model: HybridModel) -> None:
    engine = new_engine(model)
    with pytest.raises(ValueError, match="outside"):
        engine.generate([prompt(7), [40]], max_new_tokens=3)
    assert idle(engine)


def test_the_last_block_is_filled_to_its_end(model: HybridModel) -> None:
    engine = new_engine(model, kv_tokens=16, max_running=1)
    (got,) = engine.generate([prompt(9)], max_new_tokens=8)  # 16 tokens are read
    assert got.token_ids == generate(model, prompt(9), max_new_tokens=8)[0]


def test_a_pool_knows_what_it_gave() -> None:
    pool = Pool("slots", range(3))
    taken = pool.take(2)
    assert pool.free == 1
    with pytest.raises(ValueError, match="2 slots are wanted, 1 are free"):
        pool.take(2)
    pool.give_back(taken)
    for wrong in (taken, [7], [taken[0], taken[0]]):
        with pytest.raises(ValueError, match="not taken"):
            pool.give_back(wrong)


def test_nobody_writes_the_empty_block(model: HybridModel) -> None:
    engine = new_engine(model)
    engine.generate([prompt(n) for n in LENGTHS], max_new_tokens=5)
    cache: PagedCache = engine.cache
    for layer, kind in enumerate(model.config.mixers):
        if kind == "softmax":
            k, v = cache.kv(layer)
            assert not k[0].any()
            assert not v[0].any()
            assert k[1:].any()
