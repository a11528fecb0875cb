# SPDX-License-Identifier: Apache-2.0
"""A whole step of RL: the rollout, and what the trainer does around it on the same GPUs (verl's hybrid engine)."""

import math
from dataclasses import dataclass

from flashrl_verl.tools.plan.gpus import GPU
from flashrl_verl.tools.plan.memory import BF16
from flashrl_verl.tools.plan.shape import ModelShape

PRODUCTS = 0.55
"""Share of the data sheet's BF16 operations that the trainer's matrix products reach, with all that is neither product
nor attention in their time. This and the next are fitted to ``python -m benchmarks.training`` with layers of
Qwen2.5-32B on H100s and H200s (docs/results/step.md). Nothing is communicated there: shards that arrive too late for
their layer take longer."""

ATTENTION = {False: (0.33, 0.28), True: (0.6, 0.52)}
"""The same share of attention, in old log-probs and in the update: FlashAttention 2, and FlashAttention 4."""

LIGER = 1.13
"""How many times as fast the products' part is with Liger's kernels."""

PASSES = 4
"""Forward passes that an update takes as long as: one, its repetition (gradient checkpointing), and a backward pass of
two. The head is not repeated, which is 0.6 % of 32 billion parameters' operations."""

SURPLUS = 1.79
"""Informative groups that ``flashrl.sampling.refill`` generates and does not use, in standard deviations of how many of
those that it starts are informative, which is the root of constant groups x groups used. It is 5 % of 512 and 20 % of
32, with 40 % constant. On verl's buffer with simulated engines it is 1.5 to 2.0 (tests/unit/test_refill.py). verl's
surplus is about the share of constant groups: 13 to 20 % at 20, 29 to 38 % at 40."""

WAITS = 1.05
"""How much longer an update takes where ranks wait for each other in each mini-batch, as in verl's order. Simulated
with 4 ranks: 4.5 to 5.5 %."""

REFIT_RATE = 6e9
"""Bytes/s from the trainer's shards to an engine's weights. Assumed: 3.6 GB took 0.36 to 0.55 s on one H200
(benchmarks/results/step/qwen2.5-1.5b-h200.json). Nothing crosses a network there."""


@dataclass(frozen=True, kw_only=True)
class Levers:
    """What a step costs beside number formats: the run's own settings. With all of them off it is stock verl."""

    constant: float = 0.0
    """Share of groups whose responses all score the same, which dynamic sampling replaces."""
    refill: bool = True
    """``flashrl.sampling.refill``."""
    even_mini_batches: bool = True
    """``flashrl.sampling.even_mini_batches``."""
    flash_attention_4: bool = False
    """``pip install flash-attn-4``, from Hopper on."""
    liger: bool = False
    """``actor_rollout_ref.model.use_liger``."""
    asynchronous: bool = False
    """``trainer.v1.trainer_mode=flashrl_colocate_async``: long responses end beside the next batch's."""

    def started(self, groups: float) -> float:
        """Groups that are generated for one that is used, where a batch has so many."""
        if self.asynchronous or not self.constant:  # what a step does not need is the next one's
            return 1 / (1 - self.constant)
        return (1 + (SURPLUS * math.sqrt(self.constant / groups) if self.refill else self.constant)) / (
            1 - self.constant
        )


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


def whole_step(
    shape: ModelShape, gpu: GPU, gpus: int, rollout: float, tokens: float, length: float, levers: Levers
) -> WholeStep:
    """Seconds of a step.

    Args:
        shape: the model's.
        gpu: kind of the GPUs.
        gpus: of the trainer, which are those of all engines.
        rollout: seconds of the rollout.
        tokens: of the whole batch, prompts included.
        length: tokens of a sequence, the mean over tokens.
        levers: of the run.
    """
    peak = gpus * gpu.bf16
    attention = shape.attention_operations(tokens, length) / peak
    products = forward_operations(shape, tokens, length) / peak - attention
    products /= PRODUCTS * (LIGER if levers.liger else 1.0)
    log_probs, update = (products + attention / share for share in ATTENTION[levers.flash_attention_4])
    waits = 1.0 if levers.even_mini_batches else WAITS
    return WholeStep(
        rollout=rollout, log_probs=log_probs, update=PASSES * update * waits, refit=shape.sent * BF16 / REFIT_RATE
    )
