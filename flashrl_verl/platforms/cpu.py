# SPDX-License-Identifier: Apache-2.0
"""verl platform ``cpu``: trains without an accelerator, for trying a recipe and for tests.

It is never auto-detected (``is_platform_available`` is False): a driver fault must not turn into training on a CPU.
Ray's logical resource "GPU" is borrowed (``ray_init.num_gpus``), so verl's resource pools need no change.
"""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class _CpuDeviceModule(types.ModuleType):
    """``torch.cpu`` with the rest of ``torch.cuda``'s surface that verl calls whatever the device is."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        return False  # verl's memory helpers then do nothing

    def empty_cache(self) -> None:
        pass

    def memory_allocated(self, *args) -> int:
        return 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def mem_get_info(self, *args) -> tuple[int, int]:
        return 0, 0

    def get_device_name(self, *args) -> str:
        return "CPU"

    def set_rng_state(self, state: torch.Tensor, *args) -> None:
        torch.set_rng_state(state)  # as verl resumes: a checkpoint has a state called cpu


_DEVICE_MODULE = _CpuDeviceModule("flashrl_cpu_device")


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """One process, one device, gloo, no IPC (weights travel through shared memory)."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _DEVICE_MODULE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False

    def current_device(self) -> torch.device:
        return torch.device("cpu")  # verl hands it to .to() and device=, where an index would mean an accelerator

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
