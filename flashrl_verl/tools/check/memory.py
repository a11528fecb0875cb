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

import flashrl_verl
from flashrl_verl.tools.check.findings import Finding, fail, ok, warn

BUCKET_KEY = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"

_GPU_SHARED = 1 << 30
"""Shared memory that a node with GPUs needs at least, bytes. Weights go through CUDA IPC there, but vLLM sends to its
workers through 10 chunks of 16 MiB an engine (``VLLM_MQ_MAX_CHUNK_BYTES_MB``), gets answers through 10 of 24 MiB a
worker, and NCCL connects GPUs of one node through it where it cannot directly: some hundred MiB for 8 GPUs, not all in
use at once. Docker's default is 64 MiB."""

_STORE_SHARE, _STORE_MOST = 0.3, 200e9
"""Ray's object store: share of the memory, and bytes at most (``ray_constants``). Without room for it in shared memory
Ray puts it on the disk, with a warning."""

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


def quickstart_bucket_megabytes() -> int:
    """The quickstart's size of a bucket of weights, MiB, which its toy model fits into; reads its YAML."""
    experiment = OmegaConf.load(Path(flashrl_verl.__file__).parent / "configs" / "experiment" / "quickstart.yaml")
    return int(OmegaConf.select(experiment, BUCKET_KEY, throw_on_missing=True))


def check_shared_memory(folder: str, bucket_megabytes: int | None, gpus: int, ranks: bool = True) -> Iterator[Finding]:
    """Compare what is free with what weight updates, engines and Ray take.

    Args:
        folder: where shared memory lies.
        bucket_megabytes: size of a bucket of weights, MiB; None where nobody named it. Then it is a warning when verl's
            default does not fit, and a failure when not even the quickstart's does.
        gpus: GPUs of this machine; 0 for a CPU, where one rank's bucket lies in shared memory.
        ranks: whether ranks of a run come here at all; if not, only Ray's object store does.
    """
    name, usage = "shared memory", shutil.disk_usage(folder)
    larger = (
        f"a larger {folder}: docker run --shm-size=<size>, a medium: Memory volume in Kubernetes, or delete files there"
    )
    free = f"{_gib(usage.free)} of {_gib(usage.total)} free in {folder}"
    store = min(_STORE_SHARE * _memory(), _STORE_MOST)
    need, why, remedy, default = 0, [], larger, None
    if ranks and gpus:
        need, why = _GPU_SHARED, ["vLLM's queues and NCCL's buffers"]
    elif ranks:
        if bucket_megabytes is None and usage.free < verl_bucket_megabytes() << 20:
            default = verl_bucket_megabytes()
        megabytes = quickstart_bucket_megabytes() if default else bucket_megabytes or verl_bucket_megabytes()
        need, why = megabytes << 20, [f"a bucket of weights on a CPU ({BUCKET_KEY}={megabytes})"]
        remedy = f"{larger}; or a smaller bucket, not below the largest tensor: {BUCKET_KEY}=<MiB>"
    if usage.free < need:
        yield fail(name, f"{free}, below {_gib(need)} for {why[0]}: a bus error", remedy)
    elif default:
        text = (
            f"{free}: enough for the quickstart, but a run with verl's default ({BUCKET_KEY}={default}) gets a bus "
            "error"
        )
        yield warn(name, text, f"{remedy}. `flashrl check --bucket-megabytes <MiB>` looks for the run's own")
    elif usage.total < store:
        yield warn(
            name,
            f"{free}: Ray's object store ({_gib(store)} by default) would go to the disk, which is slow",
            f"{larger}; or a smaller store: ray start --object-store-memory=<bytes>",
        )
    else:
        why.append(f"Ray's object store ({_gib(store)})")
        yield ok(name, f"{free}, enough for {' and '.join(why)}")


def _memory() -> int:
    """Bytes of memory, or of the container's limit (cgroup v2), as Ray counts them."""
    total = psutil.virtual_memory().total
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such file, or the word max
        return total


def ray_folder() -> Path:
    """Where Ray writes. In a worker that is where its node was told to (--temp-dir, or the head's); else where it would
    if this process started it, below RAY_TMPDIR, TMPDIR or /tmp."""
    import ray

    if ray.is_initialized():
        return Path(ray.get_runtime_context().get_temp_dir())
    from ray._common.utils import get_default_ray_temp_dir

    return Path(get_default_ray_temp_dir())


def check_disk(folder: Path) -> Iterator[Finding]:
    """Whether Ray can write to ``folder``, which it makes if need be, and whether it stays so."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    name, usage = "disk", shutil.disk_usage(there)
    free = f"{_gib(usage.free)} of {_gib(usage.total)} free for Ray in {folder}"
    remedy = (
        f"delete old sessions (`{folder}/session_*`), or another disk: ray start --head --temp-dir=<folder>, or "
        "RAY_TMPDIR=<folder> for a Ray that the run starts"
    )
    if not os.access(there, os.W_OK):
        yield fail(name, f"{there} cannot be written to by this user; Ray's sessions go to {folder}", remedy)
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
        yield fail(
            "open files", text, "ulimit -Hn 65536 before `ray start` (root), docker run --ulimit nofile=65536:65536"
        )


def _gib(number: float) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"
