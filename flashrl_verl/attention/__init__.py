# SPDX-License-Identifier: Apache-2.0
"""Attention over a KV cache of INT8 codes with a scale for each token and head."""

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


def require_shaped_caches() -> None:
    """Refuse a vLLM whose KV caches have a layout that our kernels have not run on.

    Raises:
        ConfigError: it is 0.29 or newer.
    """
    from flashrl_verl.attention.limits import REMEDY
    from flashrl_verl.errors import ConfigError
    from flashrl_verl.plugins.vllm_api import backends_shape_kv_caches

    if not backends_shape_kv_caches():
        raise ConfigError(
            "flashrl.kv_cache=int8_per_token_head: its attention has not run on the KV caches of vLLM 0.29 and newer. "
            f"{REMEDY}"
        )
