# SPDX-License-Identifier: Apache-2.0
"""Weights that cannot pass for weights: what an update does not write, and what does not follow an update, shows."""

import torch
from vllm.model_executor.layers.linear import LinearBase

from flashrl_verl.quantization.moe import RowQuantizedMoEMethod
from flashrl_verl.quantization.parameter import QuantizedStorage


def poison(parameters: dict[str, torch.nn.Parameter]) -> None:
    """Overwrite all storage so that nothing that is not written can pass for a weight."""
    for parameter in parameters.values():
        if isinstance(parameter, QuantizedStorage):
            parameter.poison()
        elif parameter.is_floating_point() and parameter.dtype.itemsize > 1:
            parameter.data.fill_(float("nan"))


def untouched_layers(model: torch.nn.Module) -> list[str]:
    """Names of the linear layers and experts that give finite numbers although their weights are poisoned.

    Such a layer computes with something that does not follow its parameters: a packed copy that was not made again.

    Args:
        model: a vLLM model after ``poison`` and vLLM's post-processing.
    """
    names, finite = [], []
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module, LinearBase):
            weight = module.weight
            dtype = module.flashrl_dtype if isinstance(weight, QuantizedStorage) else weight.dtype
            products = [method.apply(module, torch.ones(1, weight.shape[1], dtype=dtype, device=weight.device), None)]
        elif isinstance(method, RowQuantizedMoEMethod):
            products = method.packed_products(module)
        else:
            continue
        names += [name] * len(products)
        finite += [product.isfinite().any() for product in products]
    flags = torch.stack(finite).tolist() if finite else []
    return list(dict.fromkeys(name for name, bad in zip(names, flags, strict=True) if bad))
