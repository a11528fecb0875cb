# SPDX-License-Identifier: Apache-2.0
"""The figures of ``flashrl eval`` as JSON and as a table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.legacy_learning.tools.evaluate.engine import Answer
from benchmarks.legacy_learning.tools.evaluate.metrics import LEVEL, RESAMPLES, Figure, differences, figures, per_problem
from benchmarks.legacy_learning.tools.evaluate.problems import Problem
from flashrl_verl.trainer.atomic_write import write_whole

if TYPE_CHECKING:
    from rich.table import Table

FILE = "eval.json"
ALL = "all"
"""Name of the figures over several data sources."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """One precision."""

    precision: str
    values: list[list[float]]
    """The reward's, by problem and sample."""
    answer: Answer
    generated: bool
    """Whether its responses were made now, or were there."""

    def truncated(self) -> float:
        """Share of responses that ended at the longest length."""
        return float(np.mean(self.answer.truncated))


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was measured, and on what."""

    evaluated: list[Evaluated]
    problems: dict[str, int]
    """By data source."""
    figures: dict[str, dict[str, dict[str, Figure]]]
    """Data source -> metric -> precision."""
    differences: dict[str, dict[str, dict[str, Figure]]]
    """The same, minus the first precision's; without the first."""
    facts: dict[str, Any]

    @classmethod
    def of(
        cls, evaluated: list[Evaluated], problems: list[Problem], threshold: float, seed: int, facts: dict[str, Any]
    ) -> Report:
        """Compute the figures.

        Args:
            evaluated: the precisions; the others are compared with the first.
            problems: in the order of their values.
            threshold: least value of a correct response.
            seed: of the intervals.
            facts: what else the report is to say.
        """
        sources = list(dict.fromkeys(problem.data_source for problem in problems))
        groups = {source: [i for i, p in enumerate(problems) if p.data_source == source] for source in sources}
        if len(sources) > 1:
            groups[ALL] = list(range(len(problems)))
        columns = {one.precision: per_problem(np.asarray(one.values, dtype=float), threshold) for one in evaluated}
        names = list(dict.fromkeys(name for column in columns.values() for name in column))
        columns = {precision: _with(names, column) for precision, column in columns.items()}
        first = evaluated[0].precision
        found: dict[str, dict] = {}
        less: dict[str, dict] = {}
        for source, rows in groups.items():
            own = {precision: [column[name][rows] for name in names] for precision, column in columns.items()}
            means = {precision: figures(own[precision], seed) for precision in own}
            gaps = {p: differences(own[p], own[first], seed) for p in own if p != first}
            found[source] = {name: {p: means[p][i] for p in means} for i, name in enumerate(names)}
            less[source] = {name: {p: gaps[p][i] for p in gaps} for i, name in enumerate(names)}
        counts = {source: len(rows) for source, rows in groups.items()}
        return cls(
            evaluated=evaluated,
            problems=counts,
            figures=found,
            differences=less,
            facts=facts | {"threshold": threshold},
        )

    def to_json(self) -> str:
        """All figures, and every response's value."""
        precisions = {
            one.precision: {
                "layers": one.answer.layers,
                "kernels": one.answer.kernels,
                "seconds": one.answer.seconds,
                "truncated": one.truncated(),
                "values": one.values,
            }
            for one in self.evaluated
        }
        plain = lambda tree: {  # noqa: E731
            source: {name: {p: asdict(f) for p, f in row.items()} for name, row in rows.items()}
            for source, rows in tree.items()
        }
        return json.dumps(
            {
                **self.facts,
                "problems": self.problems,
                "interval": {"level": LEVEL, "method": "bootstrap over problems, percentiles", "resamples": RESAMPLES},
                "figures": plain(self.figures),
                "differences": plain(self.differences),
                "precisions": precisions,
            },
            indent=1,
        )

    def write(self, folder: Path) -> Path:
        """Write ``eval.json``; a reader finds the old one or the new one, whole."""
        path = folder / FILE
        write_whole(path, (self.to_json() + "\n").encode())
        return path

    def table(self) -> Table:
        """Figures by data source, metric and precision."""
        from rich.table import Table

        table = Table(title=f"{LEVEL:.0%} intervals; differences are paired by problem")
        first = self.evaluated[0].precision
        for heading in ("data source", "problems", "metric"):
            table.add_column(heading, justify="right" if heading == "problems" else "left")
        others = [one.precision for one in self.evaluated[1:]]
        for precision in (first, *others):
            table.add_column(precision)
        for precision in others:
            table.add_column(f"{precision} - {first}")
        for source, rows in self.figures.items():
            for name, row in rows.items():
                gaps = self.differences[source][name]
                cells = [str(row[p]) for p in (first, *others)] + [str(gaps[p]) for p in others]
                table.add_row(source, str(self.problems[source]), name, *cells)
        return table

    def notes(self) -> list[str]:
        """What the engines were, one line each."""
        lines = []
        for one in self.evaluated:
            layers, seconds = one.answer.layers, one.answer.seconds
            made = f"generated in {seconds['generate']:.0f} s" if one.generated else "generated before"
            if one.generated and one.answer.kept:
                made += f" behind {one.answer.kept} responses that were there"
            lines.append(
                f"{one.precision}: {layers['quantized_layers']} layers quantized, {layers['unquantized_layers']} not "
                f"(kernel: {one.answer.kernels['linear']}), {made}, {one.truncated():.1%} of the responses truncated"
            )
        return lines


def _with(names: list[str], column: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Where the values of one precision are 0 and 1 and another's are not, pass@1 is left out of the first: it is its
    mean."""
    mean = next(value for name, value in column.items() if name.startswith("mean@"))
    return {name: column.get(name, mean) for name in names}
