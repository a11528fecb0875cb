# SPDX-License-Identifier: Apache-2.0
"""Whether verl or vLLM has loaded this package's plugin by itself, and if not, why: both swallow a plugin's errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points

from flashrl_verl.tools.check.findings import Finding, fail
from flashrl_verl.tools.check.metadata import INSTALL, PLUGIN


def check_loaded(
    name: str, group: str, variable: str, everything: str | None, registered: bool, load: Callable[[EntryPoint], object]
) -> Iterator[Finding]:
    """Say why a plugin is not registered, or that it failed half-way; nothing when it is whole.

    Args:
        name: subject of the findings.
        group: group of entry points.
        variable: environment variable that lists the plugins to load.
        everything: its value that means all of them; None when only a missing variable does.
        registered: whether the plugin had registered before this call.
        load: what the host does with an entry point.
    """
    points = [point for point in entry_points(group=group) if point.name == PLUGIN]
    if not points:
        yield fail(name, f"this process has no entry point {PLUGIN} in {group}", f"{INSTALL} on this node")
        return
    policy = os.environ.get(variable)
    names = [word.strip() for word in (policy or "").split(",")]
    if not registered and policy is not None and policy.strip() != everything and PLUGIN not in names:
        text = f"{variable}={policy} leaves {PLUGIN} out"
        also = ",".join([*filter(None, (word for word in names if word.lower() != "none")), PLUGIN])
        yield fail(name, text, f"unset {variable}, or {variable}={also}, on every node before `ray start`")
        return
    try:
        load(points[0])
    except Exception as error:  # noqa: BLE001 - the error that verl and vLLM do not show
        text = f"{points[0].value} raises {type(error).__name__}: {error}"
        yield fail(
            name, f"{text} (which a run would not show)", f"what the error names; else {INSTALL} with tested versions"
        )
        return
    if not registered:
        text = f"{points[0].value} is found and loads, but its host had not loaded it"
        yield fail(name, text, "tested versions: `flashrl version` names them")
