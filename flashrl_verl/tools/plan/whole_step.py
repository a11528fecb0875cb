# SPDX-License-Identifier: Apache-2.0
"""A whole step of RL: the rollout, and what the trainer does around it on the same GPUs (verl's hybrid engine)."""

from dataclasses import dataclass

from flashrl_verl.tools.plan.gpus import GPU
from flashrl_verl.tools.plan.memory import BF16
from flashrl_verl.tools.plan.shape import ModelShape

FORWARD = 0.58
"""Share of the data sheet's BF16 operations that old log-probs reach: ``python -m benchmarks.training`` with layers of
Qwen2.5-32B on one H200 (docs/results/step.md). Nothing is communicated there: shards that arrive too late for their
layer take longer."""

UPDATE = 0.59
"""The same share for the policy's update, likewise, with gradient checkpointing and without the optimizer's step."""

PASSES = 4
"""Forward passes that an update takes as long as: one, its repetition (gradient checkpointing), and a backward pass of
two. The head is not repeated, which is 0.6 % of 32 billion parameters' operations."""

REFIT_RATE = 6e9
"""Bytes/s from the trainer's shards to an engine's weights. Assumed: gathering and sending 0.72 GB took 52 and 68 ms on
one H200 (docs/results/recipe.md). There tensors are small, which costs; and nothing crosses a network, which does
not."""


@dataclass(frozen=True, kw_only=True)
class WholeStep:
    """Seconds of one step, by part. Rewards, advantages and what waits for the longest response are not in it."""

    rollout: float
    log_probs: float
    """Of the policy before the update, over all tokens."""
    update: float
    refit: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.rollout + self.log_probs + self.update + self.refit


def forward_operations(shape: ModelShape, tokens: float, length: float) -> float:
    """Floating-point operations of a forward pass.

    Args:
        shape: the model's.
        tokens: in all.
        length: tokens of each sequence.
    """
    return 2 * tokens * (shape.active + shape.head) + shape.attention_operations(tokens, length)


def whole_step(shape: ModelShape, gpu: GPU, gpus: int, rollout: float, sequences: int, length: int) -> WholeStep:
    """Seconds of a step.

    Args:
        shape: the model's.
        gpu: kind of the GPUs.
        gpus: of the trainer, which are those of all engines.
        rollout: seconds of the rollout.
        sequences: of the whole batch.
        length: tokens of each, prompt included.
    """
    forward = forward_operations(shape, sequences * length, length) / (gpus * gpu.bf16)
    return WholeStep(
        rollout=rollout,
        log_probs=forward / FORWARD,
        update=PASSES * forward / UPDATE,
        refit=shape.sent * BF16 / REFIT_RATE,
    )
