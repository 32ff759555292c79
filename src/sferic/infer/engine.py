"""Many requests through one model: continuous batching over a paged cache.

    engine = Engine(model)
    number = engine.add([1, 2, 3], max_new_tokens=20)
    while engine.busy:
        for event in engine.step():
            ...

A step runs one token of every decoding request and chunks of prompts as one pack.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from sferic.checkpoint import load
from sferic.infer.generate import GREEDY
from sferic.infer.pools import PagedCache
from sferic.infer.sampler import Sampling, sample
from sferic.infer.scheduler import Chunk, Request, Running, Scheduler
from sferic.nn import HybridModel
from sferic.nn.batch import Batch
from sferic.ops.blocked import BlockedWeights

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Event:
    """A new token of a request, or its end, or both."""

    number: int
    token: int | None
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Completion:
    """A request's new tokens, and why they end: a stop id (the last of them), the limit, ..."""

    token_ids: list[int]
    finish_reason: FinishReason


class Engine:
    """Runs requests together; what one gets doesn't depend on the others but for rounding.

    Args:
        model: a model, or a folder to load one from.
        max_running: requests at once.
        kv_tokens: tokens of all running requests together that the cache has room for.
        block_size: tokens of a block of that room.
        step_tokens: at most so many tokens in one step.
        vocab_size: ids from here on are never chosen (rows of the head without a token).
    """

    def __init__(
        self,
        model: HybridModel | str | Path,
        *,
        max_running: int = 16,
        kv_tokens: int = 65_536,
        block_size: int = 256,
        step_tokens: int = 2048,
        vocab_size: int | None = None,
    ) -> None:
        for name, value in (
            ("max_running", max_running),
            ("kv_tokens", kv_tokens),
            ("block_size", block_size),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}, it must be at least 1")
        self.model = model if isinstance(model, HybridModel) else load(model)
        self.model.eval()
        self.vocab_size = vocab_size
        weight = self.model.embed_tokens.weight
        self.device = weight.device
        self.cache = PagedCache(
            self.model.config,
            blocks=-(-kv_tokens // block_size),
            block_size=block_size,
            slots=max_running,
            device=self.device,
            dtype=self.model.compute_dtype or weight.dtype,
        )
        self.scheduler = Scheduler(self.cache, step_tokens)
        self._weights = BlockedWeights()
        self._sequences: dict[int, Running] = {}
        self._count = 0

    @property
    def busy(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._sequences)

    def add(
        self,
        prompt: Sequence[int],
        sampling: Sampling = GREEDY,
        *,
        max_new_tokens: int,
        stop_ids: Collection[int] = (),
    ) -> int:
        """Queue a prompt; returns the request's number, as events name it.

        Raises:
            ValueError: the prompt can't be used, or could never fit.
        """
        limit = self.model.config.vocab_size
        prompt = [int(t) for t in prompt]
        bad = [t for t in prompt if not 0 <= t < limit]
        if bad or not prompt:
            raise ValueError(
                f"token id {bad[0]} lies outside the model's vocabulary of {limit}"
                if bad
                else "the prompt has no token; give at least a start token"
            )
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}, it must be at least 1")
        request = Request(tuple(prompt), max_new_tokens, sampling, frozenset(stop_ids))
        sequence = Running(self._count, request, prompt)
        if sampling.repetition_penalty != 1:
            sequence.seen = torch.zeros(limit, dtype=torch.bool, device=self.device)
            sequence.seen[prompt] = True
        self.scheduler.add(sequence)
        self._sequences[self._count] = sequence
        self._count += 1
        return sequence.number

    def abort(self, number: int) -> None:
        """End a request, in whatever state; one that has ended stays as it is."""
        sequence = self._sequences.pop(number, None)
        if sequence is not None:
            if sequence.slot >= 0:  # whether it was finite nobody knows yet
                self.cache.clear(sequence.slot, sequence.blocks)
            self.scheduler.remove(sequence)

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Run the model once; returns what is new.  Nothing runs and [] comes back when idle.

        Whatever it raises, the requests of the step are aborted: their states may be half written.
        """
        chunks = self.scheduler.schedule()
        try:
            return self._run(chunks) if chunks else []
        except BaseException:
            for chunk in chunks:
                self.abort(chunk.sequence.number)
            raise

    def _run(self, chunks: list[Chunk]) -> list[Event]:
        batch = self._batch(chunks)
        with self._weights.used():
            h = self.model.hidden(batch, self.cache)[0]
            ready = [i for i, chunk in enumerate(chunks) if chunk.last]
            last = batch.cu_seqlens[1:].long() - 1
            logits = self.model.head(h[last[ready]])
        for chunk in chunks:
            chunk.sequence.computed += chunk.count
        sequences = [chunks[i].sequence for i in ready]
        tokens = self._sample(logits[:, : self.vocab_size], sequences)
        return [self._take(s, token) for s, token in zip(sequences, tokens, strict=True)]

    def generate(
        self,
        prompts: Iterable[Sequence[int]],
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        *,
        max_new_tokens: int,
        stop_ids: Collection[int] = (),
    ) -> list[Completion]:
        """Completions of prompts, in their order; one way of sampling, or one for each."""
        prompts = list(prompts)
        if not isinstance(sampling, Sampling) and len(sampling) != len(prompts):
            raise ValueError(
                f"{len(sampling)} ways of sampling for {len(prompts)} prompts: give one, or as many"
            )
        ways = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        numbers: list[int] = []
        try:
            for prompt, way in zip(prompts, ways, strict=True):
                number = self.add(prompt, way, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
                numbers.append(number)
            place = {number: i for i, number in enumerate(numbers)}
            tokens: list[list[int]] = [[] for _ in prompts]
            reasons: list[FinishReason] = ["abort"] * len(prompts)
            while any(number in self._sequences for number in numbers):
                for event in self.step():
                    i = place.get(event.number)
                    if i is not None and event.token is not None:
                        tokens[i].append(event.token)
                    if i is not None and event.finish_reason is not None:
                        reasons[i] = event.finish_reason
        finally:
            for number in numbers:
                self.abort(number)
        return [Completion(t, r) for t, r in zip(tokens, reasons, strict=True)]

    def _batch(self, chunks: list[Chunk]) -> Batch:
        """One pack of the chunks, with where their sequences lie in the cache."""
        sequences = [chunk.sequence for chunk in chunks]
        ends = [s.computed + chunk.count for s, chunk in zip(sequences, chunks, strict=True)]
        new = [s.tokens[s.computed : end] for s, end in zip(sequences, ends, strict=True)]
        decodes = sum(s.decodes for s in sequences)
        used = [self.cache.blocks_for(end) for end in ends]
        table = torch.zeros(len(chunks), max(used), dtype=torch.int64)
        for row, s, n in zip(table, sequences, used, strict=True):
            row[:n] = torch.tensor(s.blocks[:n])
        starts = [s.computed for s in sequences]
        return Batch.pack(
            [torch.tensor(t, device=self.device) for t in new],
            starts,
            slots=torch.tensor([s.slot for s in sequences], device=self.device),
            has_state=torch.tensor([a > 0 for a in starts], device=self.device),
            block_table=table.to(self.device),
            decodes=decodes,
            max_context=max(ends[:decodes], default=0),
        )

    def _sample(self, logits: Tensor, sequences: list[Running]) -> list[int]:
        """A token of each row; rows that sample alike do so together."""
        alike: dict[Sampling, list[int]] = {}
        for row, sequence in enumerate(sequences):
            alike.setdefault(sequence.request.sampling, []).append(row)
        tokens = [-1] * len(sequences)
        for sampling, rows in alike.items():
            seen = [s for row in rows if (s := sequences[row].seen) is not None]
            positions = [len(sequences[row].tokens) for row in rows]
            known = torch.stack(seen)[:, : self.vocab_size] if seen else None
            chosen = sample(logits[rows], sampling, positions, known).tolist()
            for row, token in zip(rows, chosen, strict=True):
                tokens[row] = token
        return tokens

    def _take(self, sequence: Running, token: int) -> Event:
        """Append a token, -1 for logits that were not finite; end the request where it ends."""
        request, reason = sequence.request, None
        if token < 0:
            reason = "error"
        else:
            sequence.tokens.append(token)
            if sequence.seen is not None:
                sequence.seen[token] = True
            if token in request.stop_ids:
                reason = "stop"
            elif len(sequence.tokens) == len(request.prompt) + request.max_new_tokens:
                reason = "length"
        if reason == "error":
            self.abort(sequence.number)
        elif reason is not None:
            del self._sequences[sequence.number]
            self.scheduler.remove(sequence)
        return Event(sequence.number, None if token < 0 else token, reason)
