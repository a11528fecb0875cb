# SPDX-License-Identifier: Apache-2.0
"""Entry point ``vllm.general_plugins``: makes the quantization config ``flashrl`` known in every vLLM process."""


def register() -> None:
    """Register the quantization config. Idempotent: vLLM calls it once per process, tests may call it again."""
    from flashrl_verl.quantization import config  # noqa: F401 - importing it registers
