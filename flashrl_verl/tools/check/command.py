# SPDX-License-Identifier: Apache-2.0
"""The command `flashrl check`: its options, its lines, its exit status."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from flashrl_verl.settings import KVCache, Precision

_COLORS = {"ok": "green", "warning": "yellow", "error": "red"}


def check(
    precision: Annotated[
        str, typer.Option(help="Compute small layers in these precisions, with commas between: int8, fp8, bf16.")
    ] = "int8,bf16",
    kv_cache: Annotated[KVCache, typer.Option(help="Also compute attention over such a KV cache.")] = KVCache.AUTO,
    cluster: Annotated[
        bool,
        typer.Option("--cluster", help="Look at every node of the running Ray cluster (of RAY_ADDRESS, if set)."),
    ] = False,
    ship_code: Annotated[
        bool,
        typer.Option(
            "--ship-code/--no-ship-code", help="With --cluster: send this package to the nodes, like flashrl.ship_code."
        ),
    ] = True,
) -> None:
    """Look for what would stop a run: versions, plugins, kernels, shared memory, network. A line each, with the remedy.

    Exit status 1 if there is an error. Needs no model and, in an environment for CPUs, no GPU. In an environment for
    CUDA it fails on a machine without a GPU, such as a login node: use --cluster there.
    """
    try:
        precisions = [Precision(word.strip()) for word in precision.split(",")]
    except ValueError as raised:
        raise typer.BadParameter(f"{raised}; choose from int8, fp8, bf16", param_hint="--precision") from None
    from flashrl_verl.tools.check import cluster as all_nodes
    from flashrl_verl.tools.check import machine

    typer.echo(
        "Looking. Fresh processes import verl and vLLM: half a minute on idle cores, minutes on a cold disk.", err=True
    )
    levels: Counter[str] = Counter()
    findings = (
        all_nodes.look(precisions, kv_cache, ship_code) if cluster else machine.look(precisions, kv_cache)
    )  # fmt: skip
    for finding in findings:
        levels[finding.level] += 1
        where = f"{finding.node}: " if finding.node else ""
        level = typer.style(f"{finding.level:<8}", fg=_COLORS[finding.level])
        remedy = f". Remedy: {finding.remedy}" if finding.remedy else ""
        typer.echo(f"{level} {where}{finding.subject}: {' '.join(finding.text.split())}{remedy}")
    typer.echo(", ".join(f"{levels[level]} {level}" for level in _COLORS))
    raise typer.Exit(int(levels["error"] > 0))
