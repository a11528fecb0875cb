# SPDX-License-Identifier: Apache-2.0
"""Names of what the child processes look at; importing this imports neither verl nor vLLM."""

from __future__ import annotations

from flashrl_verl.settings import Precision
from flashrl_verl.tools.check.settings import CheckSettings

CLUSTER, ALIKE, GPUS = "cluster", "nodes alike", "GPUs alike"
VERL_PLUGIN, IMPORTED = "verl plugin", "imported versions"
VLLM_PLUGIN, DRIVER, DEVICE, ROW_KERNEL = "vLLM plugin", "driver", "device", "row kernel"
ATTENTION = "INT8 attention"


def kernel(precision: Precision) -> str:
    return f"{precision.value} kernel"


def numerics(precision: Precision) -> str:
    return f"{precision.value} numerics"


def experts(precision: Precision) -> str:
    return f"{precision.value} experts"


def of_precision(precision: Precision) -> tuple[str, ...]:
    """What is said of a precision, in the order: its kernel, and what it computes with it."""
    quantized = precision is not Precision.BF16
    return (kernel(precision), numerics(precision), *([experts(precision)] if quantized else []))


def of_verl_process() -> tuple[str, ...]:
    """What `verl_process.run` says in any case."""
    return (VERL_PLUGIN, IMPORTED)


def of_vllm_process(settings: CheckSettings) -> tuple[str, ...]:
    """What `vllm_process.run` says in any case, in its order."""
    by_precision = [name for precision in settings.precisions for name in of_precision(precision)]
    return (VLLM_PLUGIN, DRIVER, DEVICE, ROW_KERNEL, *by_precision, ATTENTION)
