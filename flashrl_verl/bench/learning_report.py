# SPDX-License-Identifier: Apache-2.0
"""Tables, JSON and curves of ``flashrl bench learning``."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from flashrl_verl.bench.learning import Arm, LearningConfig, environment, shared
from flashrl_verl.bench.learning_state import State, Status, metrics_of
from flashrl_verl.bench.learning_statistics import Estimate, estimate, paired
from flashrl_verl.config import Precision
from flashrl_verl.report.metrics import HELD_OUT, MISMATCH_KL, STEP_TIME, Metrics
from flashrl_verl.report.panels import EFFECTIVE, TRUNCATED
from flashrl_verl.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator

DATA_FILE, PICTURE_FILE = "learning.json", "learning.png"

SERIES = {"k3_kl": MISMATCH_KL, "effective_sample_size": EFFECTIVE, "truncated_share": TRUNCATED, "step_seconds": STEP_TIME}
"""What is logged at every step, by its name here."""

_POINTS = 100
"""Of a series in the JSON, at most: longer ones are means over equal stretches of steps."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One run in figures."""

    arm: Arm
    seed: int
    state: State
    metrics: Metrics

    @property
    def finished(self) -> bool:
        return self.state.status is Status.FINISHED

    def accuracy(self) -> tuple[list[int], list[float]]:
        """Steps of the validations, and the share of right answers there."""
        keys = self.metrics.keys(HELD_OUT)
        return self.metrics.series(keys[0]) if keys else ([], [])

    def mean(self, name: str) -> float | None:
        """Of a series, over all steps; None where it is not logged."""
        values = self.metrics.series(SERIES[name])[1]
        return sum(values) / len(values) if values else None


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """One arm over its finished runs; None is what was not logged, or has no run."""

    arm: Arm
    finished: int
    runs: int
    accuracy: Estimate | None
    """Of the validation after the last step."""
    curve: Estimate | None
    """Mean accuracy over all validations: who learns faster has more, whatever the end."""
    k3_kl: Estimate | None
    effective_sample_size: Estimate | None
    truncated_share: Estimate | None
    step_seconds: Estimate | None
    """Beside the other runs that shared the machine."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One arm minus another, seed by seed."""

    arm: Arm
    baseline: Arm
    accuracy: Estimate
    curve: Estimate


@dataclass(frozen=True, kw_only=True)
class Report:
    """All of it."""

    config: LearningConfig
    runs: list[RunResult]

    def of(self, arm: Arm) -> list[RunResult]:
        return [run for run in self.runs if run.arm == arm]

    def arms(self) -> list[ArmResult]:
        return [_arm_result(arm, self.of(arm)) for arm in self.config.arms]

    def differences(self) -> list[Difference]:
        """Each correction minus none of the same precision, each precision minus BF16 with the same correction."""
        found = []
        for one, other in _pairs(self.config.arms):
            theirs, mine = ({run.seed: run for run in self.of(arm) if run.finished} for arm in (other, one))
            final, curve = (
                paired(*({seed: take(run) for seed, run in runs.items()} for runs in (mine, theirs)))
                for take in (_final, _curve)
            )
            if final is not None and curve is not None:
                found.append(Difference(arm=one, baseline=other, accuracy=final, curve=curve))
        return found


def collect(config: LearningConfig, states: Sequence[State]) -> Report:
    """Read the metrics of all runs."""
    runs = [RunResult(arm=s.run.arm, seed=s.run.seed, state=s, metrics=metrics_of(s.run)) for s in states]
    return Report(config=config, runs=runs)


def _final(run: RunResult) -> float:
    return run.accuracy()[1][-1]


def _curve(run: RunResult) -> float:
    values = run.accuracy()[1]
    return sum(values) / len(values)


def _arm_result(arm: Arm, runs: Sequence[RunResult]) -> ArmResult:
    done = [run for run in runs if run.finished]
    means = {name: [run.mean(name) for run in done] for name in SERIES}
    return ArmResult(
        arm=arm,
        finished=len(done),
        runs=len(runs),
        accuracy=estimate([_final(run) for run in done]),
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


# ---- tables ----


def tables(report: Report) -> list[Table]:
    """One line an arm; one line a difference, where there is any."""
    device = environment(report.config.hardware)["device"]
    arms = Table(title=f"Learning on {device}: means of finished runs", title_justify="left")
    columns = ("finished", "final accuracy", "mean of the curve", "k3 KL", "ESS", "truncated", "s/step", "steps/hour")
    for name in ("arm", *columns):
        arms.add_column(name, justify="left" if name == "arm" else "right")
    for result in report.arms():
        hourly = result.step_seconds and result.step_seconds.mean
        arms.add_row(
            str(result.arm),
            f"{result.finished}/{result.runs}",
            _with_error(result.accuracy),
            _with_error(result.curve),
            _mean(result.k3_kl, ".2e"),
            _mean(result.effective_sample_size, ".4f"),
            _mean(result.truncated_share, ".2g"),
            _mean(result.step_seconds, ".2f"),
            f"{3600 / hourly:.0f}" if hourly else "-",
        )
    found = report.differences()
    if not found:
        return [arms]
    pairs = Table(title="Differences, seed by seed (95 % interval, Student's t)", title_justify="left")
    for name in ("arm", "minus", "seeds", "final accuracy", "mean of the curve"):
        pairs.add_column(name, justify="left" if name in ("arm", "minus") else "right")
    for pair in found:
        words = (str(pair.arm), str(pair.baseline), str(pair.accuracy.seeds))
        pairs.add_row(*words, _with_interval(pair.accuracy), _with_interval(pair.curve))
    return [arms, pairs]


def notes(report: Report) -> list[str]:
    """How to read the tables, and what went wrong."""
    others = report.config.parallel - 1
    lines = [
        "accuracy: sampled at temperature 1 from the rollout's own engine, in the arm's precision (docs/evaluation.md); means "
        "over seeds, with one standard error. Seconds: checkpoints included"
        + (f", of runs that share the machine with up to {others} more." if others else ".")
    ]
    if len(report.differences()) > 1:
        lines.append(
            f"{len(report.differences())} differences: where nothing differs, one interval in twenty leaves out 0 all the "
            "same; one that holds 0 is no proof of equality."
        )
    for run in report.runs:
        if run.state.error and not run.finished:
            times = f"failed {run.state.failures} times" if run.state.failures > 1 else "failed once"
            lines.append(f"{run.state.run.name} {times}: {' '.join(run.state.error)}")
    return lines


def _mean(value: Estimate | None, form: str) -> str:
    return "-" if value is None else format(value.mean, form)


def _with_error(value: Estimate | None) -> str:
    if value is None:
        return "-"
    return f"{value.mean:.3f}" + ("" if value.standard_error is None else f" ± {value.standard_error:.3f}")


def _with_interval(value: Estimate) -> str:
    if value.interval is None:
        return f"{value.mean:+.3f}"
    low, high = value.interval
    return f"{value.mean:+.3f} [{low:+.3f}, {high:+.3f}]"


# ---- files ----


def write(report: Report) -> list[Path]:
    """Write ``learning.json``, and ``learning.png`` where there is anything to draw; returns their paths.

    Raises:
        FlashRLError: matplotlib is not installed; ``learning.json`` is there.
    """
    from flashrl_verl.bench.learning_plot import plot

    data, picture = report.config.output / DATA_FILE, report.config.output / PICTURE_FILE
    write_whole(data, (json.dumps(to_json(report)) + "\n").encode())
    return [data, picture] if plot(report, picture) else [data]


def to_json(report: Report) -> dict[str, Any]:
    """Settings, environment, figures by arm, differences, and every run's series; NaN and infinities as null."""
    return _plain(
        {
            **shared(report.config),
            "steps": report.config.steps,
            "arms": [{**asdict(result), "arm": str(result.arm)} for result in report.arms()],
            "differences": [
                {
                    "arm": str(pair.arm),
                    "minus": str(pair.baseline),
                    **{
                        name: {**asdict(value), "interval": value.interval}
                        for name, value in (("accuracy", pair.accuracy), ("curve", pair.curve))
                    },
                }
                for pair in report.differences()
            ],
            "runs": [_run_json(run) for run in report.runs],
        }
    )


def _run_json(run: RunResult) -> dict[str, Any]:
    series = {"accuracy": run.accuracy()} | {name: thin(*run.metrics.series(key)) for name, key in SERIES.items()}
    return {
        "arm": str(run.arm),
        "seed": run.seed,
        "status": run.state.status.value,
        "step": run.state.step,
        "error": list(run.state.error),
        "series": {name: {"step": steps, "value": values} for name, (steps, values) in series.items()},
    }


def thin(steps: Sequence[int], values: Sequence[float], points: int = _POINTS) -> tuple[list[int], list[float]]:
    """Means of so many neighbours that at most ``points`` are left, each at the last of its steps."""
    width = max(1, math.ceil(len(steps) / points))
    stretches = [slice(start, start + width) for start in range(0, len(steps), width)]
    return [steps[s][-1] for s in stretches], [sum(values[s]) / len(values[s]) for s in stretches]


def _plain(value: Any) -> Any:
    """Floats with four digits, which is more than a seed is worth; what JSON has no word for as null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value
