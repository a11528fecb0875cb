# SPDX-License-Identifier: Apache-2.0
"""What differs between vLLM's versions, 0.24 to 0.32, and is chosen by what is there."""

import importlib
from collections.abc import Callable


def cpu_select_experts() -> Callable:
    """vLLM's routing of tokens to experts on a CPU.

    Raises:
        ImportError: this vLLM has it nowhere that is known.
    """
    for module in ("router.cpu_router", "experts.cpu_moe", "cpu_fused_moe"):  # since 0.30, 0.28, 0.24
        try:
            found = importlib.import_module(f"vllm.model_executor.layers.fused_moe.{module}")
        except ModuleNotFoundError:
            continue
        if hasattr(found, "select_experts"):
            return found.select_experts
    raise ImportError("vLLM's select_experts for CPUs is in none of the modules of 0.24 to 0.32")


def backends_shape_kv_caches() -> bool:
    """Whether attention backends say which shape a KV cache has; since vLLM 0.29 the cache's specification does."""
    from vllm.v1.attention.backend import AttentionBackend

    return hasattr(AttentionBackend, "get_kv_cache_shape")
