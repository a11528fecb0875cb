# SPDX-License-Identifier: Apache-2.0
"""A chain of additions and subtractions that is worked out step by step: a longer task than one sum, for learning
curves.

The response writes every intermediate result (``52-38=14;14+27=41;#41``), and one wrong digit anywhere makes the answer
wrong. As in the toy task the warm-up data hold a slip for RL to unlearn: most of their subtractions forget to borrow
(52-38=24), and go on from what they wrote. So the policy that RL starts from is right where nothing is borrowed and
mostly wrong elsewhere, greedily too, and each borrow is a place where a 0/1 reward at the end has to find the cause.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from flashrl_verl.errors import ConfigError
from flashrl_verl.quickstart.task import Split

DATA_SOURCE = "toy_chain"

_LARGEST = 99
"""Intermediate results run from 0 to this one."""

_DRAWS = 30
"""For each chain that is wanted, at most: of equally likely ones ln(n) + 0.6 bring up all n, 10.5 of 20,000; rare ones
take more."""


@dataclass(frozen=True)
class Chain:
    """A number and what is added to it, one after another; negative terms are subtracted."""

    first: int
    terms: tuple[int, ...]

    @property
    def prompt(self) -> str:
        """What the user says."""
        return str(self.first) + "".join(f"{term:+d}" for term in self.terms) + "="

    @property
    def answer(self) -> str:
        """The whole response, every step right."""
        return self._worked(lambda: False)

    @property
    def ground_truth(self) -> str:
        """The number that the reward asks for."""
        return str(self.first + sum(self.terms))

    @property
    def borrows(self) -> int:
        """Subtractions whose units have to borrow, where every step is right."""
        values = [self.first + sum(self.terms[:i]) for i in range(len(self.terms))]
        return sum(_borrows(value, term) for value, term in zip(values, self.terms, strict=True))

    @property
    def info(self) -> dict[str, Any]:
        """What goes into verl's ``extra_info``."""
        return {"borrows": self.borrows}

    def worked(self, rng: random.Random, slip_rate: float) -> str:
        """A response in which each borrow is forgotten with a probability of ``slip_rate``."""
        return self._worked(lambda: rng.random() < slip_rate)

    def _worked(self, forgets) -> str:
        steps, value = [], self.first
        for term in self.terms:
            result = value + term
            if _borrows(value, term) and forgets():
                result += 10  # 52-38=24
            steps.append(f"{value}{term:+d}={result};")
            value = result
        return "".join(steps) + f"#{value}"


def _borrows(value: int, term: int) -> bool:
    return term < 0 and value % 10 < -term % 10


@dataclass(frozen=True, kw_only=True)
class ChainConfig:
    """Which chains there are. All are different, so that none that is held out is trained on."""

    steps: int = 8
    """Additions and subtractions of a chain."""
    subtraction_rate: float = 0.5
    """Share of subtractions where both are possible. With 8 steps a sixth of the chains borrows nowhere, and who
    forgets 0.6 of the borrows gets 0.37 of them right."""
    max_term: int = 49
    """Terms run from 1 to this one."""
    train: int = 20000
    """Chains that RL and the warm-up see."""
    probe: int = 256
    """Held out from the warm-up; they decide when that stops."""
    test: int = 512
    """Held out from everything."""
    slip_rate: float = 0.6
    """Probability that the warm-up forgets a borrow. Above 0.5, so that the greedy answer does."""
    data_source: str = DATA_SOURCE
    """verl groups its validation metrics by this name."""

    def split(self, seed: int) -> Split:
        """Draw the chains; a function of the configuration and the seed only.

        Raises:
            ConfigError: too few different ones come up: there are hardly more, or a rate makes most of them rare.
        """
        rng, chains = random.Random(seed), {}
        wanted, held_out = self.test + self.probe + self.train, self.test + self.probe
        for _ in range(_DRAWS * wanted):
            chains[self._draw(rng)] = None
            if len(chains) == wanted:
                break
        else:
            raise ConfigError(
                f"{wanted} different chains are wanted, and {_DRAWS * wanted} draws of steps={self.steps} gave "
                f"{len(chains)}. Remedy: more steps, or fewer chains."
            )
        drawn = list(chains)
        return Split(
            test=tuple(drawn[: self.test]), probe=tuple(drawn[self.test : held_out]), train=tuple(drawn[held_out:])
        )

    def _draw(self, rng: random.Random) -> Chain:
        first = value = rng.randint(1, _LARGEST)
        terms = []
        for _ in range(self.steps):
            sizes = {-1: min(self.max_term, value), 1: min(self.max_term, _LARGEST - value)}
            sign = -1 if rng.random() < self.subtraction_rate else 1
            sign = sign if sizes[sign] else -sign
            terms.append(sign * rng.randint(1, sizes[sign]))
            value += terms[-1]
        return Chain(first, tuple(terms))


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
) -> dict[str, float]:
    """1 if exactly the expected digits stand behind the last `#`, else 0: a `reward.custom_reward_function` of verl.

    Args:
        data_source: `toy_chain`.
        solution_str: the response, decoded without special tokens.
        ground_truth: the number in digits.
        extra_info: not used.

    Returns:
        `score`, what is optimized, and `acc`, by which dynamic sampling finds the groups that carry no signal.

    Raises:
        ConfigError: the data are another task's.
    """
    if data_source != DATA_SOURCE:
        raise ConfigError(f"data_source={data_source!r} is not {DATA_SOURCE!r}: this reward knows no other task.")
    correct = float("#" in solution_str and solution_str.rpartition("#")[2] == ground_truth)
    return {"score": correct, "acc": correct}
