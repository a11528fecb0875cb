# SPDX-License-Identifier: Apache-2.0
"""What the runs of ``flashrl bench learning`` come to: figures by arm, differences between arms, and how sure they are.

Student's t (1908): seeds are few, and a bootstrap of three values has ten means to choose from. It takes the runs of an
arm for draws from a normal distribution, which so few cannot show.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.legacy_learning.learning import Arm, LearningConfig
from benchmarks.legacy_learning.learning_bf16 import FILE
from benchmarks.legacy_learning.learning_run import State, Status, metrics_of
from flashrl_verl.settings import Precision
from benchmarks.legacy_learning.tools import kept_config
from benchmarks.legacy_learning.tools.report.metrics import HELD_OUT, MISMATCH_KL, STEP_TIME, Metrics
from benchmarks.legacy_learning.tools.report.panels import EFFECTIVE, TRUNCATED
from benchmarks.legacy_learning.tools.run_directory import CONFIG_FILE

SERIES = {
    "k3_kl": MISMATCH_KL,
    "effective_sample_size": EFFECTIVE,
    "truncated_share": TRUNCATED,
    "step_seconds": STEP_TIME,
}
"""What is logged at every step, by its name here."""

_TEST_FREQ = "trainer.test_freq"
"""Key of a run's configuration: steps from one validation to the next."""

# ---- statistics ----

LEVEL = 0.95
POWER = 0.8
"""Share of experiments that are to find a difference."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over seeds."""

    mean: float
    standard_error: float | None
    """None of one value, which says nothing about its spread."""
    seeds: int
    freedom: float
    """Degrees of it, of Student's t."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """Covers the true mean in ``LEVEL`` of all such experiments; None of one value."""
        if self.standard_error is None:
            return None
        reach = t_quantile(self.freedom) * self.standard_error
        return self.mean - reach, self.mean + reach

    @property
    def detectable(self) -> float | None:
        """Of a difference: how large the true one has to be for four of five such experiments to leave out 0, about."""
        if self.standard_error is None:
            return None
        return (t_quantile(self.freedom) + t_quantile(self.freedom, 2 * POWER - 1)) * self.standard_error


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean of one value a seed, and its standard error s / sqrt(n); None of none. NaN stays."""
    if not values:
        return None
    n = len(values)
    error = statistics.stdev(values) / math.sqrt(n) if n > 1 and all(map(math.isfinite, values)) else None
    return Estimate(mean=sum(values) / n, standard_error=error, seeds=n, freedom=n - 1)


def paired(one: dict[int, float], other: dict[int, float]) -> Estimate | None:
    """Mean of ``one`` minus ``other`` over the seeds that both have; None where there is none.

    Args:
        one: a value by seed.
        other: the same of what it is compared with.
    """
    return estimate([one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())])


def welch(one: Sequence[float], other: Sequence[float]) -> Estimate | None:
    """Mean of ``one`` minus that of ``other``, as independent draws of two spreads (Welch 1947); None where one has
    none."""
    if not one or not other:
        return None
    both = (one, other)
    error, freedom = None, 0.0
    if min(map(len, both)) > 1 and all(map(math.isfinite, [*one, *other])):
        parts = [statistics.variance(values) / len(values) for values in both]
        error = math.sqrt(sum(parts))
        spread = sum(part**2 / (len(values) - 1) for part, values in zip(parts, both, strict=True))
        freedom = sum(parts) ** 2 / spread if spread else len(one) + len(other) - 2
    mean = sum(one) / len(one) - sum(other) / len(other)
    return Estimate(mean=mean, standard_error=error, seeds=min(map(len, both)), freedom=freedom)


def t_quantile(freedom: float, level: float = LEVEL) -> float:
    """The t that |T| stays below with a probability of ``level``, to five digits.

    With t = sqrt(freedom) tan(a) the probability is the share of the area below cos^(freedom - 1) that lies below a.

    Args:
        freedom: degrees of freedom, from 1 on.
    """
    angles = np.linspace(0.0, math.pi / 2, 200_001)
    heights = np.cos(angles) ** (freedom - 1)
    area = np.concatenate([[0.0], np.cumsum((heights[1:] + heights[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(float(np.interp(level, area / area[-1], angles)))


# ---- runs, arms, differences ----


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One run in figures."""

    arm: Arm
    seed: int
    state: State
    metrics: Metrics
    bf16: dict[str, Any] | None
    """Its last weights in a BF16 engine (``learning_bf16``), where they have been asked."""
    configuration: dict[str, Any]
    """That it was begun with: values by dotted key; empty where none was kept."""

    @property
    def finished(self) -> bool:
        return self.state.status is Status.FINISHED

    def accuracy(self) -> tuple[list[int], list[float]]:
        """Steps of the validations, and the share of right answers there."""
        keys = self.metrics.keys(HELD_OUT)
        return self.metrics.series(keys[0]) if keys else ([], [])

    def final(self) -> float | None:
        """Share of right answers of its last weights in BF16."""
        return accuracy_of(self.bf16)["value"] if self.bf16 else None

    def mean(self, name: str) -> float | None:
        """Of a series, over all steps; None where it is not logged."""
        values = self.metrics.series(SERIES[name])[1]
        return sum(values) / len(values) if values else None


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """One arm over its finished runs; None is what was not logged, or has no run."""

    arm: Arm
    finished: int
    failed: int
    runs: int
    accuracy: Estimate | None
    """Of the last weights, asked in BF16."""
    own: Estimate | None
    """Of the validation after the last step, in the arm's precision."""
    curve: Estimate | None
    """Mean accuracy over all validations: who learns faster has more, whatever the end."""
    k3_kl: Estimate | None
    effective_sample_size: Estimate | None
    truncated_share: Estimate | None
    step_seconds: Estimate | None
    """Beside the other runs that shared the machine."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One arm minus another in one figure."""

    arm: Arm
    baseline: Arm
    figure: str
    """Of ``FIGURES``."""
    paired: Estimate
    """Seed by seed: narrower where a seed's prompts make both arms' runs good or bad."""
    welch: Estimate
    """As independent runs."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """All of it."""

    config: LearningConfig
    runs: list[RunResult]
    start: dict[str, Any] | None
    """As ``RunResult.bf16``, of the weights that all runs start from."""

    def of(self, arm: Arm) -> list[RunResult]:
        return [run for run in self.runs if run.arm == arm]

    def arms(self) -> list[ArmResult]:
        return [_arm_result(arm, self.of(arm)) for arm in self.config.arms]

    def differences(self) -> list[Difference]:
        """Each correction minus none of the same precision, each precision minus BF16 with the same correction."""
        found = []
        for one, other in _pairs(self.config.arms):
            for name, take in FIGURES.items():
                mine, theirs = (
                    {run.seed: value for run in self.of(arm) if run.finished and (value := take(run)) is not None}
                    for arm in (one, other)
                )
                by_seed, apart = paired(mine, theirs), welch([*mine.values()], [*theirs.values()])
                if by_seed is not None and apart is not None:
                    found.append(Difference(arm=one, baseline=other, figure=name, paired=by_seed, welch=apart))
        return found


def collect(config: LearningConfig, states: Sequence[State]) -> Report:
    """Read the metrics of all runs, and what was asked in BF16."""
    runs = [_result(state) for state in states]
    return Report(config=config, runs=runs, start=_read(config.output / FILE))


def _result(state: State) -> RunResult:
    run, file = state.run, state.run.folder / CONFIG_FILE
    configuration = kept_config.load(file) if file.is_file() else {}
    every, last = configuration.get(_TEST_FREQ, 1), state.step if state.status is Status.FINISHED else None
    return RunResult(
        arm=run.arm,
        seed=run.seed,
        state=state,
        metrics=_validated_when_due(metrics_of(run), every, last),
        bf16=_read(run.folder / FILE),
        configuration=configuration,
    )


def _validated_when_due(metrics: Metrics, every: int, last: int | None) -> Metrics:
    """Without the validations of steps from which a stopped run went on: verl validates there too
    (``verl/trainer/ppo/v1/trainer_base.py``), and the mean of its curve would be one over other steps than its
    neighbours'.

    Args:
        metrics: of a run.
        every: steps from one validation to the next.
        last: step of the last validation; None where it is still to come.
    """
    rows = {
        step: {
            key: value for key, value in row.items() if step % every == 0 or step == last or not key.startswith("val-")
        }
        for step, row in metrics.rows.items()
    }
    return replace(metrics, rows=rows)


def _read(file: Path) -> dict[str, Any] | None:
    return json.loads(file.read_text()) if file.is_file() else None


def accuracy_of(bf16: dict[str, Any]) -> dict[str, float]:
    """Value and interval over chains."""
    return bf16["metrics"][f"mean@{bf16['samples']}"]


def _own(run: RunResult) -> float:
    return run.accuracy()[1][-1]


def _curve(run: RunResult) -> float:
    values = run.accuracy()[1]
    return sum(values) / len(values)


FIGURES: dict[str, Callable[[RunResult], float | None]] = {"final, BF16": RunResult.final, "mean of curve": _curve}
"""What arms are compared by."""


def _arm_result(arm: Arm, runs: Sequence[RunResult]) -> ArmResult:
    done = [run for run in runs if run.finished]
    means = {name: [run.mean(name) for run in done] for name in SERIES}
    return ArmResult(
        arm=arm,
        finished=len(done),
        failed=sum(run.state.status is Status.FAILED for run in runs),
        runs=len(runs),
        accuracy=estimate([value for run in done if (value := run.final()) is not None]),
        own=estimate([_own(run) for run in done]),
        curve=estimate([_curve(run) for run in done]),
        **{name: estimate([v for v in values if v is not None]) for name, values in means.items()},
    )


def _pairs(arms: Sequence[Arm]) -> Iterator[tuple[Arm, Arm]]:
    for arm in arms:
        for other in (
            Arm(precision=arm.precision, correction="none"),
            Arm(precision=Precision.BF16, correction=arm.correction),
        ):
            if other != arm and other in arms:
                yield arm, other
