# SPDX-License-Identifier: Apache-2.0
"""`flashrl plan`'s walk through a rollout: waves, preemption, prompts that are shared."""

import pytest
import torch

from flashrl_verl.tools.plan.schedule import Work, simulate
from flashrl_verl.tools.plan.step import StepTime


class SteadyClock:
    """Every decode step takes a second, prefills nothing: times can be counted by hand."""

    def decode(self, sequences, context):
        return StepTime(linear=1.0, attention=0, quantize=0, reduce=0, rest=0)

    def prefill(self, tokens, length, sequences):
        return 0.0


@pytest.mark.parametrize(
    "tokens, limit, seconds, largest",
    [
        (10**9, 100, 10, 4),
        (4 * 15, 100, 10, 4),  # 4 sequences of 5 + 10 tokens just fit
        (10**9, 2, 20, 2),  # two, then the other two
        (10**9, 1, 40, 1),
    ],
)
def test_a_rollout_takes_as_many_steps_as_its_waves(tokens, limit, seconds, largest):
    line = simulate(SteadyClock(), Work(sequences=4, prompt=5, response=10), tokens, limit)
    assert (line.seconds, line.steps, line.largest, line.preemptions) == (seconds, seconds, largest, 0)


@pytest.mark.parametrize("seed", range(20))
def test_the_schedule_is_that_of_a_loop_over_single_steps(seed):
    generator = torch.Generator().manual_seed(seed)
    sequences, prompt, response, limit = (
        int(torch.randint(1, high, (), generator=generator)) for high in (40, 30, 50, 30)
    )
    tokens = prompt + response + int(torch.randint(0, sequences * (prompt + response), (), generator=generator))
    work = Work(sequences=sequences, prompt=prompt, response=response)
    line = simulate(SteadyClock(), work, tokens, limit)
    assert (line.steps, line.preemptions) == step_by_step(work, tokens, limit)


def step_by_step(work: Work, tokens: int, limit: int) -> tuple[int, int]:
    """Steps and preemptions, one token at a time."""
    waiting, running, steps, preemptions = [0] * work.sequences, [], 0, 0
    while waiting or running:
        while waiting and len(running) < limit:
            held = sum(work.prompt + done for done in running)
            if held + work.prompt + waiting[0] + len(running) + 1 > tokens:
                break
            running.append(waiting.pop(0))
        while sum(work.prompt + done + 1 for done in running) > tokens:
            waiting.insert(0, running.pop())
            preemptions += 1
        running = [done + 1 for done in running]
        running = [done for done in running if done < work.response]
        steps += 1
    return steps, preemptions


def test_a_preempted_sequence_is_read_again_at_its_own_length():
    lengths = []

    class Listening(SteadyClock):
        def prefill(self, tokens, length, sequences):
            lengths.append((tokens, length))
            return 0.0

    line = simulate(Listening(), Work(sequences=2, prompt=4, response=12), 20, max_num_seqs=2)
    assert line.preemptions == 1 and lengths[0] == (8, 4) and lengths[1][0] == lengths[1][1] > 4


def test_responses_that_share_a_prompt_read_and_keep_it_once():
    """Two to a prompt of 8, responses of 4: 16 tokens for two where 24 would be, and steps that see whole prompts."""
    read, contexts = [], []

    class Listening(SteadyClock):
        def prefill(self, tokens, length, sequences):
            read.append((tokens, length, sequences))
            return 0.0

        def decode(self, sequences, context):
            contexts.append(context)
            return super().decode(sequences, context)

    work = Work(sequences=4, prompt=8, response=4)
    apart = simulate(Listening(), work, 24, max_num_seqs=4)
    together = simulate(Listening(), work, 32, max_num_seqs=4, sharing=2)
    assert (apart.largest, together.largest) == (2, 4) and apart.steps == 2 * together.steps
    assert read == [(16, 8, 2), (16, 8, 2), (16, 8, 4)] and contexts == [10, 10, 10]
