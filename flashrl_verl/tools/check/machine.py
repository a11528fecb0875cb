# SPDX-License-Identifier: Apache-2.0
"""One machine: versions, memory, our plugins in vLLM and verl, and our kernels."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

import flashrl_verl
from flashrl_verl.tools.check import Finding, guarded
from flashrl_verl.upstream import versions
from flashrl_verl.upstream.versions import DISTRIBUTION, INSTALL_COMMAND, TESTED, TESTED_PYTHON, find

_PLUGIN = "flashrl"
"""Name of both entry points; not imported, for importing the plugin would already register it."""
_MEMORY_GIB = 9
"""What the quickstart takes."""
_SHARED_GIB = 1
"""For vLLM's queues (10 chunks of 16 MiB an engine, 10 of 24 MiB a worker) and NCCL's buffers: some hundred MiB for 8
GPUs. Docker's default is 64 MiB."""
_FREE = 0.9
"""Share of a GPU's memory that is free where no other program runs."""


def look(ranks: bool = True, expected: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Look at this machine.

    Args:
        ranks: whether ranks of a run come here; else only versions and memory matter.
        expected: ``installed`` of the node that the others are compared with.
    """
    yield from guarded("versions", check_versions, expected)
    yield from guarded("memory", check_memory)
    if ranks:
        yield from guarded("shared memory", check_shared_memory, Path("/dev/shm"))
        # Before verl, whose plugin imports what vLLM's registers.
        yield from guarded("vLLM plugin", check_vllm)
        yield from guarded("verl plugin", check_verl)


# ---- versions ----


def installed() -> dict[str, str]:
    """What has to be the same on every node: name -> version."""
    return {"Python": platform.python_version(), **{name: find(name).installed or "none" for name in TESTED}}


def check_versions(expected: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Compare what is installed with what this release was run with, and with another node's."""
    here = installed()
    for name, version in here.items():
        if expected is not None and version != expected[name]:
            text = f"{version}, but {expected[name]} where the run is started"
            yield Finding("error", name, text, f"one environment for all nodes: {INSTALL_COMMAND}")
    if (python := here["Python"]).rpartition(".")[0] in TESTED_PYTHON:
        yield Finding("ok", "Python", python)
    else:
        text = f"{python} has not been run (tested: {' or '.join(TESTED_PYTHON)})"
        yield Finding("warning", "Python", text, f"FLASHRL_PYTHON=python{TESTED_PYTHON[-1]} {INSTALL_COMMAND}")
    for name in TESTED:
        found = find(name)
        if found.status == "ok":
            yield Finding("ok", name, here[name])
        else:
            yield Finding("warning" if found.status == "untested" else "error", name, str(found))
    yield Finding("ok", DISTRIBUTION, f"{flashrl_verl.__version__} in {Path(flashrl_verl.__file__).resolve().parent}")


# ---- memory ----


def check_memory() -> Iterator[Finding]:
    """Free memory of the host and of its GPUs."""
    memory = psutil.virtual_memory()
    free, total = memory.available / 2**30, memory.total / 2**30
    text = f"{free:.0f} of {total:.0f} GiB free"
    if free < _MEMORY_GIB:
        text += f", and the quickstart alone takes {_MEMORY_GIB} GiB"
        yield Finding("warning", "memory", text, "end other programs")
    else:
        yield Finding("ok", "memory", text)
    for number, (name, capability, driver, free, total) in enumerate(gpus()):
        text = f"{name}, compute capability {capability}, driver {driver}, {free} of {total} MiB free"
        # GPUs that share the host's memory say [N/A].
        if free.isdigit() and int(free) < _FREE * int(total):
            remedy = "end it (nvidia-smi), or lower actor_rollout_ref.rollout.gpu_memory_utilization"
            yield Finding("warning", f"GPU {number}", f"{text}: another program holds memory", remedy)
        else:
            yield Finding("ok", f"GPU {number}", text)


def gpus() -> list[list[str]]:
    """Name, compute capability, driver, free and total MiB of every GPU, by nvidia-smi; empty without it."""
    query = "--query-gpu=name,compute_cap,driver_version,memory.free,memory.total"
    try:
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.rsplit(", ", 4) for line in told.splitlines()]


def check_shared_memory(folder: Path) -> Iterator[Finding]:
    """Compare the free space in ``folder`` with what a run puts there."""
    free = shutil.disk_usage(folder).free / 2**30
    text = f"{free:.2f} GiB free in {folder}"
    if free >= _SHARED_GIB:
        yield Finding("ok", "shared memory", text)
        return
    text += f", and vLLM's and NCCL's buffers take up to {_SHARED_GIB} GiB: a run would end in a bus error"
    remedy = "docker run --shm-size=<size>, a medium: Memory volume in Kubernetes, or delete files there"
    yield Finding("error" if gpus() else "warning", "shared memory", text, remedy)


# ---- plugins ----


def check_vllm() -> Iterator[Finding]:
    """vLLM loads our plugin by its own function; then its device, and our kernels there."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    yield plugin("vLLM plugin", "vllm.general_plugins", "VLLM_PLUGINS", QUANTIZATION_METHODS, _PLUGIN)
    device = versions.vllm_device()
    import torch

    places = [torch.device("cpu")]
    if device == "cuda":
        places = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    yield Finding("ok", "device", f"vLLM computes on {', '.join(map(str, places))}")

    from flashrl_verl.quantization.formats import FP8, INT8
    from flashrl_verl.tools.check import arithmetic

    yield from guarded("int8", arithmetic.check_format, INT8, places)
    yield from guarded("fp8", arithmetic.check_format, FP8, places, refused="warning")
    if device == "cuda":
        yield from guarded("int8 KV cache", arithmetic.check_attention, places, refused="warning")


def check_verl() -> Iterator[Finding]:
    """verl loads our plugin by itself, and gets replica, adapter and trainer from it."""
    import verl.trainer.ppo.v1  # noqa: F401 - the import of verl loads plugins, the trainer registers after this one
    from verl.trainer.ppo.v1.trainer_base import get_trainer_cls
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY, get_rollout_class
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    key = (_PLUGIN, "async")
    found = plugin("verl plugin", "verl.plugins", "VERL_USE_EXTERNAL_PLUGINS", _ROLLOUT_REGISTRY, key)
    if found.level == "ok":  # an untested verl may lack what their modules import
        RolloutReplicaRegistry.get(_PLUGIN), get_rollout_class(*key), get_trainer_cls(_PLUGIN)
    yield found


def plugin(subject: str, group: str, variable: str, registry: Container[Any], key: Any) -> Finding:
    """Whether the host has loaded our entry point of a group by itself, which puts a key into a registry; if not why,
    of which verl and vLLM say nothing. ``variable`` names the plugins that it loads."""
    points = [point for point in importlib.metadata.entry_points(group=group) if point.name == _PLUGIN]
    if not points:
        text = f"there is no entry point {_PLUGIN} in {group}"
        return Finding("error", subject, text, "pip install --no-deps -e <flashrl-verl>")
    if key in registry:
        return Finding("ok", subject, f"loaded by the entry point {points[0].value}")
    points[0].load()  # raises what the host swallowed
    text = f"{points[0].value} can be loaded, but {variable}={os.environ.get(variable, '')} leaves {_PLUGIN} out"
    return Finding("error", subject, text, f"unset {variable}, or add {_PLUGIN}, on every node before `ray start`")
