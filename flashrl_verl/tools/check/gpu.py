# SPDX-License-Identifier: Apache-2.0
"""Driver, GPUs, and kernels for each precision; what was not looked at because there is no GPU says so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from flashrl_verl.errors import ConfigError
from flashrl_verl.plugins.versions import INSTALL_COMMAND
from flashrl_verl.quantization import numerics
from flashrl_verl.quantization.formats import weight_format
from flashrl_verl.quantization.gemm import choose_kernel
from flashrl_verl.quantization.kernels import quantize_rows_into
from flashrl_verl.quantization.numerics import WeightFormat, as_bytes
from flashrl_verl.settings import Precision
from flashrl_verl.tools.check.devices import Gpu
from flashrl_verl.tools.check.findings import Finding, fail, ok, skipped, warn
from flashrl_verl.tools.check.subjects import DEVICE, DRIVER, ROW_KERNEL, kernel

_FREE = 0.9
"""Share of a GPU's memory that should be free before a run, as nothing of it has started: engines take
``gpu_memory_utilization`` of all of it, and the trainer the rest."""

_ROWS, _LENGTHS = 48, (5120, 13824)
"""Rows and their lengths: one that stays in registers, one that is read twice (``quantization/kernels.py``)."""


def check_driver(devices: int, driver: tuple[int, int] | None, built: tuple[int, int] | None) -> Iterator[Finding]:
    """Compare the driver with the CUDA that torch was built with.

    Args:
        devices: NVIDIA GPUs of the machine.
        driver: newest CUDA (major, minor) of the driver; None without one.
        built: CUDA (major, minor) of torch; None for a build without it.
    """
    if built is None and devices:
        text = f"{devices} NVIDIA GPU(s) here, but torch is a build without CUDA: only hardware=cpu runs"
        yield warn(DRIVER, text, f"FLASHRL_DEVICE=cuda {INSTALL_COMMAND}")
    elif built is None:
        yield skipped(DRIVER, "no GPU here, and torch is a build without CUDA")
    elif driver is None:
        text = f"torch is built for CUDA {_dotted(built)}, and there is no driver (libcuda.so.1)"
        remedy = (
            "install the NVIDIA driver; in a container, docker run --gpus all with NVIDIA's container toolkit; from a "
            "login node look where the ranks run: through the scheduler, or --cluster"
        )
        yield fail(DRIVER, text, remedy)
    elif driver[0] < built[0]:  # within a major version older drivers run newer builds
        text = f"the driver runs CUDA up to {_dotted(driver)}, torch is built for {_dotted(built)}"
        yield fail(DRIVER, text, f"a newer driver, or torch and vLLM built for CUDA {driver[0]}")
    else:
        yield ok(DRIVER, f"CUDA up to {_dotted(driver)}, torch is built for {_dotted(built)}")


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def no_device(error: Exception) -> Finding:
    """The finding for a machine where vLLM or torch gets no device."""
    return fail(
        DEVICE,
        str(error),
        f"nvidia-smi has to list the GPUs, then CUDA_VISIBLE_DEVICES; or another build: {INSTALL_COMMAND}",
    )


def check_device(device: str, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """What vLLM runs on, and whether something else holds the GPUs' memory.

    Args:
        device: ``cpu`` or ``cuda``.
        gpus: all that this process sees.
    """
    if device == "cpu":
        yield ok(DEVICE, "vLLM's CPU backend, for hardware=cpu; no GPU was looked at")
        return
    taken = [g for g in gpus if g.free_bytes < _FREE * g.total_bytes]
    names = ", ".join(dict.fromkeys(f"{g.name} ({g.capability / 10:.1f})" for g in gpus))
    if taken:
        listed = ", ".join(f"{g.index}: {g.free_bytes / 2**30:.0f} of {g.total_bytes / 2**30:.0f} GiB" for g in taken)
        remedy = "end what holds it (nvidia-smi), or a lower actor_rollout_ref.rollout.gpu_memory_utilization"
        yield warn(DEVICE, f"{len(gpus)} x {names}; memory is free only in part on GPU {listed}", remedy)
    elif len({g.name for g in gpus}) > 1:
        yield warn(
            DEVICE, f"GPUs of different kinds: {names}", "CUDA_VISIBLE_DEVICES with one kind: the slowest sets the pace"
        )
    else:
        yield ok(DEVICE, f"{len(gpus)} x {names}")


def check_kernel(precision: Precision, device: str, capabilities: Sequence[int]) -> Iterator[Finding]:
    """Which kernel multiplies the precision here.

    Args:
        precision: of ``flashrl.precision``.
        device: ``cpu`` or ``cuda``.
        capabilities: of all GPUs, as 10 x major + minor.
    """
    name, fmt = kernel(precision), weight_format(precision)
    if fmt is None:
        yield ok(name, "torch's own linear: nothing is quantized")
        return
    try:
        choices = [choose_kernel(fmt, device, capability) for capability in capabilities or [0]]
    except ConfigError as error:
        text, _, remedy = str(error).partition(". Set ")
        yield fail(name, text, f"set {remedy}")
        return
    linear, experts = (", ".join(dict.fromkeys(c.value for c in which)) for which in
                       ([c.linear for c in choices], [c.experts for c in choices]))  # fmt: skip
    yield ok(name, f"{linear} for linear layers, {experts} for experts")


def check_row_kernel(precisions: Sequence[Precision], gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """The Triton kernels that quantize on load compile on every GPU and write the codes of
    ``quantization/numerics.py``.

    Args:
        precisions: those that are asked for; BF16 has none.
        gpus: all that this process sees.
    """
    formats = [fmt for fmt in map(weight_format, precisions) if fmt is not None]
    if not gpus or not formats:
        yield skipped(ROW_KERNEL, "there is no GPU" if formats else "no 8-bit precision was asked for")
        return
    places = [(g.index, torch.device("cuda", g.index)) for g in gpus]
    wrong = [f"{fmt.name} on GPU {index}" for index, place in places for fmt in formats if not _same_codes(fmt, place)]
    if wrong:
        text = f"other codes or scales than the reference: {', '.join(wrong)}"
        yield fail(ROW_KERNEL, text, "another GPU; `rm -r ~/.triton/cache`; tested versions of torch and Triton")
    else:
        yield ok(
            ROW_KERNEL,
            f"Triton compiles it; codes of {', '.join(f.name for f in formats)} are the reference's bit for bit",
        )


def _same_codes(fmt: WeightFormat, device: torch.device) -> bool:
    """Whether whole rows, and those of the second of two ranks that share the columns, get the reference's codes and
    scales."""
    for length in _LENGTHS:
        weight = torch.randn(_ROWS, length, generator=torch.Generator().manual_seed(length))
        # Each row has a size of its own, so that no scale passes for another's.
        weight = (weight * torch.logspace(-3, 0, _ROWS).unsqueeze(1) * torch.logspace(0, -2, length)).bfloat16()
        expected, expected_scales = numerics.quantize_rows(weight, fmt)
        for first in (0, length // 2):
            codes = torch.zeros(_ROWS, length - first, dtype=fmt.dtype, device=device)
            scales = torch.zeros(_ROWS, 1, device=device)
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                quantize_rows_into(weight.to(device), codes, scales, fmt, first)
            same = torch.equal(as_bytes(codes.cpu()), as_bytes(expected[:, first:].contiguous()))
            if not same or not torch.equal(scales.cpu(), expected_scales):
                return False
    return True
