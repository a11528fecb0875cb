# SPDX-License-Identifier: Apache-2.0
"""All checks of one machine: of this process, and of fresh ones as verl and vLLM start them."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import flashrl_verl
from flashrl_verl.plugins.versions import DISTRIBUTION, TESTED, find
from flashrl_verl.tools.check import memory, metadata, network, ray_access, subjects, versions
from flashrl_verl.tools.check.child import Report, run_child
from flashrl_verl.tools.check.devices import nvidia_devices
from flashrl_verl.tools.check.findings import Finding, guarded
from flashrl_verl.tools.check.settings import CheckSettings


@dataclass(frozen=True, kw_only=True)
class Member:
    """What a node is in its Ray cluster."""

    address: str
    gpus: float
    """GPUs that it offers to Ray, logical ones too. Ranks of a run come only where there are any."""


def check_node(settings: CheckSettings, member: Member | None = None) -> Report:
    """Look at this machine, from this process and from fresh ones.

    Args:
        settings: what to look for.
        member: what this node is in its Ray cluster; None where there is none yet.

    Returns:
        Findings in the order of the report, and facts to compare with other nodes.
    """
    report = Report(facts=facts())
    report.add(check_process())
    report.add(check_machine(settings, member))
    # Both at the same time: they mostly wait for the disk, and a node for training has cores enough.
    with ThreadPoolExecutor(2) as pool:
        of_verl = pool.submit(run_child, "verl_process", subjects.of_verl_process(), settings)
        of_vllm = pool.submit(
            run_child,
            "vllm_process",
            subjects.of_vllm_process(settings),
            settings,
            ranks=member is None or member.gpus > 0,
        )
        for child in (of_verl.result(), of_vllm.result()):
            report.add(child.findings)
            report.facts.update(child.facts)
    return report


def check_process() -> Iterator[Finding]:
    """What is installed for this process."""
    yield from guarded("Python", versions.check_python, platform.python_version())
    yield from guarded("versions", versions.check_components)
    yield from guarded("requirements", versions.check_requirements)
    yield from guarded("vllm metadata", metadata.check_vllm)
    yield from guarded(f"{DISTRIBUTION} metadata", metadata.check_ours)
    yield from guarded("entry points", metadata.check_entry_points)


def check_machine(settings: CheckSettings, member: Member | None) -> Iterator[Finding]:
    """What this machine has room for, and whether its sockets work.

    Args:
        settings: what to look for.
        member: what this node is in its Ray cluster; None where there is none yet.
    """
    gpus, address = nvidia_devices(), None if member is None else member.address
    shared = (settings.shared_memory, settings.bucket_megabytes, gpus, member is None or member.gpus > 0)
    yield from guarded("shared memory", memory.check_shared_memory, *shared)
    yield from guarded("disk", lambda: memory.check_disk(memory.ray_folder()))
    yield from guarded("open files", memory.check_open_files)
    yield from guarded("loopback", network.check_loopback, max(gpus, 1))
    yield from guarded("node address", lambda: network.check_node_address(address or _own_address()))
    yield from guarded("host name", network.check_host_name, socket.gethostname(), address)
    yield from guarded("network interface", network.check_interfaces, os.environ)
    yield from guarded("proxy", lambda: network.check_proxy(os.environ, address or _own_address()))
    yield from guarded("Ray token", ray_access.check_token, os.environ, Path.home(), address is not None)


def _own_address() -> str:
    import ray

    return ray.util.get_node_ip_address()


def facts() -> dict[str, str]:
    """What has to be the same on every node: versions, and the code of this package."""
    found = {name: find(component).installed or "none" for name, component in TESTED.items()}
    return {"Python": platform.python_version(), **found, DISTRIBUTION: f"{flashrl_verl.__version__} ({checksum()})"}


def checksum(folder: Path | None = None) -> str:
    """SHA-256 over names and contents of a package's modules and YAML, 12 digits; this package's without a folder."""
    folder = folder or Path(flashrl_verl.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for pattern in ("*.py", "*.yaml") for path in folder.rglob(pattern)):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
