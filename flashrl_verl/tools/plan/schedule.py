# SPDX-License-Identifier: Apache-2.0
"""How long an engine needs for all its responses: continuous batching, and preemption when the KV cache is full."""

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean

from flashrl_verl.tools.plan.step import Clock


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one engine generates."""

    sequences: int
    prompt: int
    """Tokens of each prompt."""
    response: int
    """Tokens of each response, their mean."""
    spread: float = 0.0
    """Standard deviation of the logarithm of the responses' lengths, which are lognormal; 0: all have one length."""
    limit: int | None = None
    """Tokens at which a response is cut off; above the mean."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Outcome of a simulated rollout."""

    seconds: float
    steps: int
    """Decode steps."""
    preemptions: int
    """How often a sequence lost its place in the KV cache and was computed again."""


@cache
def response_lengths(work: Work) -> tuple[int, ...]:
    """Tokens of each response: evenly spaced quantiles of the distribution, in a random order that is always the
    same."""
    if not work.spread:
        return (work.response,) * work.sequences
    spread = [math.exp(work.spread * NormalDist().inv_cdf((i + 0.5) / work.sequences)) for i in range(work.sequences)]
    limit = work.limit or math.inf

    def of_median(median: float) -> list[int]:
        return [max(1, round(min(limit, median * factor))) for factor in spread]

    low, high = 0.0, 100.0 * work.response  # where the limit cuts, the median is above the mean of what is left
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if fmean(of_median(middle)) < work.response else (low, middle)
    lengths = of_median(high)
    random.Random(0).shuffle(lengths)
    return tuple(lengths)


def length_over_tokens(work: Work) -> float:
    """Mean length of the sequences, prompt included, over their tokens: what attention costs a token goes with it."""
    lengths = [work.prompt + length for length in response_lengths(work)]
    return sum(length * length for length in lengths) / sum(lengths)


def own_prompt(work: Work, sharing: float) -> int:
    """Tokens of a prompt for each sequence to read and to keep, where prefix caching does so once for ``sharing`` of
    them."""
    return math.ceil(work.prompt / sharing)


def simulate(clock: Clock, work: Work, tokens: int, max_num_seqs: int, sharing: float = 1.0) -> Timeline:
    """Go through a rollout event by event, with vLLM's order: first come, first served; the last that came is
    preempted.

    Args:
        clock: times of a step.
        work: what is generated.
        tokens: how many the KV cache holds; one whole sequence at least.
        max_num_seqs: how many sequences may run together.
        sharing: sequences to a prompt on this engine; with 1 nothing is shared.
    """
    own = own_prompt(work, sharing)
    waiting = deque((0, length) for length in response_lengths(work))  # of each: tokens that are generated, and wanted
    # All that run get a token a step, so one is known by the step at which it had none, and that at which it ends.
    running: dict[int, tuple[int, int]] = {}  # in the order of admission
    ends: list[tuple[int, int]] = []
    used = seconds = 0
    count = preemptions = number = 0
    while waiting or running:
        admitted = squares = came = 0
        while waiting and len(running) < max_num_seqs:
            generated, wanted = waiting[0]
            length = own + generated
            if used + length + len(running) + 1 > tokens:
                break
            waiting.popleft()
            used += length
            admitted += length
            squares += length * (work.prompt + generated)
            came += 1
            number += 1
            running[number] = count - generated, wanted
            heapq.heappush(ends, (count - generated + wanted, number))
        if admitted:
            seconds += clock.prefill(admitted, squares / admitted, came)
        while ends[0][1] not in running:  # preempted since
            heapq.heappop(ends)
        steps = min(ends[0][0] - count, (tokens - used) // len(running))
        if not steps:
            began, wanted = running.popitem()[1]
            used -= own + count - began
            waiting.appendleft((count - began, wanted))
            preemptions += 1
            continue
        context = used / len(running) + work.prompt - own
        seconds += steps * clock.decode(len(running), context + steps / 2).total
        count += steps
        used += steps * len(running)
        while ends and ends[0][0] == count:
            if ended := running.pop(heapq.heappop(ends)[1], None):
                used -= own + ended[1]
    return Timeline(seconds=seconds, steps=count, preemptions=preemptions)
