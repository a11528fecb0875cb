# SPDX-License-Identifier: Apache-2.0
"""Every node of a running Ray cluster looks at itself, from a worker that has what a run's have; then they are
compared."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from flashrl_verl.settings import KVCache, Precision
from flashrl_verl.tools.check import Finding, error, machine, ok

_CONNECT_S = 10.0
_START_S = 120.0
"""How long a node may take beyond its own checks, seconds: Ray sends the package there and starts a worker."""
_DRIVER = "this process"
_JOIN = (
    "`ray start --head` starts a cluster, `ray status` on its nodes shows RAY_ADDRESS=<host>:<port>; use the "
    "RAY_AUTH_MODE, ~/.ray/auth_token, Python and ray of those nodes (docs/clusters.md)"
)


def look(precisions: Sequence[Precision], kv_cache: KVCache, ship_code: bool = True) -> Iterator[Finding]:
    """Join the cluster of RAY_ADDRESS, or of this machine, and look at its nodes at the same time.

    Args:
        precisions: to compute in, on nodes that offer GPUs.
        kv_cache: whose attention to compute there.
        ship_code: whether the nodes are sent this package, as ``flashrl.ship_code`` does.
    """
    import ray

    from flashrl_verl.trainer.cluster import package

    address = os.environ.get("RAY_ADDRESS") or "auto"
    if why := _silent(address):
        yield error("cluster", f"nothing answers at RAY_ADDRESS={address}: {why}", _JOIN)
        return
    # Ray hides GPUs from what asks for none; the checks want to see all of them, and to take none away from anybody.
    environment = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
    if ship_code:
        environment["py_modules"] = package()
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.WARNING, runtime_env=environment)
    except Exception as raised:  # noqa: BLE001 - Ray raises several kinds; the text is what differs
        yield error("cluster", f"{address} cannot be joined: {type(raised).__name__}: {raised}", _JOIN)
        return
    try:
        yield from _ask(precisions, kv_cache)
    finally:
        ray.shutdown()


def _silent(address: str) -> str | None:
    """Why nobody answers there; None if somebody does. Ray itself tries again for minutes."""
    host, _, port = address.rpartition(":")
    if not host:
        return None  # auto, local: no address
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S):
            return None
    except (OSError, ValueError) as raised:
        return f"{type(raised).__name__}: {raised}"


def _ask(precisions: Sequence[Precision], kv_cache: KVCache) -> Iterator[Finding]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    alive = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeManagerAddress"])
    offered = sum(node["Resources"].get("GPU", 0) for node in alive)
    yield ok("cluster", f"{len(alive)} node(s) offer Ray {offered:g} GPU(s)")
    asked = {}
    for node in alive:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = ray.remote(num_cpus=0, max_retries=0)(on_node).options(scheduling_strategy=there)
        words = ([p.value for p in precisions], kv_cache.value, node["Resources"].get("GPU", 0) > 0)
        asked[f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})"] = task.remote(*words, node["NodeManagerAddress"])
    limit = machine.LIMIT_S + _START_S
    in_time, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=limit)
    answers = {}
    for name, reference in asked.items():
        if reference not in in_time:
            remedy = "`ray status`, and the node's logs in /tmp/ray/session_latest/logs"
            yield replace(error("node", f"it did not answer within {limit:g} s", remedy), node=name)
            continue
        try:
            answer = ray.get(reference)
        except Exception as raised:  # noqa: BLE001 - whatever a node's worker could not do is its finding
            why = next((line for line in reversed(str(raised).splitlines()) if line.strip()), type(raised).__name__)
            remedy = f"{machine.INSTALL_COMMAND} there, and {machine.INSTALL} unless the code is shipped"
            yield replace(error("node", f"its worker could not look: {why}", remedy), node=name)
            continue
        answers[name] = answer
        findings = [Finding(**finding) for finding in answer["findings"]]
        # Of many nodes only what is wrong is of interest.
        yield from (replace(finding, node=name) for finding in findings if finding.level != "ok")
        good = ", ".join(finding.subject for finding in findings if finding.level == "ok")
        yield replace(ok("node", f"{answer['gpus']}, {answer['free']}; ok: {good}"), node=name)
    if answers:
        yield compare({_DRIVER: machine.facts(), **{name: answer["facts"] for name, answer in answers.items()}})


def on_node(precisions: Sequence[str], kv_cache: str, ranks: bool, address: str) -> dict[str, Any]:
    """What a Ray worker does on its node; plain types in and out, for the node may have another release.

    Returns:
        ``findings``, ``facts`` (``machine.facts``), ``gpus`` and ``free``: its cards and free memory, in words.
    """
    import psutil

    here, memory = machine.gpus(), psutil.virtual_memory()
    free = f"free: {memory.available >> 30} of {memory.total >> 30} GiB of memory"
    if here:
        free += f", at least {min(free for _, free, _ in here) >> 10} GiB of each GPU"
    found = machine.look([Precision(p) for p in precisions], KVCache(kv_cache), ranks, address)
    findings = [asdict(finding) for finding in found]
    return {"findings": findings, "facts": machine.facts(), "gpus": machine.cards(here), "free": free}


def compare(facts: Mapping[str, Mapping[str, str]]) -> Finding:
    """One finding for all differences of software; ``facts`` is process -> name -> version."""
    differ = []
    for name in dict.fromkeys(name for known in facts.values() for name in known):
        values = {}
        for where, known in facts.items():
            values.setdefault(known.get(name, "none"), []).append(where)
        if len(values) > 1:
            differ.append(f"{name} is " + " but ".join(f"{v} on {', '.join(where)}" for v, where in values.items()))
    if differ:
        remedy = f"one environment for all nodes ({machine.INSTALL_COMMAND}); flashrl.ship_code=true for this package"
        return error("versions", "; ".join(differ), remedy)
    return ok("versions", f"{', '.join(next(iter(facts.values())))} are the same everywhere")
