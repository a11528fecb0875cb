# SPDX-License-Identifier: Apache-2.0
"""The 8-bit formats on disk: compressed-tensors, W8A8, the rollout's codes and FP32 scales by output channel or block.

vLLM and transformers read it without this package. vLLM keeps ``weight_scale`` in FP32, so what it multiplies is bit by bit
what the rollout multiplied; it quantizes activations by token, or group of a token's values, when it runs, as the rollout does.
Of ``fp8_block`` that holds unless vLLM takes DeepGEMM, which it prefers on Hopper and Blackwell where it finds it: there it
quantizes the codes again, to scales that are powers of two, and rounds those of activations up. ``VLLM_USE_DEEP_GEMM=0`` keeps
it from that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from flashrl_verl.errors import ConfigError
from flashrl_verl.export.layers import Layers
from flashrl_verl.quantization.numerics import WeightFormat, quantize


def quantization_config(layers: Layers, fmt: WeightFormat) -> dict[str, Any]:
    """Return config.json's ``quantization_config``."""
    number = {"num_bits": 8, "type": "int" if fmt.rounds_to_integers else "float", "symmetric": True}
    kind = "int-quantized" if fmt.rounds_to_integers else "float-quantized"
    weights: dict[str, Any] = {"strategy": "channel"}
    activations: dict[str, Any] = {"strategy": "token"}
    if fmt.block is not None:
        weights = {"strategy": "block", "block_structure": [fmt.block, fmt.block]}
        activations = {"strategy": "group", "group_size": fmt.block}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": list(layers.kept),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": kind,
                "weights": {**number, **weights, "dynamic": False},
                "input_activations": {**number, **activations, "dynamic": True},
            }
        },
    }


def require_whole_blocks(shapes: Mapping[str, Sequence[int]], layers: Layers, fmt: WeightFormat) -> None:
    """Refuse what the rollout has no codes for. Args: shapes: of the checkpoint's tensors, by name; the rest as ``encode``'s.

    Raises:
        ConfigError: a quantized weight is not made of the format's blocks.
    """
    for name in (f"{layer}.weight" for layer in layers.quantized):
        rows, columns = shapes[name]
        if fmt.block is not None and (rows % fmt.block or columns % fmt.block):
            raise ConfigError(
                f"--format {fmt.name}: {name} is {rows} x {columns}, not whole blocks of {fmt.block} x {fmt.block}. Take "
                "--format fp8, which takes any shape, or name the layer in --ignore"
            )


def encode(
    weights: Iterable[tuple[str, torch.Tensor]], layers: Layers, fmt: WeightFormat
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield BF16 tensors as they are and those of ``layers.quantized`` as codes and scales.

    Args:
        weights: (checkpoint's name, BF16 tensor) pairs.
        layers: which are quantized; a quantized ``weight`` is [N, K].
        fmt: of the codes.

    Yields:
        ``<layer>.weight`` [N, K] of ``fmt.dtype`` and ``<layer>.weight_scale`` float32 for a quantized one, [N, 1] or with
        blocks of B [N / B, K / B].
    """
    chosen = {f"{layer}.weight" for layer in layers.quantized}
    for name, tensor in weights:
        if name not in chosen:
            yield name, tensor
            continue
        codes, scales = quantize(tensor, fmt)
        yield name, codes
        yield f"{name}_scale", scales
