# SPDX-License-Identifier: Apache-2.0
"""In which precision an engine computes its logits, found out by letting it compute some."""

import torch

from flashrl_verl.lm_head import FP32

_TOKENS = 4
"""Hidden states of the probe; even a toy vocabulary makes hundreds of logits of them, and FP32 values that all happen to be
BF16 values (one in 2^16 is) do not occur."""


def head_dtype(model: torch.nn.Module, hidden_size: int, dtype: torch.dtype, device: torch.device) -> str:
    """Ask a vLLM model for the logits of random hidden states. Every tensor-parallel rank has to call it: they are gathered.

    Logits in an FP32 tensor prove nothing (a model may cast them after the head rounded them): their values have to lie between
    those of the model's dtype.

    Args:
        model: with weights that are not all zero, real or dummy.
        hidden_size: H.
        dtype: the model's.
        device: where its weights are.

    Returns:
        "float32", or the model's dtype; "unknown" and the reason when the model takes no such input.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_TOKENS, hidden_size, generator=generator).to(device, dtype)
    try:
        with torch.no_grad():
            logits = model.compute_logits(hidden)
    except Exception as error:  # noqa: BLE001 - models raise anything; whoever wants FP32 is told
        return f"unknown ({type(error).__name__}: {error})"
    if logits is None:
        return "unknown (this rank gets no logits)"
    between = logits.isfinite() & (logits.float() != logits.to(dtype).float())
    return FP32 if bool(between.any()) else str(dtype).removeprefix("torch.")
