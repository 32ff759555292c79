"""The learning rate and batch size of a step, from a stage's segments."""

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

from sferic.config.recipe import BatchSegment, LRSegment, Stage

S = TypeVar("S", LRSegment, BatchSegment)


def lr_at(stage: Stage, step: int, tokens: int) -> float:
    """The learning rate of one optimizer step.

    A segment's progress is measured where the step ends, so that the first step of a warm-up
    moves the weights and the last one reaches `to`. Past the last segment its value stays.

    Args:
        stage: The stage that holds the schedule.
        step: Optimizer steps finished before this one.
        tokens: Tokens consumed before this step.
    """
    by_steps = stage.lr[0].unit == "steps"
    now = step if by_steps else tokens
    after = now + (1 if by_steps else batch_tokens_at(stage, step, tokens))
    start = 0.0
    for segment, begin, end in _spans(stage.lr, stage.budget.length(stage.lr[0].unit)):
        if now < end:
            return _value(segment, start, min(1.0, (after - begin) / (end - begin)))
        start = segment.to
    return start


def batch_tokens_at(stage: Stage, step: int, tokens: int) -> int:
    """Tokens of one optimizer step; arguments as in `lr_at`."""
    now = step if stage.batch[0].unit == "steps" else tokens
    for segment, _, end in _spans(stage.batch, None):
        if now < end:
            return segment.tokens
    return stage.batch[-1].tokens


def _spans(segments: Sequence[S], budget: int | None) -> Iterator[tuple[S, int, float]]:
    """Each segment with its begin and end; an open end is the budget's, or infinite."""
    begin = 0
    for segment in segments:
        if segment.length is None:
            yield segment, begin, math.inf if budget is None else budget
            return
        yield segment, begin, begin + segment.length
        begin += segment.length


def _value(segment: LRSegment, start: float, progress: float) -> float:
    if segment.shape == "constant" or progress == 1.0:  # `to` to the last bit
        return segment.to
    if segment.shape == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return start + (segment.to - start) * progress
