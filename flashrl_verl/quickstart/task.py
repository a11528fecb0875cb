# SPDX-License-Identifier: Apache-2.0
"""The toy task: add two numbers. Its problems, its split, and the slip that the warm-up teaches for RL to
unlearn.

Why a slip, and not just a short warm-up? A half-trained adder is wrong in many unrelated ways, each of which
costs RL many samples. Here the warm-up data forget the carry of the units in most of their answers
(27+38=55), so that the policy is almost always right without a carry and mostly wrong with one, while the
right answer stays among a handful of samples. That is a policy which a 0/1 reward can mend in a few dozen
updates, and its mistake is one that a person can read.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DATA_SOURCE = "toy_addition"
"""verl groups its validation metrics by this name: `val-core/toy_addition/acc/mean@1`."""


@dataclass(frozen=True)
class Problem:
    """One addition."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        """What the user says."""
        return f"{self.a}+{self.b}="

    @property
    def answer(self) -> str:
        """The sum, in digits."""
        return str(self.a + self.b)

    @property
    def has_carry(self) -> bool:
        """Whether the units add up to ten or more."""
        return self.a % 10 + self.b % 10 >= 10

    @property
    def slip(self) -> str:
        """The sum with the carry of the units forgotten; the right answer where there is none."""
        return str(self.a + self.b - 10 * self.has_carry)

    def worked(self, rng: random.Random, slip_rate: float) -> str:
        """The slip with a probability of `slip_rate`, else the answer."""
        return self.slip if rng.random() < slip_rate else self.answer


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Which problems there are, and how they are shared out."""

    max_operand: int = 49
    """Both numbers run from 0 to this one: 50 x 50 problems, 45 % of them with a carry."""
    test_pairs: int = 64
    """Unordered pairs of different numbers held out for validation, half of them with a carry. Both orders
    are asked: 128 prompts, so that one standard error of an accuracy is 4 points."""
    probe_pairs: int = 96
    """The same for the probe that stops the warm-up; RL does not see these either."""
    slip_rate: float = 0.6
    """Probability that a warm-up label forgets its carry. Above 0.5, so that the greedy answer is the slip;
    far enough below 1 that the right answer is usually among 8 samples."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Disjoint sets of problems: 27+38 and 38+27 are always in the same one, or the test would leak through
    symmetry."""

    train: tuple[Problem, ...]
    probe: tuple[Problem, ...]
    """Held out from the warm-up only; it decides when that stops, so that the test set decides nothing."""
    test: tuple[Problem, ...]


def split_problems(config: TaskConfig, *, seed: int) -> Split:
    """Share out all problems; a function of its arguments only."""
    numbers = range(config.max_operand + 1)
    pairs = [Problem(a, b) for a in numbers for b in numbers if a < b]
    rng = random.Random(seed)
    rng.shuffle(pairs)
    test, probe, train = [], [], [Problem(a, a) for a in numbers]
    # With and without a carry separately: the slip makes the accuracy depend on their shares above all.
    for carry in (False, True):
        stratum = [p for p in pairs if p.has_carry is carry]
        first, second = config.test_pairs // 2, config.test_pairs // 2 + config.probe_pairs // 2
        test += _both_orders(stratum[:first])
        probe += _both_orders(stratum[first:second])
        train += _both_orders(stratum[second:])
    rng.shuffle(train)
    return Split(train=tuple(train), probe=tuple(probe), test=tuple(test))


def _both_orders(problems: Sequence[Problem]) -> list[Problem]:
    return [Problem(*order) for p in problems for order in ((p.a, p.b), (p.b, p.a))]


def verl_rows(problems: Sequence[Problem], *, split: str) -> list[dict[str, Any]]:
    """One row of verl's RL data format for each problem, in order.

    Args:
        problems: what to ask.
        split: `train` or `test`, kept in `extra_info`.
    """
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": problem.prompt}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"split": split, "index": index, "has_carry": problem.has_carry},
        }
        for index, problem in enumerate(problems)
    ]
