# SPDX-License-Identifier: Apache-2.0
"""How long an engine needs for all its responses: continuous batching, and preemption when the KV cache is full."""

import math
from collections import deque
from dataclasses import dataclass

from flashrl_verl.tools.plan.step import Clock


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one engine generates; all sequences alike."""

    sequences: int
    prompt: int
    """Tokens of each prompt."""
    response: int
    """Tokens of each response, their mean."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Outcome of a simulated rollout."""

    seconds: float
    steps: int
    """Decode steps."""
    preemptions: int
    """How often a sequence lost its place in the KV cache and was computed again."""


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
    waiting = deque([0] * work.sequences)  # generated tokens of each
    running: list[int] = []
    used = seconds = 0
    count = preemptions = 0
    while waiting or running:
        admitted = squares = came = 0
        while waiting and len(running) < max_num_seqs:
            length = own + waiting[0]
            if used + length + len(running) + 1 > tokens:
                break
            used += length
            admitted += length
            squares += length * (work.prompt + waiting[0])
            came += 1
            running.append(waiting.popleft())
        if admitted:
            seconds += clock.prefill(admitted, squares / admitted, came)
        steps = min(work.response - max(running), (tokens - used) // len(running))
        if not steps:
            last = running.pop()
            used -= own + last
            waiting.appendleft(last)
            preemptions += 1
            continue
        context = used / len(running) + work.prompt - own
        seconds += steps * clock.decode(len(running), context + steps / 2).total
        count += steps
        used += steps * len(running)
        running = [generated + steps for generated in running]
        done = running.count(work.response)
        used -= done * (own + work.response)
        running = [generated for generated in running if generated < work.response]
    return Timeline(seconds=seconds, steps=count, preemptions=preemptions)
