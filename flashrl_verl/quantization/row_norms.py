# SPDX-License-Identifier: Apache-2.0
"""Norms of a projection's rows as the engine holds them: a Triton kernel on CUDA, torch ops elsewhere.

Every update with an FP8 KV cache asks for those of all q/k/v projections (``rollout/kv_scales.py``), 7 to 13 % of a dense
model's weights: torch would write each of them several times over in float32, the kernel reads the codes once.
"""

import torch

from flashrl_verl.quantization.parameter import QuantizedStorage

_ROWS = 1024
"""Rows that are in float32 at a time where there is no kernel."""


def row_norms(layer: torch.nn.Module, gains: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Return ``||w_j * gains||_2`` of rows ``first`` and following of a linear layer.

    Args:
        layer: with ``weight`` [N, K], quantized by rows or floating point.
        gains: [K] floating point.
        first: row to begin with.

    Returns:
        [N - first] float32, on the weight's device; NaN or Inf where a row, its scale or a gain is.
    """
    weight = layer.weight
    rows = weight.data[first:]
    scales = weight.row_scales.view(-1)[first:] if isinstance(weight, QuantizedStorage) else None
    if weight.is_cuda:
        from flashrl_verl.quantization.triton_norms import row_norms_on_gpu  # Triton is only where a GPU is

        norms = row_norms_on_gpu(rows, gains)
    else:
        parts = [(part.float() * gains.float()).norm(dim=1) for part in rows.split(_ROWS)]
        norms = torch.cat(parts)
    return norms if scales is None else norms * scales
