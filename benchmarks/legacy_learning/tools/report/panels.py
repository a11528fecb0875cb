# SPDX-License-Identifier: Apache-2.0
"""What is drawn: every panel of a comparison, its words and its values. How it is drawn is the affair of
`pictures.py`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from benchmarks.legacy_learning.tools.report.arms import Arm, Values, accuracy_keys, accuracy_name, logged, of_key
from benchmarks.legacy_learning.tools.report.metrics import CORRELATION, MISMATCH_KL, REJECTED, SCORE, STEP_TIME, Metrics
from benchmarks.legacy_learning.tools.report.palette import HEALTHY_KL
from benchmarks.legacy_learning.tools.report.step_time import updates_by_step

GUARD_EVENTS, GUARD_STEPS = "flashrl/guard_events", re.compile(r"flashrl/guard_(.+)_steps")
EFFECTIVE, TRUNCATED = "rollout_corr/rollout_is_eff_sample_size", "rollout_corr/rollout_is_ratio_fraction_high"
DROPPED = "rollout_corr/rollout_is_oob_ratio"
"""Logged only where the weights have two bounds (IcePop). There `TRUNCATED` is but a part: what is above the upper
one."""
ROLLOUT_SPEED = "flashrl/tokens_per_second_gen"
REFIT, CODES = "flashrl/refit_seconds", "flashrl/code_change_rate"


class Section(Enum):
    """The parts of a report, in their order."""

    LEARNING = "Learning"
    MISMATCH = "Mismatch between rollout and trainer"
    SPEED = "Speed"
    WEIGHTS = "Weight updates and guard"


class Kind(Enum):
    """How a panel is drawn."""

    OVER_STEPS = "training step"
    OVER_TIME = "training time"
    AGAINST_SPEED = "updates per hour"
    STEP_BARS = "mean seconds per step"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One picture: lines of every arm unless its kind says otherwise."""

    name: str
    """Of its file, without a suffix."""
    section: Section
    title: str
    quantity: str
    """The label of the y axis, with the unit."""
    caption: str
    values: Values
    kind: Kind = Kind.OVER_STEPS
    log: bool = False
    limit: float | None = None
    """A horizontal line, drawn where the values come near it."""
    few: bool = False
    """Few values a run: each has its marker, and they are never smoothed."""


def panels(arms: Sequence[Arm]) -> tuple[list[Panel], list[str]]:
    """The panels that have data in at least one run, and the titles of those that have none."""
    wanted = [*_learning(arms), *MISMATCH, *SPEED, *WEIGHTS, *_guard(arms)]
    timed = logged(arms, of_key(STEP_TIME))
    there = [
        p for p in wanted if logged(arms, p.values) and (timed or p.kind not in (Kind.OVER_TIME, Kind.AGAINST_SPEED))
    ]
    return there, [panel.title for panel in wanted if panel not in there]


def _learning(arms: Sequence[Arm]) -> list[Panel]:
    drawn, keys = [], accuracy_keys(arms)
    for key in keys:
        name, values = accuracy_name(key, keys), of_key(key)
        few = key != SCORE
        slug = re.sub(r"\W+", "_", key.removeprefix("val-core/")).strip("_").lower()
        common = {
            "section": Section.LEARNING,
            "quantity": "fraction of the prompts" if few else "reward",
            "values": values,
            "few": few,
        }
        title = name[0].upper() + name[1:]
        why = f"Metric {key}." + ("" if few else " No run logged a held-out accuracy.")
        drawn += [
            Panel(name=f"{slug}_steps", title=f"{title} by step", caption=why, **common),
            Panel(
                name=f"{slug}_time",
                title=f"{title} by training time",
                caption=f"{why} Time is the sum of {STEP_TIME}: no start-up, no validation.",
                kind=Kind.OVER_TIME,
                **common,
            ),
            Panel(
                name=f"{slug}_speed",
                title=f"Last {name} by speed",
                caption=(
                    f"{why} One point a run, its last value; an update is a training step, 3600 s over the mean step "
                    "time."
                ),
                kind=Kind.AGAINST_SPEED,
                **common,
            ),
        ]
    if SCORE not in keys:
        drawn.append(
            Panel(
                name="training_score",
                section=Section.LEARNING,
                title="Training score by step",
                quantity="reward",
                caption=f"Metric {SCORE}: of the groups that were trained on. Dynamic sampling drops groups that are all "  # noqa: E501
                "right or all wrong, so it stays near the middle while the policy improves.",
                values=of_key(SCORE),
            )
        )
    return [
        *drawn,
        _line(
            "response_length",
            Section.LEARNING,
            "Response length",
            "tokens",
            "response_length/mean",
            "Mean over the batch.",
        ),
    ]


def _line(name: str, section: Section, title: str, quantity: str, key: str, caption: str, **more: Any) -> Panel:
    return Panel(
        name=name,
        section=section,
        title=title,
        quantity=quantity,
        caption=f"Metric {key}. {caption}".rstrip(),
        values=of_key(key),
        **more,
    )


def _guard(arms: Sequence[Arm]) -> list[Panel]:
    """The guard's count of events, and by watch the steps in a row beyond its limit where there are any."""
    runs = [run.metrics for arm in arms for run in arm.runs]
    beyond = {
        key: match[1]
        for key in sorted({key for metrics in runs for key in metrics.keys(GUARD_STEPS)})
        if (match := GUARD_STEPS.fullmatch(key)) and any(any(metrics.series(key)[1]) for metrics in runs)
    }
    section, why = (
        Section.WEIGHTS,
        "All so far. Steps in a row beyond a limit have pictures of their own where there are any.",
    )
    return [
        _line("guard_events", section, "Guard events", "events so far", GUARD_EVENTS, why),
        *(
            _line(
                f"guard_{name}",
                section,
                f"Guard: beyond the limit of {name}",
                "steps in a row",
                key,
                "The guard's count.",
            )
            for key, name in beyond.items()
        ),
    ]


def _truncated(metrics: Metrics) -> tuple[list[int], list[float]]:
    return ([], []) if metrics.series(DROPPED)[0] else metrics.series(TRUNCATED)


MISMATCH = [
    _line(
        "mismatch_kl",
        Section.MISMATCH,
        "Mismatch KL, rollout to trainer (k3)",
        "k3 KL, nats per token",
        MISMATCH_KL,
        "Mean of exp(d) - d - 1 over the sampled tokens, d = log p_trainer - log p_rollout. In bypass mode with "
        "what the policy itself moved within a step.",
        log=True,
        limit=HEALTHY_KL,
    ),
    _line(
        "effective_sample_size",
        Section.MISMATCH,
        "Effective sample size of the importance weights",
        "fraction of the tokens",
        EFFECTIVE,
        "Kish's, after truncation; only where weights are computed.",
    ),
    Panel(
        name="truncated_share",
        section=Section.MISMATCH,
        title="Tokens whose importance weight was truncated",
        quantity="fraction of the tokens",
        caption=f"Metric {TRUNCATED}. Share above the cap; of responses where the weights are per sequence. "
        "Runs with two bounds (IcePop) truncate nothing.",
        values=_truncated,
    ),
    _line(
        "dropped_share",
        Section.MISMATCH,
        "Tokens dropped for their importance weight (IcePop)",
        "fraction of the tokens",
        DROPPED,
        "Share outside the two bounds, below or above: their weight is 0.",
    ),
    _line(
        "rejected_share",
        Section.MISMATCH,
        "Tokens rejected",
        "fraction of the tokens",
        REJECTED,
        "Share that rejection (rollout_rs) takes out of the loss.",
    ),
    _line(
        "correlation",
        Section.MISMATCH,
        "Correlation of probabilities, rollout and trainer",
        "Pearson's r",
        CORRELATION,
        "Over the sampled tokens.",
    ),
]
SPEED = [
    Panel(
        name="step_time",
        section=Section.SPEED,
        title="Parts of a step",
        quantity="",
        caption="Metrics timing_s/*, mean over all steps of a run; percentages are of the run's own step. Parts below 1 % in "  # noqa: E501
        "every run are in other.",
        values=of_key(STEP_TIME),
        kind=Kind.STEP_BARS,
    ),
    Panel(
        name="updates_per_hour",
        section=Section.SPEED,
        title="Updates per hour by step",
        quantity="updates per hour",
        caption=f"3600 s over {STEP_TIME} of the step.",
        values=updates_by_step,
    ),
    _line(
        "throughput",
        Section.SPEED,
        "Throughput of a whole step",
        "tokens per second per device",
        "perf/throughput",
        "Prompt and response tokens of the batch over the time of the step.",
    ),
    _line(
        "rollout_speed",
        Section.SPEED,
        "Rollout speed",
        "tokens per second",
        ROLLOUT_SPEED,
        "Response tokens that the engines generated, all devices together, over the time of the rollout; also for "
        "groups that dynamic sampling dropped.",
    ),
]
WEIGHTS = [
    _line(
        "refit_seconds",
        Section.WEIGHTS,
        "Weight update of the engine (refit)",
        "seconds",
        REFIT,
        "The slowest engine worker's.",
    ),
    _line(
        "code_change_rate",
        Section.WEIGHTS,
        "8-bit codes that an update changed",
        "fraction of the codes",
        CODES,
        "Only of quantized rollouts.",
    ),
]
