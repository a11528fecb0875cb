# SPDX-License-Identifier: Apache-2.0
"""Room for what a run keeps outside its processes: shared memory, Ray's temporary files, open files."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
from omegaconf import OmegaConf

from flashrl_verl.check.findings import Finding, fail, ok, warn

BUCKET_KEY = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"

_GPU_SHARED = 1 << 30
"""Shared memory that a node with GPUs needs at least, bytes. Weights go through CUDA IPC there, but vLLM sends to its workers
through 10 chunks of 16 MiB an engine (``VLLM_MQ_MAX_CHUNK_BYTES_MB``), gets answers through 10 of 24 MiB a worker, and NCCL
connects GPUs of one node through it where it cannot directly: some hundred MiB for 8 GPUs, not all in use at once. Docker's
default is 64 MiB."""

_STORE_SHARE, _STORE_MOST = 0.3, 200e9
"""Ray's object store: share of the memory, and bytes at most (``ray_constants``). Without room for it in shared memory Ray
puts it on the disk, with a warning."""

_DISK_STOP = 0.95
"""Share of the file system from which Ray writes no more to it (``local_fs_capacity_threshold``): tasks then fail."""

_DISK_LITTLE = 10 << 30
"""Free bytes below which the disk is likely to fill up: logs, and objects that Ray spills."""

_FILES = 4096
"""Open files below which Ray warns of connection errors; it recommends 8192 (``ray/_private/worker.py``)."""


def verl_bucket_megabytes() -> int:
    """verl's default size of a bucket of weights, MiB; reads verl's YAML, imports nothing.

    Raises:
        FileNotFoundError: there is no verl, or it keeps its defaults elsewhere.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("verl is not installed")
    folder = Path(next(iter(spec.submodule_search_locations)))
    rollout = OmegaConf.load(folder / "trainer" / "config" / "rollout" / "rollout.yaml")
    return int(rollout.checkpoint_engine.update_weights_bucket_megabytes)


def check_shared_memory(folder: str, bucket_megabytes: int | None, gpus: int) -> Iterator[Finding]:
    """Compare what is free with what weight updates, engines and Ray take.

    Args:
        folder: where shared memory lies.
        bucket_megabytes: size of a bucket of weights, MiB; None for verl's default.
        gpus: GPUs of this machine; 0 for a CPU, where one rank's bucket lies in shared memory.
    """
    name, usage = "shared memory", shutil.disk_usage(folder)
    larger = f"a larger {folder}: docker run --shm-size=<size>, a medium: Memory volume in Kubernetes, or delete files there"
    if gpus:
        need, why, remedy = _GPU_SHARED, "vLLM's queues and NCCL's buffers", larger
    else:
        megabytes = verl_bucket_megabytes() if bucket_megabytes is None else bucket_megabytes
        need, why = megabytes << 20, f"a bucket of weights on a CPU ({BUCKET_KEY}={megabytes})"
        remedy = f"{larger}; or a smaller bucket, not below the largest tensor: {BUCKET_KEY}=<MiB>"
    free = f"{_gib(usage.free)} of {_gib(usage.total)} free in {folder}"
    store = min(_STORE_SHARE * _memory(), _STORE_MOST)
    if usage.free < need:
        yield fail(name, f"{free}, below {_gib(need)} for {why}: a bus error", remedy)
    elif usage.total < store:
        yield warn(
            name,
            f"{free}: Ray's object store ({_gib(store)} by default) would go to the disk, which is slow",
            f"{larger}; or a smaller store: ray start --object-store-memory=<bytes>",
        )
    else:
        yield ok(name, f"{free}, enough for {why} and Ray's object store ({_gib(store)})")


def _memory() -> int:
    """Bytes of memory, or of the container's limit (cgroup v2), as Ray counts them."""
    total = psutil.virtual_memory().total
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such file, or the word max
        return total


def check_disk(folder: str) -> Iterator[Finding]:
    """Whether Ray can write below ``folder``, and whether it stays so."""
    name, usage = "disk", shutil.disk_usage(folder)
    free = f"{_gib(usage.free)} of {_gib(usage.total)} free in {folder}"
    remedy = (
        "delete old sessions (`<folder>/ray/session_*`), or another disk: ray start --temp-dir=<folder>, RAY_TMPDIR=<folder>"
    )
    remedy = remedy.replace("<folder>/ray", f"{folder}/ray")
    if not os.access(folder, os.W_OK):
        yield fail(
            name, f"{folder} cannot be written to by this user; Ray's sessions and the weights' sockets go there", remedy
        )
    elif usage.free < (1 - _DISK_STOP) * usage.total:  # what is reserved counts as used, as for Ray
        yield fail(name, f"{free}: above {_DISK_STOP:.0%} used, Ray stops writing and tasks fail", remedy)
    elif usage.free < _DISK_LITTLE:
        yield warn(name, f"{free}; logs and spilled objects may need more", remedy)
    else:
        yield ok(name, free)


def check_open_files() -> Iterator[Finding]:
    """Ray raises the soft limit to the hard one by itself; the hard one is what there is."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    if unlimited or hard >= _FILES:
        yield ok("open files", "no limit" if unlimited else f"up to {hard} a process")
    else:
        text = f"at most {hard} a process; Ray loses connections below {_FILES}"
        yield fail("open files", text, "ulimit -Hn 65536 before `ray start` (root), docker run --ulimit nofile=65536:65536")


def _gib(number: float) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"
