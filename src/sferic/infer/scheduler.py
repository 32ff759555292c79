"""Which requests run in a step, and how many tokens of each.

A sequence has `tokens`, of which the first `computed` are in the cache.  What it does next follows
from these two alone: with one token left and others in the cache it decodes, else it is extended by
a chunk.  A step holds one token of every decoding sequence and as much of the others, in order of
arrival, as its budget allows.
"""

from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from sferic.infer.pools import PagedCache
from sferic.infer.sampler import Sampling

# Chunks but the last of a prompt end at multiples of this, so that where a prompt is cut doesn't
# depend on its neighbours, and the blocks of lightning attention are the same.
GRID = 256


@dataclass(frozen=True)
class Request:
    """A prompt and what is wanted of it."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    stop_ids: frozenset[int]


@dataclass(eq=False)
class Running:
    """A request on its way.  0 <= computed < len(tokens)."""

    number: int
    request: Request
    tokens: list[int]
    computed: int = 0
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    seen: Tensor | None = None  # [V] bool, for a repetition penalty

    @property
    def left(self) -> int:
        """Tokens that are not in the cache."""
        return len(self.tokens) - self.computed

    @property
    def decodes(self) -> bool:
        """Whether its next step is one token after others in the cache."""
        return self.left == 1 and self.computed > 0


@dataclass(frozen=True)
class Chunk:
    """The next `count` tokens of a sequence."""

    sequence: Running
    count: int

    @property
    def last(self) -> bool:
        """Whether a new token follows."""
        return self.count == self.sequence.left


class Scheduler:
    """First come, first served; a request is admitted when all that it can ever need is free."""

    def __init__(self, cache: PagedCache, step_tokens: int) -> None:
        if step_tokens < cache.slots.size + GRID:
            raise ValueError(
                f"step_tokens is {step_tokens}: with {cache.slots.size} requests at once it must "
                f"be at least {cache.slots.size + GRID}, a token of each and {GRID} of a prompt"
            )
        self.cache = cache
        self.step_tokens = step_tokens
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []

    def blocks(self, request: Request) -> int:
        """Blocks for the prompt and all new tokens but the last, which is never read."""
        return self.cache.blocks_for(len(request.prompt) + request.max_new_tokens - 1)

    def add(self, sequence: Running) -> None:
        """Let a request wait for its turn.

        Raises:
            ValueError: it could never run.
        """
        need, size = self.blocks(sequence.request), self.cache.blocks.size
        if need > size:
            limit = size * self.cache.block_size
            raise ValueError(
                f"a prompt of {len(sequence.request.prompt)} tokens with "
                f"{sequence.request.max_new_tokens} new ones needs more than the {limit} tokens "
                "of the whole cache; ask for fewer new tokens or give the engine more kv_tokens"
            )
        self.waiting.append(sequence)

    def schedule(self) -> list[Chunk]:
        """The next step: decoding sequences first."""
        self._admit()
        chunks = [Chunk(s, 1) for s in self.running if s.decodes]
        budget = self.step_tokens - len(chunks)
        for sequence in self.running:
            if not sequence.decodes:
                count = min(sequence.left, budget)
                if count < sequence.left:
                    end = sequence.computed + count
                    count = end // GRID * GRID - sequence.computed
                if count <= 0:
                    break
                chunks.append(Chunk(sequence, count))
                budget -= count
        return chunks

    def _admit(self) -> None:
        cache = self.cache
        while self.waiting and cache.slots.free:
            need = self.blocks(self.waiting[0].request)
            if need > cache.blocks.free:
                return
            sequence = self.waiting.popleft()
            (sequence.slot,) = cache.slots.take(1)
            sequence.blocks = cache.blocks.take(need)
            self.running.append(sequence)

    def remove(self, sequence: Running) -> None:
        """Take a request out, whatever it does, and free what it holds."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self.cache.slots.give_back([sequence.slot])
        self.cache.blocks.give_back(sequence.blocks)
        sequence.slot, sequence.blocks = -1, []
