# SPDX-License-Identifier: Apache-2.0
"""The command `flashrl check`: its options, its lines, its exit code."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashrl_verl.errors import FlashRLError
from flashrl_verl.tools.console import new_console
from flashrl_verl.trainer.atomic_write import write_whole

if TYPE_CHECKING:
    from rich.console import Console

    from flashrl_verl.tools.check.findings import Finding
    from flashrl_verl.tools.check.settings import CheckSettings

_WORD = len("not checked") + 2
"""Columns of the verdict."""

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "not checked": "dim"}
"""By verdict; the word stands there too."""


def check(
    precision: Annotated[
        str,
        typer.Option(help="Precisions whose kernels and numerics are looked at, separated by commas: int8, fp8, bf16."),
    ] = "int8,bf16",
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Every node of the Ray cluster of this machine, or of RAY_ADDRESS.")
    ] = False,
    address: Annotated[
        str | None, typer.Option(help="Every node of the Ray cluster at this address, <host>:6379.")
    ] = None,
    ship_code: Annotated[
        bool,
        typer.Option("--ship-code/--no-ship-code", help="Send this package to the nodes, as flashrl.ship_code does."),
    ] = True,
    bucket_megabytes: Annotated[
        int | None,
        typer.Option(min=1, help="The run's update_weights_bucket_megabytes, MiB; else verl's default is looked for."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Longest time of each child process, seconds.")] = 300.0,
    output: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the findings there too.")] = None,
) -> None:
    """Look for what would stop a run on this machine, or on every node of a Ray cluster; one line each, with the
    remedy.

    Exit code: 0 when nothing failed, 1 when something did, 2 for a wrong call. Needs no model, and no GPU to look.
    An environment for CUDA on a machine without a GPU (a login node) fails: no rank could run there. In a cluster,
    nodes that offer Ray no GPU are looked at without that.
    """
    joined = address or (os.environ.get("RAY_ADDRESS") or "auto" if cluster else None)
    if joined and "://" in joined:
        told = f"{joined} is not <host>:<port>; run this on a node of the cluster"
        raise typer.BadParameter(told, param_hint="--address" if address else "RAY_ADDRESS")
    if output is not None and not output.expanduser().absolute().parent.is_dir():
        raise typer.BadParameter(f"{output.parent} is no folder", param_hint="--json")
    try:
        from flashrl_verl.tools.check import node  # noqa: F401 - with everything that a check of this process imports
        from flashrl_verl.tools.check.findings import exit_code
        from flashrl_verl.tools.check.settings import CheckSettings
    except ModuleNotFoundError as error:
        _print_missing(error)
        raise typer.Exit(1) from None
    words = tuple(filter(None, map(str.strip, precision.split(","))))
    try:
        settings = CheckSettings(
            precisions=words, bucket_megabytes=bucket_megabytes, timeout_s=timeout, ship_code=ship_code
        )
    except ValueError:
        words = ()
    if not words:
        raise typer.BadParameter(f"{precision!r} is no list of int8, fp8 and bf16", param_hint="--precision")
    console = new_console()
    with console.status("looking; child processes import verl and vLLM, which takes half a minute"):
        findings = look(settings, joined)
    show(console, findings)
    if output is not None:
        write(output.expanduser(), findings)
    raise typer.Exit(exit_code(findings))


def look(settings: CheckSettings, address: str | None) -> list[Finding]:
    """Look at this machine, or with an address at every node of that Ray cluster.

    Args:
        settings: what to look for.
        address: for ``ray.init``; None for this machine alone.
    """
    from flashrl_verl.tools.check import cluster, node, ray_access
    from flashrl_verl.tools.check.child import run_child
    from flashrl_verl.tools.check.findings import guarded
    from flashrl_verl.tools.check.subjects import ALIKE, CLUSTER

    if address is None:
        return node.check_node(settings).findings
    # The driver's own process first: what is wrong with it may be why the nodes cannot be asked.
    here = [*node.check_process(), *guarded("Ray token", ray_access.check_token, os.environ, Path.home(), True)]
    limit_s = cluster.limit_s(settings)
    return [*here, *run_child("cluster", (CLUSTER, ALIKE), settings, limit_s=limit_s, address=address).findings]


def show(console: Console, findings: Sequence[Finding]) -> None:
    """Print one line a finding, and its remedy below it."""
    from rich.text import Text

    from flashrl_verl.tools.check.findings import counts

    width, where = max(len(finding.name) for finding in findings), ""
    for finding in findings:
        if finding.node != where:
            where = finding.node
            console.print(Text(f"node {where}" if where else "all nodes", style="bold"))
        line = Text.assemble(
            (f"{finding.verdict.value:<{_WORD}}", _STYLES[finding.verdict.value]), f"{finding.name:<{width}}  "
        )
        console.print(line.append(finding.text), soft_wrap=True)
        if finding.remedy:
            console.print(Text.assemble(" " * _WORD, ("remedy: ", "bold"), finding.remedy), soft_wrap=True)
    told = [f"{number} {word}" for word, number in counts(findings).items() if number]
    console.print(Text(", ".join(told), style="bold"), soft_wrap=True)


def write(path: Path, findings: Sequence[Finding]) -> None:
    """Write the findings as JSON: ``flashrl_verl`` (version), ``exit_code``, ``counts``, ``findings``.

    Raises:
        FlashRLError: it cannot be written; an older file of that name is unchanged.
    """
    from flashrl_verl import __version__
    from flashrl_verl.tools.check.findings import counts, exit_code

    report = {"flashrl_verl": __version__, "exit_code": exit_code(findings), "counts": counts(findings)}
    text = json.dumps({**report, "findings": [finding.to_dict() for finding in findings]}, indent=1) + "\n"
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise FlashRLError(f"--json {path} cannot be written: {error.strerror}. Name a file on another disk") from error


def _print_missing(error: ModuleNotFoundError) -> None:
    """Without a requirement of this package there is no further check; verl and vLLM bring all of these."""
    typer.echo(
        f"fail  requirements: {error.name} is missing\n      remedy: pip install {error.name}, or bash "
        "scripts/setup_env.sh"
    )
