# SPDX-License-Identifier: Apache-2.0
"""The 8-bit formats on disk: compressed-tensors, W8A8, the rollout's codes and FP32 scales by output channel.

vLLM and transformers read it without this package. vLLM keeps ``weight_scale`` in FP32, so what it multiplies is bit by
bit what the rollout multiplied; it quantizes activations by token when it runs, as the rollout does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from flashrl_verl.quantization.numerics import WeightFormat, quantize_rows
from benchmarks.legacy_learning.tools.export.layers import Layers


def quantization_config(layers: Layers, fmt: WeightFormat) -> dict[str, Any]:
    """Return config.json's ``quantization_config``."""
    number = {"num_bits": 8, "type": "int" if fmt.rounds_to_integers else "float", "symmetric": True}
    kind = "int-quantized" if fmt.rounds_to_integers else "float-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": list(layers.kept),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": kind,
                "weights": {**number, "strategy": "channel", "dynamic": False},
                "input_activations": {**number, "strategy": "token", "dynamic": True},
            }
        },
    }


def encode(
    weights: Iterable[tuple[str, torch.Tensor]], layers: Layers, fmt: WeightFormat
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield BF16 tensors as they are and those of ``layers.quantized`` as codes and scales.

    Args:
        weights: (checkpoint's name, BF16 tensor) pairs.
        layers: which are quantized; a quantized ``weight`` is [N, K].
        fmt: of the codes.

    Yields:
        ``<layer>.weight`` [N, K] of ``fmt.dtype`` and ``<layer>.weight_scale`` [N, 1] float32 for a quantized one.
    """
    chosen = {f"{layer}.weight" for layer in layers.quantized}
    for name, tensor in weights:
        if name not in chosen:
            yield name, tensor
            continue
        codes, scales = quantize_rows(tensor, fmt)
        yield name, codes
        yield f"{name}_scale", scales
