# SPDX-License-Identifier: Apache-2.0
"""An engine with an FP8 KV cache that sleeps, is updated and wakes, and how far its output is from before."""

import dataclasses
from pathlib import Path

import torch
from engines import Refit, engine, runner, teacher_forced
from large_values import distance, enlarged
from tiny_models import VOCAB, make, wire


@dataclasses.dataclass
class Distances:
    """Mean k3 to the output of the same policy before it slept, with smaller keys and values."""

    same: list[float]
    """After each sleep, update and waking."""
    forgotten: float
    """After another waking, with scales of 1 for values, as vLLM has them."""


def distances(path: Path, family: str) -> Distances:
    """Let an engine sleep at level 2 and wake, twice, with an update in between that makes keys and values far larger."""
    weights = wire(make(family, seed=5))
    make(family).config.save_pretrained(path)
    sequences = torch.randint(3, VOCAB, (16, 40), generator=torch.Generator().manual_seed(1)).tolist()
    same = []
    with engine(path, {"precision": "int8", "kv_cache": "fp8"}, compiled=True, enable_sleep_mode=True) as llm:
        refit = Refit(llm)
        refit(weights, step=0)
        reference = teacher_forced(llm, sequences)
        for step in (1, 2):
            llm.sleep(level=2)
            llm.wake_up(tags=["weights"])
            refit(enlarged(weights), step=step)
            llm.wake_up(tags=["kv_cache"])
            refit.account.kv_scales.restore()  # as the server does, after the same calls
            refit.account.kv_scales.live()
            same.append(distance(llm, sequences, reference))
        for layer in runner(llm).model.modules():
            if hasattr(layer, "_v_scale"):
                layer._v_scale.fill_(1.0)
        llm.reset_prefix_cache()
        return Distances(same, distance(llm, sequences, reference))
