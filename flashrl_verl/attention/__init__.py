# SPDX-License-Identifier: Apache-2.0
"""Attention over a KV cache of INT8 codes with a scale for each token and head."""

import json
from collections.abc import Mapping
from typing import Any

from flashrl_verl.attention import limits
from flashrl_verl.errors import ConfigError
from flashrl_verl.settings import KVCache
from flashrl_verl.upstream.versions import cuda_capability

_BACKEND = "flashrl_verl.attention.backend.Int8KVBackend"
"""By name: the module needs Triton and FlashAttention, and only an engine with such a cache imports it."""


def register_attention() -> str | None:
    """Take vLLM's name ``CUSTOM``, the only one for attention of others, unless another plugin has it.

    Returns:
        The other plugin's class; None where the name is ours, and on platforms without CUDA.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if not current_platform.is_cuda():
        return None
    if custom.is_overridden() and custom.get_path() != _BACKEND:
        return custom.get_path()
    register_backend(custom, _BACKEND)
    return None


def require_kv_kernel(kv_cache: KVCache) -> None:
    """Refuse a KV cache that no attention has on this process's device.

    Raises:
        ConfigError: there is none; the message says what to set instead.
    """
    if kv_cache is KVCache.AUTO:
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        raise ConfigError(f"flashrl.kv_cache={kv_cache.value} has no attention on a CPU. Set flashrl.kv_cache=auto")
    if (capability := cuda_capability()) < limits.CAPABILITY:
        raise ConfigError(
            f"flashrl.kv_cache={kv_cache.value} has no kernel for a GPU of compute capability {capability / 10:.1f}; "
            f"it needs at least {limits.CAPABILITY / 10:.1f}. Set flashrl.kv_cache=auto"
        )


def graphs_hold_prompts() -> bool:
    """Whether batches that read prompts have CUDA graphs of our attention, by ``cudagraph_mode=FULL``; by default
    they have none. With vLLM 0.24, in BF16, its answers were wrong (docs/LOG.md)."""
    from vllm.v1.attention.backend import AttentionBackend

    return hasattr(AttentionBackend, "customize_spec")  # since 0.29; run with 0.31


def kv_cache_arguments(kv_cache: KVCache, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a vLLM engine for a KV cache on this process's device, and those that are given, which win.

    Raises:
        ConfigError: another plugin has the name that our attention needs.
    """
    from vllm.platforms import current_platform

    arguments: dict[str, Any] = {"kv_cache_dtype": kv_cache.value, **given}
    if kv_cache is not KVCache.INT8_PER_TOKEN_HEAD or not current_platform.is_cuda():
        return arguments
    # vLLM takes attention's backend by this name or by that of its configuration, and not by both.
    backend = given.get("attention_backend") or _parsed(given.get("attention_config")).get("backend")
    if backend is not None and str(backend).upper() != limits.NAME:
        return arguments
    if (other := register_attention()) is not None:
        raise ConfigError(
            f"flashrl.kv_cache={kv_cache.value}: its attention needs vLLM's name {limits.NAME}, which another "
            f"plugin has given to {other}. Uninstall that plugin, or leave it out of VLLM_PLUGINS. {limits.REMEDY}"
        )
    if backend is None:
        arguments["attention_backend"] = limits.NAME
    if graphs_hold_prompts():
        arguments["compilation_config"] = {"cudagraph_mode": "FULL", **_parsed(given.get("compilation_config"))}
    return arguments


def _parsed(config: Mapping[str, Any] | str | None) -> Mapping[str, Any]:
    return json.loads(config) if isinstance(config, str) else config or {}
