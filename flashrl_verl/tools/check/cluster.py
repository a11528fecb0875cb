# SPDX-License-Identifier: Apache-2.0
"""Every node of a running Ray cluster looks at itself, from a worker that has what a run's have."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import replace

from flashrl_verl.run_environment import reach
from flashrl_verl.tools.check import Finding, machine
from flashrl_verl.upstream.versions import INSTALL_COMMAND

_LIMIT_S = 600.0
"""Longest time of all nodes, seconds. They take half a minute on two idle cores, nearly all of it imports."""
_JOIN = (
    "`ray start --head` starts a cluster, `ray status` on its nodes shows RAY_ADDRESS=<host>:<port>; use the "
    "RAY_AUTH_MODE, ~/.ray/auth_token, Python and ray of those nodes (docs/clusters.md)"
)


def look() -> Iterator[Finding]:
    """Join the cluster of RAY_ADDRESS, or of this machine, and look at its nodes at the same time. They are sent this
    package, as by ``flashrl.ship_code``."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from flashrl_verl.launch import package

    address = os.environ.get("RAY_ADDRESS") or "auto"
    # Ray hides GPUs from what asks for none; the checks want to see all of them, and to take none away from anybody.
    variables = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    environment = {"env_vars": variables, "py_modules": package()}
    try:
        reach(address)
        ray.init(address, log_to_driver=False, logging_level=logging.WARNING, runtime_env=environment)
    except Exception as raised:  # noqa: BLE001 - Ray raises several kinds; the text is what differs
        yield Finding("error", "cluster", f"{address} cannot be joined: {type(raised).__name__}: {raised}", _JOIN)
        return
    asked, alive = {}, [node for node in ray.nodes() if node["Alive"]]
    offered = {node["NodeManagerAddress"]: node["Resources"].get("GPU", 0) for node in alive}
    at = ray.get_runtime_context().gcs_address
    yield Finding("ok", "cluster", f"{len(alive)} node(s) of {at} offer Ray {sum(offered.values()):g} GPU(s)")
    for node in alive:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        # A worker of its own, which ends with its use of the GPUs.
        task = ray.remote(num_cpus=0, max_retries=0, max_calls=1)(_on_node).options(scheduling_strategy=there)
        name = node["NodeManagerAddress"]
        asked[name] = task.remote(offered[name] > 0, machine.installed())
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=_LIMIT_S)
    for name, reference in sorted(asked.items()):
        try:
            findings = ray.get(reference, timeout=1)
        except Exception as raised:  # noqa: BLE001 - whatever a node's worker could not do is its finding
            why = next((line for line in reversed(str(raised).splitlines()) if line.strip()), type(raised).__name__)
            remedy = f"{INSTALL_COMMAND} there; `ray status`, and /tmp/ray/session_latest/logs"
            yield Finding("error", name, f"its worker could not look: {why}", remedy)
            continue
        # Of many nodes only what is wrong is of interest.
        yield from (replace(f, subject=f"{name} {f.subject}") for f in findings if f.level != "ok")
        yield Finding("ok", name, ", ".join(f.subject for f in findings if f.level == "ok"))


def _on_node(ranks: bool, expected: dict[str, str]) -> list[Finding]:
    return list(machine.look(ranks, expected))
