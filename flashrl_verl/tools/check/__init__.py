# SPDX-License-Identifier: Apache-2.0
"""`flashrl check`: looks for what would stop a run, on this machine or on every node of a Ray cluster.

`machine` looks at versions, memory and the plugins, `arithmetic` computes with our kernels, `cluster` has every node do
the same.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from flashrl_verl.errors import FlashRLError
from flashrl_verl.upstream.versions import INSTALL_COMMAND

Level = Literal["ok", "warning", "error"]
_COLORS = {"ok": "green", "warning": "yellow", "error": "red"}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: Level
    """An error stops a run, or makes it sample from something else than it says."""
    subject: str
    text: str
    """What was seen; includes the remedy where ``remedy`` is empty and the level is not ok."""
    remedy: str = ""


def guarded(
    subject: str, check: Callable[..., Iterable[Finding]], *arguments: Any, refused: Level = "error"
) -> Iterator[Finding]:
    """Yield what a check finds. An exception in it is one more error, and other checks follow; a ``FlashRLError`` is of
    the level ``refused``."""
    try:
        yield from check(*arguments)
    except FlashRLError as raised:
        yield Finding(refused, subject, str(raised))  # the remedy is in it
    except Exception as raised:  # noqa: BLE001 - whatever a broken machine raises is a finding
        remedy = f"what it names; else tested versions: {INSTALL_COMMAND}"
        yield Finding("error", subject, f"{type(raised).__name__}: {raised}", remedy)


def check(
    cluster: Annotated[
        bool,
        typer.Option("--cluster", help="Look at every node of the running Ray cluster (of RAY_ADDRESS, if set)."),
    ] = False,
) -> None:
    """Look for what would stop a run: versions, memory, plugins, kernels. A line each, with the remedy.

    Exit status 1 if there is an error. Needs no model and, in an environment for CPUs, no GPU. In an environment for
    CUDA it fails on a machine without a GPU, such as a login node: use --cluster there.
    """
    # What vLLM and verl say while they are imported would stand between the lines.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    from flashrl_verl.tools.check import cluster as all_nodes
    from flashrl_verl.tools.check import machine

    typer.echo("Looking. The imports of vLLM and verl take half a minute, minutes on a cold disk.", err=True)
    levels: Counter[str] = Counter()
    for finding in all_nodes.look() if cluster else machine.look():
        levels[finding.level] += 1
        level = typer.style(f"{finding.level:<8}", fg=_COLORS[finding.level])
        remedy = f". Remedy: {finding.remedy}" if finding.remedy else ""
        typer.echo(f"{level} {finding.subject:<14} {' '.join(finding.text.split())}{remedy}")
    typer.echo(", ".join(f"{levels[level]} {level}" for level in _COLORS))
    raise typer.Exit(int(levels["error"] > 0))
