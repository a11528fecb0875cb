# SPDX-License-Identifier: Apache-2.0
"""Runs the recipe in a process of its own, and says a line for each step."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flashrl_verl.tools.process_tree import ProcessTree, Stopped
from flashrl_verl.tools.recipe_process import ROOT, environment
from flashrl_verl.tools.report import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    from rich.console import Console

LOG, METRICS = "train.log", METRICS_FILE

_SHOWN = (
    (r"val-core/.*/acc/mean@\d+", "held-out accuracy", ".3f"),
    ("critic/score/mean", "score of kept groups", ".2f"),
    ("rollout_corr/k3_kl", "mismatch KL", ".1e"),
)
"""Metrics of a line: pattern of the key, name, format."""


def follow(
    command: Sequence[str], folder: Path, total: int, console: Console, variables: Mapping[str, str] | None = None
) -> int:
    """Run a training to its end and tell its steps; a stop ends all its processes.

    Args:
        command: started in the checkout.
        folder: its output is appended to ``LOG`` there, and verl's metrics to ``METRICS``.
        total: steps to run to.
        console: where people read.
        variables: of its environment, beside this process's.

    Returns:
        Its exit code.

    Raises:
        Stopped: inside `stoppable`.
    """
    metrics, began = folder / METRICS, time.monotonic()
    step = last_logged(metrics)
    tree = ProcessTree(command, folder / LOG, environment(metrics) | dict(variables or {}), ROOT)
    say(console, "starting Ray, verl and vLLM: one to three minutes")
    try:
        while True:
            code = tree.poll()
            if (last := last_logged(metrics)) not in (None, step):
                step, data = last, read_metrics(metrics).rows[last]
                say(console, f"[{time.monotonic() - began:3.0f} s] step {step}/{total}{_words(data)}")
            if code is not None:
                return code
            time.sleep(0.5)
    except Stopped:
        say(console, "stopping the training (again: at once) ...")
        raise
    finally:
        tree.end()


def last_logged(metrics: Path) -> int | None:
    """Step that verl's file logger wrote last; None before."""
    return max(read_metrics(metrics).rows, default=None) if metrics.is_file() else None


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print a line as it is."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _words(data: Mapping[str, float]) -> str:
    found = [(n, value, f) for p, n, f in _SHOWN for key, value in data.items() if re.fullmatch(p, key)]
    return "".join(f", {name} {value:{form}}" for name, value, form in found)
