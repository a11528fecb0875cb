# SPDX-License-Identifier: Apache-2.0
"""A run's metrics file in memory.

A value that is missing or not finite is kept as such: a report that leaves it out would look better than the run was.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from flashrl_verl.errors import FlashRLError

HELD_OUT = re.compile(r"val-core/(?P<source>.+)/(?P<what>acc|reward)/mean@(?P<k>\d+)")
"""verl's names for the accuracy on held-out prompts, and for the reward where the reward function gives no accuracy."""
SCORE, MISMATCH_KL = "critic/score/mean", "rollout_corr/k3_kl"
MISSING = "not logged"
_LARGEST_STEP = 10**12
_LARGEST = 1e30
"""What is larger counts as infinite: matplotlib cannot draw an axis to the end of float64."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Metrics by step, steps ascending."""

    rows: dict[int, dict[str, float]]
    """Step to metrics. verl's logger writes NaN and infinities as null; they are NaN here."""
    unreadable: tuple[int, ...] = ()
    """Numbers, from 1, of the lines that are no record: one torn line at the end is what an interrupted run leaves."""

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

    def last(self, key: str) -> float | None:
        """The last logged value, or None."""
        return next(reversed(self.series(key)[1]), None)


def read_metrics(path: Path) -> Metrics:
    """Read verl's JSON lines, `{"step": n, "data": {...}}`.

    A step may occur twice, after a resume: its lines are merged and the later value of a metric wins. Lines that cannot
    be read are counted, not fatal. Values that are not numbers are left out.

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
            if abs(step) > _LARGEST_STEP:
                raise ValueError(step)
        except (ValueError, KeyError, TypeError, OverflowError):
            unreadable.append(number)
            continue
        numbers = {key: math.nan if value is None else value for key, value in data.items()}
        rows.setdefault(step, {}).update({k: _finite(v) for k, v in numbers.items() if isinstance(v, int | float)})
    return Metrics(rows=dict(sorted(rows.items())), unreadable=tuple(unreadable))


def _finite(value: float) -> float:
    return float(value) if abs(value) < _LARGEST or math.isnan(value) else math.copysign(math.inf, value)


def show(value: float | None, form: str = ".3f") -> str:
    """The number in the given format; `not logged` for None, and NaN and infinities by name."""
    if value is None:
        return MISSING
    return format(value, form) if math.isfinite(value) else f"NOT FINITE ({value})"
