# SPDX-License-Identifier: Apache-2.0
"""Attention over a KV cache of INT8 codes with a scale for each token and head."""

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


def kv_cache_arguments(kv_cache: KVCache) -> dict[str, str]:
    """Arguments of a vLLM engine for a KV cache on this process's device.

    Raises:
        ConfigError: another plugin has the name that our attention needs.
    """
    from vllm.platforms import current_platform

    arguments = {"kv_cache_dtype": kv_cache.value}
    if kv_cache is KVCache.INT8_PER_TOKEN_HEAD and current_platform.is_cuda():
        if (other := register_attention()) is not None:
            raise ConfigError(
                f"flashrl.kv_cache={kv_cache.value}: its attention needs vLLM's name {limits.NAME}, which another "
                f"plugin has given to {other}. Uninstall that plugin, or leave it out of VLLM_PLUGINS. {limits.REMEDY}"
            )
        arguments["attention_backend"] = limits.NAME
    return arguments
