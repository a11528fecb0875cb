# SPDX-License-Identifier: Apache-2.0
"""Layers that compute with something other than their parameters: a packed copy that an update does not make again."""

from collections.abc import Callable

import torch
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from flashrl_verl.quantization.numerics import as_bytes
from flashrl_verl.quantization.parameter import QuantizedStorage


def layers_with_stale_copies(model: torch.nn.Module, process_weights: Callable[[], None]) -> list[str]:
    """Names of layers whose output does not change when all their weights (or scales) go from 1 to 2.

    The same weights sent again would not show such a copy: it is a copy of them. Of codes and scales one may be copied
    while the other is read where it lies, so each is changed alone. (NaN would not tell that.) All weights are
    overwritten.

    Args:
        model: a vLLM model.
        process_weights: vLLM's post-processing of it.
    """
    products: list[dict[str, list[torch.Tensor]]] = []
    # Scales are parameters too: their weights come after them, and say what they are.
    stored = sorted(model.parameters(), key=lambda parameter: isinstance(parameter, QuantizedStorage))
    for value, scale in ((1.0, 1.0), (2.0, 1.0), (1.0, 2.0)):
        for parameter in stored:
            if isinstance(parameter, QuantizedStorage):
                code = torch.tensor(value).to(parameter.format.dtype)
                as_bytes(parameter.data).fill_(int(as_bytes(code)))
                parameter.scales.data.fill_(scale)
            elif parameter.is_floating_point() and parameter.dtype.itemsize > 1:
                parameter.data.fill_(value * scale)
        process_weights()
        products.append(_products(model))
    names, equal = [], []
    for name, ones in products[0].items():
        names.append(name)
        twos = [two for other in products[1:] for two in other[name]]
        equal.append(torch.stack([(a == b).any() for a, b in zip(ones * 2, twos, strict=True)]).any())
    return [name for name, stale in zip(names, torch.stack(equal).tolist(), strict=True) if stale]


def _products(model: torch.nn.Module) -> dict[str, list[torch.Tensor]]:
    """What every linear layer and a head of its own make of ones."""
    found = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module, LinearBase | ParallelLMHead):
            weight = module.weight
            dtype = module.flashrl_dtype if isinstance(weight, QuantizedStorage) else weight.dtype
            found[name] = [
                method.apply(module, torch.ones(1, weight.shape[1], dtype=dtype, device=weight.device), None)
            ]
    return found
