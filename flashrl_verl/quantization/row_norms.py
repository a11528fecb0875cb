# SPDX-License-Identifier: Apache-2.0
"""Norms of a projection's rows as the engine holds them: a Triton kernel on CUDA, torch ops elsewhere.

Every update with an FP8 KV cache asks for those of all q/k/v projections (``rollout/kv_scales.py``), 7 to 13 % of a dense
model's weights: torch would write each of them several times over in float32, the kernel reads the codes once.
"""

import torch

from flashrl_verl.quantization.numerics import dequantize
from flashrl_verl.quantization.parameter import QuantizedStorage

_ROWS = 1024
"""Rows that are in float32 at a time where there is no kernel; whole blocks."""


def row_norms(layer: torch.nn.Module, gains: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Return ``||w_j * gains||_2`` of rows ``first`` and following of a linear layer.

    Args:
        layer: with ``weight`` [N, K], quantized or floating point.
        gains: [K] floating point.
        first: row to begin with; of a format with blocks, the first of one.

    Returns:
        [N - first] float32, on the weight's device; NaN or Inf where a row, its scale or a gain is.
    """
    weight = layer.weight
    rows = weight.data[first:]
    if not isinstance(weight, QuantizedStorage):
        return _norms(rows, gains)
    step = weight.format.rows_per_scale
    scales = weight.scale_rows[first // step :]
    if step == 1:
        return _norms(rows, gains) * scales.view(-1)
    # Scales differ along a row: some rows at a time as they are, whichever the device.
    parts = zip(rows.split(_ROWS), scales.split(_ROWS // step), strict=True)
    return torch.cat([(dequantize(codes, part) * gains.float()).norm(dim=1) for codes, part in parts])


def _norms(rows: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
    if rows.is_cuda:
        from flashrl_verl.quantization.triton_norms import row_norms_on_gpu  # Triton is only where a GPU is

        return row_norms_on_gpu(rows, gains)
    return torch.cat([(part.float() * gains.float()).norm(dim=1) for part in rows.split(_ROWS)])
