# SPDX-License-Identifier: Apache-2.0
"""Every node of a Ray cluster looks at itself, from a worker that has what a run's workers have; then they are
compared."""

from __future__ import annotations

import importlib.metadata
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flashrl_verl.tools.check import node
from flashrl_verl.tools.check.child import Report
from flashrl_verl.tools.check.findings import Finding, Verdict, fail, guarded, ok, skipped, warn
from flashrl_verl.tools.check.settings import CheckSettings
from flashrl_verl.tools.check.subjects import ALIKE, CLUSTER, GPUS

_CONNECT_S = 10.0
"""How long a node may take to accept a connection, seconds: milliseconds in one network."""

_JOIN_S = 180.0
"""How long importing Ray, `ray.init` and sending the package may take, seconds: some ten on two idle cores."""

DRIVER = "driver"
"""Where the run is started; compared with the nodes."""


def limit_s(settings: CheckSettings) -> float:
    """Longest time for ``run``, seconds: after that of the nodes, or those that answered would be dropped with it."""
    return _CONNECT_S + _JOIN_S + _answer_s(settings)


def _answer_s(settings: CheckSettings) -> float:
    """Longest time for the nodes, seconds. Their children have a limit each, and run at the same time."""
    return settings.timeout_s + settings.ray_start_s


def run(settings: CheckSettings, address: str) -> Iterator[Finding | tuple[str, str]]:
    """What a child process finds that joins the cluster as a driver.

    Args:
        settings: what to look for.
        address: of the cluster, for ``ray.init``.
    """
    found = list(guarded(CLUSTER, _join, settings, address))
    yield from found
    if found[0].verdict is Verdict.FAIL:
        yield skipped(ALIKE, "no node was asked")
        return
    import ray

    try:
        yield from guarded(CLUSTER, _ask, settings)
    finally:
        ray.shutdown()


def _join(settings: CheckSettings, address: str) -> Iterator[Finding]:
    import ray

    from flashrl_verl.trainer.cluster import package

    if silent := _silent(address):
        yield fail(CLUSTER, f"nothing listens at {address}: {silent}", _remedy(silent))
        return
    # Ray hides GPUs from what asks for none; the checks want to see all of them, and to take none away from anybody.
    variables = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    shipped = {"py_modules": package()} if settings.ship_code else {}
    try:
        ray.init(address, log_to_driver=False, runtime_env={"env_vars": variables, **shipped})
    except Exception as error:  # noqa: BLE001 - Ray raises several kinds; the text is what differs
        yield fail(CLUSTER, f"{address} cannot be joined: {type(error).__name__}: {error}", _remedy(str(error)))
        return
    there = alive()
    gpus = sum(entry["Resources"].get("GPU", 0) for entry in there)
    yield ok(CLUSTER, f"{len(there)} node(s), {gpus:g} GPU(s), Ray {importlib.metadata.version('ray')}")


def _silent(address: str) -> str | None:
    """Why nobody answers there; None if somebody does. Ray itself tries again for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return None  # auto, local: no address
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S):
            return None
    except OSError as error:
        return f"{type(error).__name__}: {error}"


def _remedy(error: str) -> str:
    if (
        "oken" in error or "nauthenticated" in error
    ):  # token, Token, InvalidAuthToken; gRPC's UNAUTHENTICATED in both spellings
        return (
            "RAY_AUTH_MODE=token and the cluster's own ~/.ray/auth_token in this shell, or RAY_AUTH_MODE=disabled "
            "everywhere"
        )
    if "ersion mismatch" in error or "ersions" in error:
        return "the same Python and ray here as on the nodes: bash scripts/setup_env.sh on each"
    return "`ray status` on the first node shows the address; `ray start --head` starts one (docs/clusters.md)"


def alive() -> list[dict[str, Any]]:
    """Ray's entries of the nodes that are alive, by address."""
    import ray

    return sorted((entry for entry in ray.nodes() if entry["Alive"]), key=lambda entry: entry["NodeManagerAddress"])


def _ask(settings: CheckSettings) -> Iterator[Finding]:
    """Findings of every node, then of all of them together."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = {}
    for entry in alive():
        name = f"{entry['NodeManagerAddress']} ({entry['NodeID'][:8]})"
        there = NodeAffinitySchedulingStrategy(entry["NodeID"], soft=False)
        task = ray.remote(num_cpus=0, max_retries=0)(look).options(scheduling_strategy=there)
        asked[name] = task.remote(settings.to_dict(), entry["NodeManagerAddress"], entry["Resources"].get("GPU", 0))
    # All at the same time: those that are silent take the time once, not one after another.
    in_time, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=_answer_s(settings))
    reports: dict[str, Report] = {}
    for name, reference in asked.items():
        answers = list(guarded(CLUSTER, _answer, name, reference if reference in in_time else None, settings, reports))
        yield from answers
        if name in reports:
            yield from (replace(finding, node=name) for finding in reports[name].findings)
    yield from compare(node.facts(), {name: reports[name].facts if name in reports else None for name in asked})


def _answer(name: str, reference: Any, settings: CheckSettings, reports: dict[str, Report]) -> Iterator[Finding]:
    """Take a node's answer into ``reports``; yields why there is none. Without a reference it came too late."""
    import ray

    if reference is None:
        text = f"did not answer within {_answer_s(settings):g} s"
        remedy = (
            "`ray status`, and the node's logs in /tmp/ray/session_latest/logs; a longer --timeout if it is only slow"
        )
        yield replace(fail(CLUSTER, text, remedy), node=name)
        return
    try:
        findings, facts = ray.get(reference)
    except Exception as error:  # noqa: BLE001 - whatever a node's worker could not do is its finding
        yield replace(_no_worker(error, settings.ship_code), node=name)
    else:
        reports[name] = Report([Finding(**finding) for finding in findings], facts)


def _no_worker(error: Exception, shipped: bool) -> Finding:
    text = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
    if "flashrl_verl" in text and not shipped:
        remedy = "pip install --no-deps -e <flashrl-verl> on this node, or flashrl.ship_code=true"
    else:
        remedy = (
            "the same Python and packages on every node: bash scripts/setup_env.sh; then /tmp/ray/session_latest/logs "
            "there"
        )
    return fail(CLUSTER, f"a worker on this node could not look: {type(error).__name__}: {text}", remedy)


def look(settings: dict[str, Any], address: str, gpus: float) -> tuple[list[dict[str, str]], dict[str, str]]:
    """What a Ray worker does on its node.

    Args:
        settings: ``CheckSettings`` as a dictionary.
        address: of the node.
        gpus: that the node offers to Ray.

    Returns:
        Findings as dictionaries, and facts: plain types, so that a node with another version of this package can
        answer.
    """
    report = node.check_node(CheckSettings(**settings), node.Member(address=address, gpus=gpus))
    return [finding.to_dict() for finding in report.findings], report.facts


def compare(driver: Mapping[str, str], nodes: Mapping[str, Mapping[str, str] | None]) -> Iterator[Finding]:
    """One finding for all differences of software, and one for GPUs of different kinds or numbers.

    Args:
        driver: name -> value where the run is started.
        nodes: the same of every node that was asked; None for one that did not answer, which is alike to nobody.
    """
    answered = {name: known for name, known in nodes.items() if known is not None}
    silent = [name for name in nodes if name not in answered]
    yield _software({DRIVER: driver, **answered}, silent)
    yield from _gpus(answered, [*silent, *(name for name, known in answered.items() if "GPUs" not in known)])


def _software(facts: Mapping[str, Mapping[str, str]], silent: Sequence[str]) -> Finding:
    names = list(dict.fromkeys(name for known in facts.values() for name in known if name != "GPUs"))
    differ = {name: _by_value(facts, name) for name in names}
    told = [f"{name}: {_listed(values)}" for name, values in differ.items() if len(values) > 1]
    if told:
        remedy = (
            "one environment for all nodes (bash scripts/setup_env.sh, or an image); for flashrl-verl "
            "flashrl.ship_code=true"
        )
        return fail(ALIKE, "; ".join([*told, *([f"unknown of {', '.join(silent)}"] if silent else [])]), remedy)
    if len(facts) == 1:
        return skipped(ALIKE, "no node answered")
    alike = f"{len(facts)} processes have the same {', '.join(names)}"
    return skipped(ALIKE, f"{', '.join(silent)} did not answer; {alike}") if silent else ok(ALIKE, alike)


def _gpus(facts: Mapping[str, Mapping[str, str]], unknown: Sequence[str]) -> Iterator[Finding]:
    """Nothing where all that have GPUs have the same.

    Args:
        facts: of the nodes that answered; GPUs are their names, with commas between.
        unknown: nodes whose GPUs nobody could look at.
    """
    cards = {
        name: Counter(known["GPUs"].split(", ")) for name, known in facts.items() if known.get("GPUs", "none") != "none"
    }
    listed = "; ".join(
        f"{name}: {', '.join(f'{number} x {card}' for card, number in held.items())}" for name, held in cards.items()
    )
    if len({frozenset(held) for held in cards.values()}) > 1:
        yield warn(GPUS, listed, "nodes of one kind: kernels differ, and the slowest sets the pace")
    elif len({held.total() for held in cards.values()}) > 1:
        text = f"their numbers differ, and a run takes trainer.n_gpus_per_node from each: {listed}"
        yield warn(
            GPUS,
            text,
            "trainer.n_gpus_per_node not above the smallest, or nodes with as many; CUDA_VISIBLE_DEVICES hides some",
        )
    elif unknown and len(facts) + len(unknown) > 1:
        yield skipped(GPUS, f"unknown of {', '.join(unknown)}")


def _by_value(facts: Mapping[str, Mapping[str, str]], name: str) -> dict[str, list[str]]:
    values: dict[str, list[str]] = {}
    for where, known in facts.items():
        if name in known:
            values.setdefault(known[name], []).append(where)
    return values


def _listed(values: Mapping[str, list[str]]) -> str:
    return " against ".join(f"{value} on {', '.join(where)}" for value, where in values.items())
