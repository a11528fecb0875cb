# SPDX-License-Identifier: Apache-2.0
"""Entry point ``vllm.general_plugins``: makes the quantization config ``flashrl``, and the attention backend for INT8 keys and
values, known in every vLLM process."""


def register() -> None:
    """Register both. Idempotent: vLLM calls it once per process, tests may call it again."""
    from vllm.platforms import current_platform

    from flashrl_verl.quantization import config  # noqa: F401 - importing it registers

    if current_platform.is_cuda():
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        # By name: the module needs Triton and FlashAttention, and only an engine with such a cache imports it.
        register_backend(AttentionBackendEnum.CUSTOM, "flashrl_verl.attention.backend.Int8KVBackend")
