# SPDX-License-Identifier: Apache-2.0
"""Entry point ``vllm.general_plugins``: makes the quantization config ``flashrl``, and the attention backend for INT8
keys and values, known in every vLLM process."""


def register() -> None:
    """Register both. Idempotent: vLLM calls it once per process, tests may call it again."""
    from flashrl_verl.attention import register_attention
    from flashrl_verl.quantization import config  # noqa: F401 - importing it registers

    register_attention()
