# SPDX-License-Identifier: Apache-2.0
"""Where a decode step goes: its time beside the byte floor, and its kernels by class."""

import statistics

from rich.table import Table

from flashrl_verl.bench.arms import Arm
from flashrl_verl.bench.rollout import Report, RolloutConfig, decode_seconds
from flashrl_verl.bench.rollout_report import NOT_MEASURABLE, Prediction, words

BETWEEN = "no kernel"
"""What is left of a step without its kernels: gaps between them, and waiting for the host."""


def columns(report: Report) -> list[str]:
    """Of ``rows``; classes of kernels that no profile has are left out. Empty where nothing was recorded."""
    found = [t.profile["milliseconds"] for r in report.results for t in r.answer.timings if t.profile is not None]
    classes = [name for name in (found[0] if found else {}) if any(part[name] > 0 for part in found)]
    return ["work", "arm", "context", "step ms", "floor ms", "floor / step", *classes, BETWEEN] if found else []


def rows(config: RolloutConfig, report: Report) -> list[list[str]]:
    """A row of ``columns`` for every work and arm that was recorded. The step is the mean over the rollout, without
    the profiler; its kernels, milliseconds, are those of steps in the middle of the rollout, with it."""
    prediction, found = Prediction(config, report), []
    for work in config.works:
        for arm in config.arms:
            timing = report.timing(arm, work)
            if timing is not None and timing.profile is not None:
                step = 1e3 * statistics.median(decode_seconds(timing)) / (work.response - 1)
                found.append([words(work), str(arm), *_row(prediction, arm, step, timing.profile, columns(report)[6:-1])])
    return found


def _row(prediction: Prediction, arm: Arm, step: float, profile: dict, classes: list[str]) -> list[str]:
    parts = [profile["milliseconds"][name] for name in classes]
    floor = prediction.floor_seconds(arm, profile["sequences"], profile["context"])
    measured = step > 0
    return [
        f"{profile['context']:.0f}",
        f"{step:.2f}" if measured else NOT_MEASURABLE,
        "-" if floor is None else f"{1e3 * floor:.2f}",
        "-" if floor is None or not measured else f"{1e3 * floor / step:.0%}",
        *(f"{part:.2f}" for part in parts),
        f"{step - sum(profile['milliseconds'].values()):.2f}" if measured else NOT_MEASURABLE,
    ]


def table(config: RolloutConfig, report: Report) -> Table | None:
    """The rows; None where nothing was recorded."""
    names = columns(report)
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
