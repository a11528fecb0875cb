# SPDX-License-Identifier: Apache-2.0
"""vLLM's method of a head that returns FP32 logits (``flashrl.fp32_lm_head``)."""

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from flashrl_verl.quantization.lm_head import fp32_logits


class Fp32HeadMethod(UnquantizedEmbeddingMethod):
    """vLLM's unquantized method but for ``apply``, which only the logits use; embeddings look up as before.

    ``weight`` keeps the model's dtype and its loader, so a refit, tied embeddings and sleep mode find what they know,
    and what ``apply`` reads is that parameter alone. Under tensor parallelism each rank multiplies its part of the
    vocabulary and vLLM gathers FP32 logits. vLLM 0.27 has ``hf_overrides["head_dtype"]`` for the same product; 0.24
    knows it for pooling models only, and this way serves both.
    """

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        pass  # on a CPU vLLM packs a copy here, for the product that `apply` replaces

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return fp32_logits(x, layer.weight, bias)
