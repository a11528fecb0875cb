# SPDX-License-Identifier: Apache-2.0
"""One machine: its versions, memory and network, and fresh processes that load our plugins as verl and vLLM do.

Only ``in_verl`` and ``in_vllm``, which run in those processes, import verl or vLLM.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from omegaconf import OmegaConf

import flashrl_verl
from flashrl_verl.plugins import versions
from flashrl_verl.plugins.versions import DISTRIBUTION, INSTALL_COMMAND, TESTED, Status, find
from flashrl_verl.rollout.access import loopback_address
from flashrl_verl.settings import KVCache, Precision
from flashrl_verl.tools.check import Finding, error, guarded, ok, warning

LIMIT_S = 600.0
"""Longest time of the fresh processes, seconds. They take half a minute on two idle cores, nearly all of it imports."""

INSTALL = "pip install --no-deps -e <flashrl-verl>"
BUCKET_KEY = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"

_PLUGIN = "flashrl"
"""Name of both entry points; not imported, for importing the plugin would already register it."""
_CONNECT_S = 10.0
_GPU_SHARED_GIB = 1.0
"""Shared memory for vLLM's queues (10 chunks of 16 MiB an engine, 10 of 24 MiB a worker) and NCCL's buffers:
some hundred MiB for 8 GPUs. Docker's default is 64 MiB."""
_FREE = 0.9
"""Share of a GPU's memory that is free where no other program runs."""
_SENT = "py_modules_files"
"""Part of the path of what Ray sent to a node."""


def look(
    precisions: Sequence[Precision], kv_cache: KVCache, ranks: bool = True, address: str | None = None
) -> Iterator[Finding]:
    """Look at this machine.

    Args:
        precisions: to compute in.
        kv_cache: whose attention to compute; none for ``auto``.
        ranks: whether ranks of a run come here. They do not to a cluster's node that offers Ray no GPU; kernels and
            memory are not looked at then.
        address: of this node, as Ray has it; None where there is no cluster yet.
    """
    yield from guarded("versions", check_versions)
    yield from guarded(DISTRIBUTION, check_package)
    yield from guarded("network", check_network, address)
    if ranks:
        yield from guarded("shared memory", check_shared_memory, Path("/dev/shm"))
        yield from guarded("fresh processes", fresh_processes, precisions, kv_cache)


# ---- versions ----


def check_versions() -> Iterator[Finding]:
    """Compare what is installed with what this release was run with, by its metadata."""
    python, tested = platform.python_version(), versions.TESTED_PYTHON
    if python.rpartition(".")[0] in tested:
        yield ok("Python", python)
    else:
        remedy = f"FLASHRL_PYTHON=python{tested[-1]} {INSTALL_COMMAND}"
        yield warning("Python", f"{python} has not been run (tested: {' or '.join(tested)})", remedy)
    for name, component in TESTED.items():
        found = find(component)
        level = {Status.OK: ok, Status.UNTESTED: warning}.get(found.status, error)
        yield level(name, str(found.installed if level is ok else found))


def check_package() -> Iterator[Finding]:
    """This package is installed, so that verl and vLLM find its plugins, in the release of its code."""
    code = Path(flashrl_verl.__file__).resolve().parent
    try:
        installed = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        yield error(DISTRIBUTION, f"{code} is importable but not installed: no process would find its plugins", INSTALL)
        return
    if installed.version != flashrl_verl.__version__:
        text = f"the installed metadata is of {installed.version}, the code in {code} of {flashrl_verl.__version__}"
        yield error(DISTRIBUTION, text, f"{INSTALL}, and nothing older on PYTHONPATH")
        return
    yield ok(DISTRIBUTION, f"{installed.version}, {'sent by Ray' if _SENT in str(code) else code}")


def facts() -> dict[str, str]:
    """What has to be the same on every node: name -> version; of this package with a checksum of its code and YAML."""
    folder, digest = Path(flashrl_verl.__file__).parent, hashlib.sha256()
    for path in sorted(path for pattern in ("*.py", "*.yaml") for path in folder.rglob(pattern)):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes())
    versions = {name: find(component).installed or "none" for name, component in TESTED.items()}
    ours = f"{flashrl_verl.__version__} ({digest.hexdigest()[:12]})"
    return {"Python": platform.python_version(), **versions, DISTRIBUTION: ours}


# ---- memory ----


def gpus() -> list[tuple[str, int, int]]:
    """Name, free MiB and total MiB of every GPU of this machine, by nvidia-smi; empty without it."""
    try:
        command = ["nvidia-smi", "--query-gpu=name,memory.free,memory.total", "--format=csv,noheader,nounits"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rsplit(", ", 2) for line in told.splitlines()]
    # GPUs that share the host's memory say [N/A].
    return [(name, *(int(mib) if mib.isdigit() else 0 for mib in sizes)) for name, *sizes in rows]


def cards(found: Sequence[tuple[str, int, int]]) -> str:
    """Such as "8 x NVIDIA H200"."""
    return ", ".join(f"{count} x {name}" for name, count in Counter(name for name, _, _ in found).items()) or "no GPU"


def check_shared_memory(folder: Path) -> Iterator[Finding]:
    """Compare the free space in ``folder`` with what a run puts there: with GPUs vLLM's and NCCL's buffers, on a CPU
    the bucket that weights travel in."""
    free, need, user = shutil.disk_usage(folder).free / 2**30, _GPU_SHARED_GIB, "vLLM's queues and NCCL's buffers"
    remedy = "docker run --shm-size=<size>, a medium: Memory volume in Kubernetes, or delete files there"
    if not (found := gpus()):
        if (verl := importlib.util.find_spec("verl")) is None:
            return  # the versions say so
        defaults = Path(verl.submodule_search_locations[0], "trainer", "config", "rollout", "rollout.yaml")
        need = OmegaConf.load(defaults).checkpoint_engine.update_weights_bucket_megabytes / 2**10
        user = "verl's default bucket of weights"
        remedy += f"; or a smaller bucket, as the quickstart's, not below the largest tensor: {BUCKET_KEY}=<MiB>"
    text = f"{free:.2f} GiB free in {folder}, {need:.2f} GiB needed for {user}"
    if free >= need:
        yield ok("shared memory", text)
    else:
        yield (error if found else warning)("shared memory", f"{text}: a run would end in a bus error", remedy)


# ---- network ----


def check_network(address: str | None) -> Iterator[Finding]:
    """Where Ray, gloo, NCCL and the engines' servers listen can be listened, and reached from here."""
    wrong, several = [], address is not None and not address.startswith("127.")
    if address is None:
        import ray

        address = ray.util.get_node_ip_address()
    for place in (loopback_address(0), address):
        if why := _cannot_talk(place):
            remedy = "`ip link set lo up`, or ray start --node-ip-address=<another>; no firewall or VPN in between"
            wrong.append(error("network", f"this machine does not reach its own address {place}: {why}", remedy))
    names = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = os.environ.get(variable) or "^"  # behind "^" is what NCCL does not use
        words = value.removeprefix("=").split(",")
        if value[0] != "^" and not any(name.startswith(word) for word in words for name in names):
            text = f"{variable}={value}, but this machine has {', '.join(names)}"
            wrong.append(error("network", text, f"{variable}=<one of them> in the environment of `ray start`"))
    if several and not os.environ.get("GLOO_SOCKET_IFNAME"):
        wrong += _check_host_name(socket.gethostname())
    yield from wrong or [ok("network", f"this machine reaches its addresses 127.0.0.1 and {address}")]


def _cannot_talk(address: str) -> str | None:
    """Why nothing can listen at an address and be reached there from this machine; None if it can."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
            listener.bind((address, 0))
            listener.listen(1)
            with socket.create_connection(listener.getsockname()[:2], timeout=_CONNECT_S):
                return None
    except OSError as raised:
        return f"{type(raised).__name__}: {raised}"


def _check_host_name(host: str) -> list[Finding]:
    """gloo listens on the address of the host's name."""
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except OSError:
        addresses = []
    if any(not a.startswith("127.") and a != "::1" and _cannot_talk(a) is None for a in addresses):
        return []
    text = f"the host name {host} is {', '.join(addresses) or 'no address'}: other nodes do not reach gloo there"
    return [warning("network", text, "on several nodes GLOO_SOCKET_IFNAME=<interface>, or an entry in /etc/hosts")]


# ---- fresh processes ----


def fresh_processes(precisions: Sequence[Precision], kv_cache: KVCache) -> Iterator[Finding]:
    """Look from a new Python as verl's processes are, and one as vLLM's are, at the same time. What they found before
    they crashed or hung is told too."""
    words = [",".join(precision.value for precision in precisions), kv_cache.value]
    # Not as a file or module: that would put its own folder, or the working directory, on the path.
    program = "import sys; from flashrl_verl.tools.check.machine import child; child(*sys.argv[1:])"
    with tempfile.TemporaryDirectory(prefix="flashrl-check-") as folder:
        running = {}
        for name in ("verl", "vllm"):
            Path(folder, name).touch()
            with Path(folder, f"{name}.log").open("wb") as log:
                command = [sys.executable, "-c", program, name, str(Path(folder, name)), *words]
                running[name] = subprocess.Popen(
                    command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
                )
        deadline = time.monotonic() + LIMIT_S
        try:
            for name, process in running.items():
                try:
                    code = process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    code = None
                found = Path(folder, name).read_text().splitlines(keepends=True)
                # The end of a process may cut its last line off.
                yield from (Finding(**json.loads(line)) for line in found if line.endswith("\n"))
                if code != 0:
                    said = Path(folder, f"{name}.log").read_text(errors="replace").strip().rpartition("\n")[-1]
                    ended = f"ended with {code}" if code is not None else f"did not end within {LIMIT_S:g} s"
                    text = f"a fresh process for {name} {ended}. Its last words: {said or 'none'}"
                    yield error(f"{name} process", text, f"what they say; else tested versions: {INSTALL_COMMAND}")
        finally:
            for process in running.values():
                process.kill()
                process.wait()


def child(name: str, path: str, precisions: str, kv_cache: str) -> None:
    """What the process for ``name`` does; its findings go to ``path``, a JSON line each."""
    words = ([Precision(word) for word in precisions.split(",")], KVCache(kv_cache)) if name == "vllm" else ()
    with open(path, "w", buffering=1) as stream:
        for finding in guarded(f"{name} process", {"verl": in_verl, "vllm": in_vllm}[name], *words):
            stream.write(json.dumps(asdict(finding)) + "\n")


def in_verl() -> Iterator[Finding]:
    """verl has loaded our plugin by itself, and gets replica, adapter and trainer from it."""
    import verl  # noqa: F401 - it loads the plugins at the end of its import
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY, get_rollout_class
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    if (_PLUGIN, "async") not in _ROLLOUT_REGISTRY:
        yield _why_not("verl plugin", "verl.plugins", "VERL_USE_EXTERNAL_PLUGINS", lambda point: point.load())
        return
    try:
        import verl.trainer.ppo.v1  # noqa: F401 - the trainer registers after it
        from verl.trainer.ppo.v1.trainer_base import get_trainer_cls

        classes = (RolloutReplicaRegistry.get(_PLUGIN), get_rollout_class(_PLUGIN, "async"), get_trainer_cls(_PLUGIN))
    except Exception as raised:  # noqa: BLE001 - a missing hook, or verl's and vLLM's own imports
        text = f"registered, but its classes cannot be imported: {type(raised).__name__}: {raised}"
        yield error("verl plugin", text, f"what the error names; else tested versions: {INSTALL_COMMAND}")
        return
    yield ok("verl plugin", f"a fresh process loads it: {', '.join(cls.__name__ for cls in classes)}")


def in_vllm(precisions: Sequence[Precision], kv_cache: KVCache) -> Iterator[Finding]:
    """vLLM has loaded our plugin by its own function; then its device, and the kernels there."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.plugins import load_general_plugins

    try:
        load_general_plugins()
        failed = None
    except Exception as raised:  # noqa: BLE001 - vLLM guards the import of a plugin, not its call
        failed = raised
    if _PLUGIN not in QUANTIZATION_METHODS:
        yield _why_not("vLLM plugin", "vllm.general_plugins", "VLLM_PLUGINS", lambda point: point.load()())
        return  # what follows imports what the plugin was to register
    if failed is not None:  # another package's
        raise failed
    yield ok("vLLM plugin", f"a fresh process loads it: quantization={_PLUGIN}")

    here = gpus()
    try:
        device = versions.vllm_device()
        import torch

        places = [torch.device("cpu")]
        if device == "cuda":
            places = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    except Exception as raised:  # noqa: BLE001 - ours, vLLM's or torch's; none says it better
        yield error("device", str(raised), "`nvidia-smi` has to list GPUs; in a container docker run --gpus all")
        return
    text = f"vLLM's {device} backend; {cards(here)}"
    taken = [f"GPU {i}: {free} of {total} MiB" for i, (_, free, total) in enumerate(here) if free < _FREE * total]
    if taken:
        remedy = "end it (nvidia-smi), or lower actor_rollout_ref.rollout.gpu_memory_utilization"
        yield warning("device", f"{text}; another program holds memory, free is {', '.join(taken)}", remedy)
    else:
        yield ok("device", text)

    from flashrl_verl.tools.check import kernels

    for precision in precisions:
        yield from guarded(f"{precision.value} numerics", kernels.check_precision, precision, places)
    if kv_cache is not KVCache.AUTO:
        yield from guarded(f"{kv_cache.value} attention", kernels.check_attention, kv_cache, places)


def _why_not(
    subject: str, group: str, variable: str, load: Callable[[importlib.metadata.EntryPoint], object]
) -> Finding:
    """Why a plugin has not registered, of which verl and vLLM say nothing. ``variable`` lists plugins to load, and
    ``load`` does with an entry point what its host does."""
    points = [point for point in importlib.metadata.entry_points(group=group) if point.name == _PLUGIN]
    if not points:
        return error(subject, f"there is no entry point {_PLUGIN} in {group}", INSTALL)
    try:
        load(points[0])
    except Exception as raised:  # noqa: BLE001 - the reason
        text = f"{points[0].value} raises {type(raised).__name__}: {raised}"
        return error(subject, text, f"what the error names; else tested versions: {INSTALL_COMMAND}")
    if variable in os.environ:
        text = f"{variable}={os.environ[variable]} leaves {_PLUGIN} out"
        return error(subject, text, f"unset {variable}, or add {_PLUGIN}, on every node before `ray start`")
    text = f"{points[0].value} can be loaded, but its host has not"
    return error(subject, text, f"tested versions: {INSTALL_COMMAND}")
