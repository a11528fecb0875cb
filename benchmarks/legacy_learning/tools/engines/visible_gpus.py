# SPDX-License-Identifier: Apache-2.0
"""The GPUs that this process sees, for programs that it starts on some of them each."""

from __future__ import annotations

import os

from flashrl_verl.errors import ConfigError


def visible_gpus() -> tuple[str, ...]:
    """Their names by ``CUDA_VISIBLE_DEVICES``; none of their memory is taken."""
    import torch

    count = torch.cuda.device_count()
    named = [name for name in map(str.strip, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")) if name]
    # CUDA ignores a name that it does not know, and all behind it.
    return tuple(named[:count] if named else map(str, range(count)))


def gpu_groups(count: int, size: int) -> tuple[str | None, ...]:
    """Places for programs at the same time.

    Args:
        count: programs.
        size: GPUs of each.

    Returns:
        A value of ``CUDA_VISIBLE_DEVICES`` for each; for a single one None, which is all that this process sees.

    Raises:
        ConfigError: there are fewer GPUs. A single program of one need not have any: it runs on the CPU.
    """
    if count * size == 1:
        return (None,)
    gpus = visible_gpus()
    if len(gpus) < size:
        raise ConfigError(
            f"--tensor-parallel {size} needs as many GPUs, and {len(gpus)} are visible here. "
            f"Remedy: --tensor-parallel {1 << max(0, len(gpus).bit_length() - 1)}"  # heads are seldom divided by three
        )
    if count == 1:
        return (None,)
    if len(gpus) < count * size:
        raise ConfigError(
            f"--parallel {count} with {size} GPU(s) each needs {count * size}, and {len(gpus)} are visible here. "
            f"Remedy: --parallel {max(1, len(gpus) // size)}"
        )
    return tuple(",".join(gpus[i * size : (i + 1) * size]) for i in range(count))


def hardware_of(given: str | None) -> str:
    """``cuda`` or ``cpu``: what ``--hardware`` names; without it, ``cuda`` where there is a GPU.

    Raises:
        ConfigError: it is neither, or there is no GPU.
    """
    import torch

    there = torch.cuda.is_available()
    chosen = given or ("cuda" if there else "cpu")
    if chosen not in ("cuda", "cpu") or (chosen == "cuda" and not there):
        reason = "PyTorch finds no GPU here" if chosen == "cuda" else "it is neither cuda nor cpu"
        raise ConfigError(f"--hardware {chosen}: {reason}")
    return chosen
