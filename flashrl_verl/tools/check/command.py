# SPDX-License-Identifier: Apache-2.0
"""The command `flashrl check`: its table, its exit status."""

from __future__ import annotations

import logging
import os
import warnings
from collections import Counter
from typing import Annotated

import typer

_COLORS = {"ok": "green", "warning": "yellow", "error": "red"}


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
