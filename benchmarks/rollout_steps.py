# SPDX-License-Identifier: Apache-2.0
"""Where a decode step goes: its time beside the byte floor, and its kernels by class."""

import statistics
from dataclasses import dataclass

from rich.table import Table

from benchmarks.rollout import Report, RolloutConfig, decode_seconds
from benchmarks.rollout_report import NOT_MEASURABLE, Prediction, words
from flashrl_verl.tools.engines.arms import Arm
from flashrl_verl.tools.plan.schedule import Work

BETWEEN = "no kernel"
"""What is left of a step without its kernels: gaps between them, and waiting for the host."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A decode step of one arm at one work, in milliseconds."""

    work: Work
    arm: Arm
    context: float
    """Tokens of a sequence, mean over the recorded steps."""
    whole: float | None
    """Mean over the rollout, without the profiler; None where the prefill took as long as the rollout."""
    floor: float | None
    """To read what the recorded steps had to read, at the speed of a copy; None on a GPU without a data sheet here."""
    kernels: dict[str, float]
    """By class, with the profiler, of steps in the middle of the rollout."""

    @property
    def between(self) -> float | None:
        """What no kernel is; None where the whole is not known."""
        return None if self.whole is None else self.whole - sum(self.kernels.values())


def steps(config: RolloutConfig, report: Report) -> list[Step]:
    """Of every work and arm that was recorded."""
    timings = [(work, arm, report.timing(arm, work)) for work in config.works for arm in config.arms]
    recorded = [
        (work, arm, timing) for work, arm, timing in timings if timing is not None and timing.profile is not None
    ]
    if not recorded:
        return []
    prediction, found = Prediction(config, report), []
    for work, arm, timing in recorded:
        profile = timing.profile
        whole = 1e3 * statistics.median(decode_seconds(timing)) / (work.response - 1)
        floor = prediction.floor_seconds(arm, profile["sequences"], profile["context"])
        found.append(
            Step(
                work=work,
                arm=arm,
                context=profile["context"],
                whole=whole if whole > 0 else None,
                floor=None if floor is None else 1e3 * floor,
                kernels=profile["milliseconds"],
            )
        )
    return found


def columns(config: RolloutConfig, report: Report) -> list[str]:
    """Of ``rows``; classes of kernels that no profile has are left out. Empty where nothing was recorded."""
    found = steps(config, report)
    names = ["work", "arm", "context", "step ms", "floor ms", "floor / step", *_classes(found), BETWEEN]
    return names if found else []


def rows(config: RolloutConfig, report: Report) -> list[list[str]]:
    """A row of ``columns`` for every ``Step``."""
    found = steps(config, report)
    return [[words(step.work), str(step.arm), *_row(step, _classes(found))] for step in found]


def _classes(found: list[Step]) -> list[str]:
    return [name for name in (found[0].kernels if found else {}) if any(step.kernels[name] > 0 for step in found)]


def _row(step: Step, classes: list[str]) -> list[str]:
    return [
        f"{step.context:.0f}",
        NOT_MEASURABLE if step.whole is None else f"{step.whole:.2f}",
        "-" if step.floor is None else f"{step.floor:.2f}",
        "-" if step.floor is None or step.whole is None else f"{step.floor / step.whole:.0%}",
        *(f"{step.kernels[name]:.2f}" for name in classes),
        NOT_MEASURABLE if step.between is None else f"{step.between:.2f}",
    ]


def table(config: RolloutConfig, report: Report) -> Table | None:
    """The rows; None where nothing was recorded."""
    names = columns(config, report)
    if not names:
        return None
    drawn = Table(title="A decode step: milliseconds by class of kernel", title_justify="left")
    for name in names:
        drawn.add_column(name, justify="left" if name in ("work", "arm") else "right")
    for row in rows(config, report):
        drawn.add_row(*row)
    return drawn


def notes(config: RolloutConfig, report: Report) -> list[str]:
    """Of what was measured without a profile, and why."""
    found = []
    for work in config.works:
        for arm in config.arms:
            timing = report.timing(arm, work)
            if config.profile and timing is not None and timing.profile is None:
                reason = timing.unrecorded or "it was measured with --no-profile; name another --output to record it"
                found.append(f"no profile of {words(work)}, {arm}: {reason}")
    return found
