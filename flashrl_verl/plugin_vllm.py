# SPDX-License-Identifier: Apache-2.0
"""Entry point ``vllm.general_plugins``: makes the quantization config ``flashrl``, and the attention backend for INT8 keys and
values, known in every vLLM process."""

_ATTENTION = "flashrl_verl.attention.backend.Int8KVBackend"
"""By name: the module needs Triton and FlashAttention, and only an engine with such a cache imports it."""


def register() -> None:
    """Register both. Idempotent: vLLM calls it once per process, tests may call it again."""
    from flashrl_verl.quantization import config  # noqa: F401 - importing it registers

    register_attention()


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
    if custom.is_overridden() and custom.get_path() != _ATTENTION:
        return custom.get_path()
    register_backend(custom, _ATTENTION)
    return None
