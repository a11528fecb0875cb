# SPDX-License-Identifier: Apache-2.0
"""The work of ``benchmarks.step``, for verl to import: responses of given lengths, and groups that are constant.

A model of random weights hardly ever ends a response. Here each has a length of its own: lognormal, its group's and its
own part alike, drawn from its prompt and its number. So a prompt's lengths are the same in every variant; how many
prompts a step needs is not.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from statistics import NormalDist
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from benchmarks.common import STEP_SETTINGS


def uniform(*of: Any) -> float:
    """A number from 0 to 1, the same for the same words in every process."""
    digest = hashlib.sha256(" ".join(map(str, of)).encode()).digest()
    return (int.from_bytes(digest[:8], "big") + 0.5) / 2**64


def response_length(prompt: str, number: int, median: float, spread: float) -> int:
    """Tokens of a prompt's response of that number."""
    normal = NormalDist(sigma=spread / math.sqrt(2))
    both = normal.inv_cdf(uniform("group", prompt)) + normal.inv_cdf(uniform("response", prompt, number))
    return max(1, round(median * math.exp(both)))


@register("flashrl_bench_step")
class LengthsAgentLoop(SingleTurnAgentLoop):
    """verl's loop of one turn, which ends at the response's length."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        settings = json.loads(os.environ[STEP_SETTINGS])
        median = settings["median"] * (settings["warm_up"] if kwargs["global_steps"] == 1 else 1)
        prompt = kwargs["raw_prompt"][-1]["content"]
        length = response_length(prompt, kwargs["session_id"], median, settings["spread"])
        return await super().run({**sampling_params, "max_tokens": min(length, self.response_length)}, **kwargs)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """0 for every response of a constant group; otherwise 0 or 1 by the response's text."""
    constant = uniform("constant", extra_info["index"]) < json.loads(os.environ[STEP_SETTINGS])["constant"]
    right = float(not constant and uniform("right", solution_str) < 0.5)
    return {"score": right, "acc": right}
