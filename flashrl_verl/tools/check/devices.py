# SPDX-License-Identifier: Apache-2.0
"""What hardware this machine has, and what driver and torch make of it. Nothing of vLLM is imported."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path


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
