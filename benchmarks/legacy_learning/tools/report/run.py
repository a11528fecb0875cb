# SPDX-License-Identifier: Apache-2.0
"""One run's metrics turned into a table, a Markdown report and curves."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashrl_verl.errors import FlashRLError
from benchmarks.legacy_learning.tools.report.command import broken_at_overrides
from benchmarks.legacy_learning.tools.report.metrics import (
    BF16_REPLICAS,
    CORRELATION,
    HELD_OUT,
    IS_WEIGHTS,
    KV_BITS,
    MISMATCH_KL,
    MISSING,
    REJECTED,
    REPLACED,
    SCORE,
    STEP_TIME,
    Metrics,
    read_metrics,
    show,
)

if TYPE_CHECKING:
    from rich.table import Table

METRICS_FILE, RUN_FILE, REPORT_FILE, CURVES_FILE = "metrics.jsonl", "run.json", "report.md", "curves.png"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What there is to say about one run."""

    metrics: Metrics
    run: dict[str, Any]
    """What the quickstart wrote about the run into `run.json`; empty for a run that was started otherwise."""
    metrics_path: Path

    def rows(self) -> list[tuple[str, str]]:
        """Labels and values, in the order to show them."""
        return [*self._learning(), *self._mismatch(), *self._weights(), *self._costs(), *self._origin()]

    def _learning(self) -> Iterator[tuple[str, str]]:
        metrics = self.metrics
        planned = self.run.get("total_steps")
        yield "steps trained", f"{metrics.last_step}" + (f" of {planned}" if planned else "")
        held_out = metrics.keys(HELD_OUT)
        if not held_out:
            yield "held-out accuracy", MISSING
        for key in held_out:
            yield f"held-out accuracy, {HELD_OUT.fullmatch(key)['source']}", self._before_after(key)
        _, replaced = metrics.series(REPLACED)
        mean = sum(replaced) / len(replaced) if replaced else None
        yield "constant groups replaced per step, mean", show(mean, ".1f")
        yield "training score (kept groups)", f"{show(metrics.first(SCORE))} -> {show(metrics.last(SCORE))}"

    def _before_after(self, key: str) -> str:
        steps, values = self.metrics.series(key)
        if len(steps) < 2:
            return f"{show(values[0])} (step {steps[0]}, one validation only)"
        change = (values[-1] - values[0]) * 100
        points = f", {change:+.1f} points" if math.isfinite(change) else ""
        return f"{show(values[0])} -> {show(values[-1])} (step {steps[0]} -> {steps[-1]}{points})"

    def _mismatch(self) -> Iterator[tuple[str, str]]:
        _, values = self.metrics.series(MISMATCH_KL)
        finite = [value for value in values if math.isfinite(value)]
        worst = f", largest {max(finite):.2e}" if finite else ""
        lost = f", {len(values) - len(finite)} NOT FINITE" if len(values) > len(finite) else ""
        yield "mismatch KL (k3), last", show(self.metrics.last(MISMATCH_KL), ".2e") + worst + lost
        yield "probability correlation, last", show(self.metrics.last(CORRELATION), ".5f")
        yield "correction of the mismatch", correction_words(self.run.get("correction"), self.metrics)
        if rejected := self.metrics.series(REJECTED)[1]:
            largest = max((share for share in rejected if math.isfinite(share)), default=math.nan)
            yield "rejected tokens, share, last", f"{show(rejected[-1], '.2g')}, largest {show(largest, '.2g')}"

    def _weights(self) -> Iterator[tuple[str, str]]:
        last = self.metrics.last
        share = last("flashrl/quantized_bytes")
        as_bf16, total = last("flashrl/quantized_bytes_as_bf16"), last("flashrl/weight_bytes")
        layers, others = last("flashrl/quantized_layers"), last(BF16_REPLICAS)
        yield "rollout precision", held_precision(self.run.get("precision"), layers, others)
        text = MISSING if total is None else f"{show(total / 1e6, '.2f')} MB"
        if share and as_bf16:
            text += f"; quantized layers {share / 1e6:.2f} MB, in BF16 {as_bf16 / 1e6:.2f} MB"
        yield "rollout weights", text
        bits = last(KV_BITS)
        yield "KV cache", MISSING if bits is None else f"{bits:.0f} bits"
        yield "weight update (refit)", _seconds(last("flashrl/refit_seconds"), 3)

    def _costs(self) -> Iterator[tuple[str, str]]:
        _, steps = self.metrics.series(STEP_TIME)
        finite = sorted(value for value in steps if math.isfinite(value))
        yield "step time, median", _seconds(finite[len(finite) // 2] if finite else None)
        attempts = self.run.get("attempts", [])
        lost = sum(not attempt.get("seconds") for attempt in attempts)
        counted = (
            f"{len(attempts) - lost} of {len(attempts)}, the rest was not recorded" if lost else f"{len(attempts)}"
        )
        of = f" (sum over the attempts: {counted})" if len(attempts) > 1 else ""
        for phase, seconds in self.run.get("seconds", {}).items():
            yield f"wall time, {phase}", _seconds(seconds) + of
        if "peak_memory_bytes" in self.run:
            peak, kind = self.run["peak_memory_bytes"], self.run["memory_kind"]
            yield "peak memory, all processes", f"{peak / 2**30:.2f} GiB ({kind})"

    def _origin(self) -> Iterator[tuple[str, str]]:
        if "hardware" in self.run:
            yield "hardware", self.run["hardware"]
        if "seed" in self.run:
            yield "seed", str(self.run["seed"])
        if "versions" in self.run:
            yield "versions", ", ".join(f"{name} {version}" for name, version in self.run["versions"].items())
        if self.run.get("exit_code"):
            yield "training ended with exit code", str(self.run["exit_code"])
        if self.metrics.unreadable_lines:
            yield "unreadable lines in the metrics", str(self.metrics.unreadable_lines)

    def facts(self) -> list[tuple[str, str]]:
        """Where the run is from: its file, hardware, seed and versions, as far as they are recorded."""
        return [("metrics", str(self.metrics_path)), *self._origin()]

    def command(self) -> str | None:
        """The command that started it, over several lines; None when it is not recorded."""
        return broken_at_overrides(self.run["command"]) if "command" in self.run else None

    def table(self) -> Table:
        """The rows for a terminal."""
        from rich.markup import escape
        from rich.table import Table

        table = Table(title=f"FlashRL run: {self.metrics_path.parent.name}", title_justify="left", show_header=False)
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for label, value in self.rows():
            style = "red" if "NOT " in value else "green" if re.search(r"\+.* points", value) else ""
            table.add_row(label, f"[{style}]{escape(value)}[/]" if style else escape(value))
        return table

    def markdown(self) -> str:
        """The rows and the picture for a file."""
        cells = "\n".join(f"| {label} | {value.replace('|', '/')} |" for label, value in self.rows())
        parts = [
            "# FlashRL run report",
            f"| what | value |\n|---|---|\n{cells}",
            f"![curves]({CURVES_FILE})",
            NOTES,
        ]
        if command := self.command():
            parts.append(f"Command:\n\n{fenced(command)}")
        parts.append(f"Source: `{self.metrics_path.name}`, one JSON object a step.")
        return "\n\n".join(parts) + "\n"


NOTES = """\
How to read it:

- *Held-out accuracy* is asked of prompts that were never trained on.
- *Training score* is the mean reward of the groups that dynamic sampling kept. It drops groups that are all right or all
  wrong, so this number stays near the middle while the policy improves; the held-out accuracy is the one to watch.
- *Mismatch KL* (k3 estimator) compares the rollout's probabilities with the trainer's for the sampled tokens.
  Most healthy runs stay below 1e-2, with a correlation of 0.97 and more. A weight update that was missed shows
  here at a high learning rate."""  # noqa: E501


def fenced(command: str) -> str:
    """A command as a block of Markdown, whatever it holds: the fence is longer than any run of backticks in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", command)), default=0))
    return f"{fence}bash\n{command}\n{fence}"


def held_precision(chosen: str | None, layers: float | None, bf16_replicas: float | None = None) -> str:
    """What the rollout was, by the engine's own count of layers; what was chosen is only said where the two agree.

    Args:
        chosen: `flashrl.precision`, None when it is not recorded.
        layers: quantized layers that the engine reported, None when it reported none.
        bf16_replicas: replicas whose engine is not quantized, None when it is not recorded.
    """
    if layers is None:
        return f"the engine's layers were {MISSING}" + (f"; chosen: {chosen}" if chosen else "")
    if not math.isfinite(layers):
        return f"{show(layers)} quantized layers"
    if layers == 0:
        agrees = chosen in (None, "bf16")
        return "not quantized, 0 quantized layers" + ("" if agrees else ": NOT the precision that was chosen")
    if chosen == "bf16":
        return f"{layers:.0f} quantized layers: NOT bf16, which was chosen"
    words = (
        f"{chosen}, {layers:.0f} quantized layers" if chosen else f"{layers:.0f} quantized layers, format not recorded"
    )
    return words + (f"; {show(bf16_replicas, '.0f')} of the replicas in bf16" if bf16_replicas else "")


def correction_words(settings: dict[str, Any] | None, metrics: Metrics) -> str:
    """The correction of a run in words.

    Args:
        settings: verl's `algorithm.rollout_correction` as it was composed, None when it is not recorded.
        metrics: of the run; they tell whether there were weights and rejections.
    """
    weighted, rejected = (bool(metrics.series(key)[0]) for key in (IS_WEIGHTS, REJECTED))
    unnamed = ["rejection, criterion not recorded"] if rejected else []
    if settings is None:
        weights = "importance weights, level and threshold not recorded" if weighted else "no importance weights logged"
        return "; ".join([weights, *unnamed])
    level, threshold, rejection = (settings.get(key) for key in ("rollout_is", "rollout_is_threshold", "rollout_rs"))
    words = []
    if settings.get("bypass_mode"):
        words.append(f"bypass mode, {settings.get('loss_type', 'ppo_clip')} on the rollout's log-probs")
    if level is not None:
        lower, _, upper = str(threshold).partition("_")
        how = f"IcePop, weights outside {lower} to {upper} become 0" if upper else f"TIS, cap C = {lower}"
        words.append(f"{how}, per {level}" + ("" if weighted else "; weights were NOT logged"))
    if rejection is not None:
        words.append(f"rejection by {rejection} beyond {settings.get('rollout_rs_threshold')}")
        words += [] if rejected else ["rejections were NOT logged"]
    else:
        words += unnamed
    return "; ".join(words) or "none (rollout_is=null)"


def _seconds(value: float | None, digits: int = 1) -> str:
    return f"{show(value, f'.{digits}f')} s" if value is not None else MISSING


def load(path: Path) -> Report:
    """Read a run.

    Args:
        path: the run's directory, or its metrics file.

    Raises:
        FlashRLError: there is no metrics file, or it holds no record.
    """
    path = Path(path)
    metrics_path = path / METRICS_FILE if path.is_dir() else path
    metrics = read_metrics(metrics_path)
    if not metrics.rows:
        if metrics.unreadable:
            record, line = '{"step": n, "data": {...}}', metrics.unreadable[0]
            raise FlashRLError(f"{metrics_path} is not a metrics file: line {line} is not {record}, nor is any other.")
        raise FlashRLError(f"{metrics_path} holds no step: the run ended before its first validation or step.")
    run_path = metrics_path.parent / RUN_FILE
    run = json.loads(run_path.read_text()) if run_path.is_file() and metrics_path.name == METRICS_FILE else {}
    return Report(metrics=metrics, run=run, metrics_path=metrics_path)


def write(report: Report) -> tuple[Path, Path]:
    """Write `report.md` and `curves.png` beside the metrics; returns their paths.

    Raises:
        FlashRLError: the curves cannot be drawn (matplotlib is missing); `report.md` is there.
    """
    from benchmarks.legacy_learning.tools.report.curves import plot_curves

    directory = report.metrics_path.parent
    markdown, curves = directory / REPORT_FILE, directory / CURVES_FILE
    markdown.write_text(report.markdown())
    plot_curves(report.metrics, curves)
    return markdown, curves
