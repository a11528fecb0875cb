# SPDX-License-Identifier: Apache-2.0
"""Weights that cannot pass for weights: what an update does not write, and what does not follow an update, shows."""

from collections.abc import Callable

import torch
from vllm.model_executor.layers.linear import LinearBase

from flashrl_verl.quantization.moe import QuantizedMoEMethod
from flashrl_verl.quantization.numerics import as_bytes
from flashrl_verl.quantization.parameter import QuantizedStorage
from flashrl_verl.rollout.receipt import to_host


def poison(parameters: dict[str, torch.nn.Parameter]) -> None:
    """Overwrite all storage so that nothing that is not written can pass for a weight."""
    for parameter in parameters.values():
        if isinstance(parameter, QuantizedStorage):
            parameter.poison()
        elif parameter.is_floating_point() and parameter.dtype.itemsize > 1:
            parameter.data.fill_(float("nan"))


def deaf_layers(
    model: torch.nn.Module, parameters: dict[str, torch.nn.Parameter], process_weights: Callable[[], None]
) -> list[str]:
    """Names of the linear layers and experts whose products are the same for weights of 1 and 2, by codes or by scales.

    Such a layer computes with something that does not follow its parameters: a packed copy that is not made again. Of codes and
    scales one may be such a copy while the other is read where it lies, so each is changed alone. (NaN would not tell that.)
    All weights are overwritten.

    Args:
        model: a vLLM model.
        parameters: all of its.
        process_weights: vLLM's post-processing of it.
    """
    products: list[dict[str, list[torch.Tensor]]] = []
    # Scales are in `parameters` too: their weights come after them, and say what they are.
    stored = sorted(parameters.values(), key=lambda parameter: isinstance(parameter, QuantizedStorage))
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
    return [name for name, deaf in zip(names, to_host(equal), strict=True) if deaf]


def _products(model: torch.nn.Module) -> dict[str, list[torch.Tensor]]:
    """What every linear layer and the packed experts make of ones."""
    found = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module, LinearBase):
            weight = module.weight
            dtype = module.flashrl_dtype if isinstance(weight, QuantizedStorage) else weight.dtype
            found[name] = [method.apply(module, torch.ones(1, weight.shape[1], dtype=dtype, device=weight.device), None)]
        elif isinstance(method, QuantizedMoEMethod) and (packed := method.packed_products(module)):
            found[name] = packed
    return found
