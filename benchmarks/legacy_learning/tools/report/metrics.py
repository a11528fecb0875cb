# SPDX-License-Identifier: Apache-2.0
"""A run's metrics file in memory, and the names of what is in it.

A value that is missing or not finite is kept as such: a report that leaves it out would look better than the run was.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrl_verl.errors import FlashRLError

HELD_OUT = re.compile(r"val-core/(?P<source>.+)/acc/mean@\d+")
"""verl's name for the accuracy on the held-out prompts, greedy unless `rollout.val_kwargs` says otherwise."""
HELD_OUT_CORE = re.compile(r"val-core/(?P<source>.+)/(?P<what>acc|reward)/mean@(?P<k>\d+)")
"""The same, and the reward where the reward function gives no accuracy."""
SCORE, MISMATCH_KL = "critic/score/mean", "rollout_corr/k3_kl"
CORRELATION = "training/rollout_actor_probs_pearson_corr"
REPLACED = "training/filter_groups/evicted_samples"
"""Groups that dynamic sampling drew in vain in a step: all of their samples were right, or all wrong."""
STEP_TIME = "timing_s/step"
"""Seconds of a step: rollout to weight update, checkpoint included, validation left out."""
IS_WEIGHTS = "rollout_corr/rollout_is_mean"
"""Mean importance weight; logged only where weights were computed."""
REJECTED = "rollout_corr/rollout_rs_masked_fraction"
"""Share of the tokens that rejection takes out of the loss; logged only where a criterion (`rollout_rs`) was chosen."""
KV_BITS = "flashrl/kv_cache_bits"
BF16_REPLICAS = "flashrl/bf16_replicas"
"""Replicas of the rollout that are not quantized, of a mixture or of a BF16 run."""
MISSING = "not logged"


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Metrics by step, steps ascending."""

    rows: dict[int, dict[str, float]]
    """Step to metrics. verl's logger writes NaN and infinities as null; they are NaN here."""
    unreadable: tuple[int, ...] = ()
    """Numbers, from 1, of the lines that are no record: one torn line at the end is what an interrupted run leaves."""

    @property
    def unreadable_lines(self) -> int:
        """How many lines are not a record."""
        return len(self.unreadable)

    @property
    def last_step(self) -> int:
        """The last step that was trained; 0 when there is only the validation before it."""
        return max(self.rows, default=0)

    def keys(self, pattern: re.Pattern[str]) -> list[str]:
        """Names that match the whole pattern, sorted."""
        return sorted({key for row in self.rows.values() for key in row if pattern.fullmatch(key)})

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps that logged `key`, and its values there, NaN included."""
        points = [(step, row[key]) for step, row in self.rows.items() if key in row]
        return [step for step, _ in points], [value for _, value in points]

    def clock(self) -> dict[int, float]:
        """Hours of training at the end of each step: the sum of the logged step times. A step without one adds
        nothing."""
        hours, at = 0.0, {}
        for step, row in self.rows.items():
            seconds = row.get(STEP_TIME, 0.0)
            hours += seconds / 3600 if math.isfinite(seconds) else 0.0
            at[step] = hours
        return at

    def untimed_steps(self) -> int:
        """Steps up to the last one whose time is not in the file, so that `clock` leaves it out."""
        timed = {step for step, row in self.rows.items() if math.isfinite(row.get(STEP_TIME, math.nan))}
        return len(set(range(1, self.last_step + 1)) - timed)

    def first(self, key: str) -> float | None:
        """The first logged value, or None."""
        return next(iter(self.series(key)[1]), None)

    def last(self, key: str) -> float | None:
        """The last logged value, or None."""
        return next(reversed(self.series(key)[1]), None)


def read_metrics(path: Path) -> Metrics:
    """Read verl's JSON lines, `{"step": n, "data": {...}}`.

    A step may occur twice, after a resume: its lines are merged and the later value of a metric wins. Lines
    that cannot be read are counted, not fatal. Values that are not numbers are left out.

    Raises:
        FlashRLError: the file is not there.
    """
    if not path.is_file():
        raise FlashRLError(
            f"{path} is not there: no such run was started, it logged nothing, or trainer.logger lacks `file`."
        )
    rows: dict[int, dict[str, float]] = {}
    unreadable = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            step, data = int(record["step"]), dict(record["data"])
        except (ValueError, KeyError, TypeError):
            unreadable.append(number)
            continue
        rows.setdefault(step, {}).update(_numbers(data))
    return Metrics(rows=dict(sorted(rows.items())), unreadable=tuple(unreadable))


def _numbers(data: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in data.items():
        if value is None:
            yield key, math.nan
        elif isinstance(value, int | float):
            yield key, float(value)


def show(value: float | None, form: str = ".3f") -> str:
    """The number in the given format; `not logged` for None, and NaN and infinities by name."""
    if value is None:
        return MISSING
    return format(value, form) if math.isfinite(value) else f"NOT FINITE ({value})"
