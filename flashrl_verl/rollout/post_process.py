# SPDX-License-Identifier: Apache-2.0
"""vLLM's processing of weights after loading, without its walks over the model where those are not needed."""

from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.v1.attention.backend import AttentionImplBase


class PostProcess:
    """Called at the end of every update.

    vLLM's function walks all modules several times under a guard for CPU offloading, 8 ms for 14B, as long as loading takes.
    After it has run once, only the quantization methods have anything to do with weights, as long as nothing else in the model
    has a post-processing of its own (multi-head latent attention has: it derives tensors from weights). Then only they are
    called.

    Args:
        model: a vLLM model.
        model_config: vLLM's configuration of it.
        device: where its parameters are.
    """

    def __init__(self, model: torch.nn.Module, model_config: Any, device: torch.device):
        self._model, self._model_config, self._device = model, model_config, device
        modules = list(model.modules())
        methods = [(getattr(module, "quant_method", None), module) for module in modules]
        self._methods = [(method, module) for method, module in methods if isinstance(method, QuantizeMethodBase)]
        others = [m for m in modules if hasattr(m, "process_weights_after_loading") and not _derives_nothing(m)]
        self._ran = False
        self._always_whole = bool(others)

    def __call__(self) -> None:
        if self._always_whole or not self._ran:
            process_weights_after_loading(self._model, self._model_config, self._device)
            self._ran = True
            return
        for method, module in self._methods:
            method.process_weights_after_loading(module)


def _derives_nothing(module: torch.nn.Module) -> bool:
    """Whether it is an ordinary attention layer whose backend leaves vLLM's hook empty (FlashInfer copies sinks there)."""
    if type(module) is not Attention:
        return False
    hook = type(module.impl).process_weights_after_loading
    return hook is AttentionImplBase.process_weights_after_loading
