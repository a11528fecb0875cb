# SPDX-License-Identifier: Apache-2.0
"""The toy task: add two numbers. Its problems, its split, its reward, and the slip that the warm-up teaches for RL to
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
from typing import Any, NamedTuple

DATA_SOURCE = "toy_addition"
"""verl groups its validation metrics by this name: `val-core/toy_addition/acc/mean@1`."""

NUMBERS = range(50)
"""Both numbers: 50 x 50 problems, 45 % of them with a carry."""
TEST_PAIRS = 64
"""Unordered pairs of different numbers held out for validation, half of them with a carry. Both orders are asked: 128
prompts, so that one standard error of an accuracy is 4 points."""
PROBE_PAIRS = 96
"""The same for the probe that stops the warm-up; RL does not see these either."""
SLIP_RATE = 0.6
"""Probability that a warm-up label forgets its carry. Above 0.5, so that the greedy answer is the slip; far enough
below 1 that the right answer is usually among 8 samples."""


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


class Split(NamedTuple):
    """Disjoint sets of problems: 27+38 and 38+27 are always in the same one, or the test would leak through
    symmetry."""

    train: list[Problem]
    probe: list[Problem]
    """Held out from the warm-up only; it decides when that stops, so that the test set decides nothing."""
    test: list[Problem]


def split_problems(seed: int) -> Split:
    """Share out all problems; a function of the seed only."""
    pairs = [Problem(a, b) for a in NUMBERS for b in NUMBERS if a < b]
    rng = random.Random(seed)
    rng.shuffle(pairs)
    split = Split(train=[Problem(a, a) for a in NUMBERS], probe=[], test=[])
    # With and without a carry separately: the slip makes the accuracy depend on their shares above all.
    for carry in (False, True):
        stratum = [p for p in pairs if p.has_carry is carry]
        for number, pair in enumerate(stratum):
            held_out = split.probe if number < (TEST_PAIRS + PROBE_PAIRS) // 2 else split.train
            part = split.test if number < TEST_PAIRS // 2 else held_out
            part += [pair, Problem(pair.b, pair.a)]
    rng.shuffle(split.train)
    return split


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    """The reward, in the form of verl's `reward.custom_reward_function`: 1 for exactly the expected digits, else 0.

    Returns:
        `score`, what is optimized, and `acc`, by which dynamic sampling finds the groups that carry no signal.
    """
    correct = float(solution_str == ground_truth)
    return {"score": correct, "acc": correct}


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
