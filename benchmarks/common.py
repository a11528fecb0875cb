# SPDX-License-Identifier: Apache-2.0
"""What every benchmark has in common: its command line, its facts about the machine, and means with intervals."""

from __future__ import annotations

import importlib.metadata
import json
import math
import multiprocessing
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import typer

from flashrl_verl import cli
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.trainer.atomic_write import write_atomically

ROOT = Path(__file__).resolve().parents[1]
"""The checkout."""

RESULTS = Path(__file__).resolve().parent / "results"
"""Raw data of what docs/results publishes."""

_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t, 97.5 %, of 1 to 10 degrees of freedom."""

STEP_SETTINGS = "FLASHRL_BENCH_STEP"
"""Variable that tells the processes of a run what ``benchmarks.step`` was asked for."""


def run(command: Callable[..., None], *, overrides: bool = False) -> None:
    """A benchmark's command line; an error that is meant for users is one message, not a traceback.

    Args:
        command: with typer's annotations.
        overrides: words after the options are Hydra overrides, in its context's ``args``.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings={"allow_extra_args": overrides, "ignore_unknown_options": overrides})(command)
    cli.run(app)


def words_of(text: str, allowed: Sequence[str] | None = None, option: str = "") -> list[str]:
    """Words separated by commas.

    Raises:
        ConfigError: there is none, one is there twice, or one is not allowed.
    """
    words = [word for word in map(str.strip, text.split(",")) if word]
    if not words or len(set(words)) < len(words):
        raise ConfigError(f"{option} {text!r}: give one or more words, each once, separated by commas")
    for word in words if allowed is not None else ():
        if word not in allowed:
            raise ConfigError(f"{option} {word!r} is not one of {', '.join(allowed)}")
    return words


def environment() -> dict[str, str]:
    """Versions and device, as results record them."""
    import torch

    found = {"python": platform.python_version()}
    for name in ("torch", "vllm", "verl", "ray", "transformers", "flash-attn-4", "flashrl-verl"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    cuda = torch.cuda.is_available()
    found["device"] = torch.cuda.get_device_name() if cuda else f"CPU ({platform.machine()})"
    return found


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a result, whole or not at all; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval by Student's t (of at most ten degrees of freedom); or NaN."""
    if not (freedom := len(values) - 1):
        return values[0], math.nan
    t = _T_95[min(freedom, len(_T_95)) - 1]
    return statistics.fmean(values), t * statistics.stdev(values) / math.sqrt(len(values))


def in_own_process(function: Callable[..., Any], *arguments: Any, log: Path) -> Any:
    """Call a module's function in a process of its own, whose memory is its own and free again afterwards.

    Args:
        function: of a module; what it returns is plain data.
        *arguments: plain data.
        log: takes all that the process prints.

    Raises:
        FlashRLError: the process was ended from outside, as by a system without memory; or any error of the function.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_print_to, initargs=(str(log),)) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool as error:
            raise FlashRLError(
                f"a process was ended from outside, as by a system without memory; log: {log}"
            ) from error


def _print_to(log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)


def ranged(values: Sequence[float], form: str) -> str:
    """Median, and lowest and highest."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    from rich.table import Table

    from flashrl_verl.tools.console import new_console

    table = Table(*header, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    new_console().print(table)
