# SPDX-License-Identifier: Apache-2.0
"""Log-probs of given tokens from logits, where the package flash-attn is missing: many tokens at a time, in float32."""

from typing import Any

import torch

_ELEMENTS_AT_ONCE = 1 << 26
"""Logits that are float32 at one time: 256 MiB."""


class _LogProbs(torch.autograd.Function):
    """log p(y) = x_y - logsumexp(x). Nothing is kept for the backward pass but the logits and a number a token."""

    @staticmethod
    def forward(context: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        normalizers = torch.cat([torch.logsumexp(part.float(), -1) for part in _parts(logits)])
        context.save_for_backward(logits, labels, normalizers)
        return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1).float() - normalizers

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, labels, normalizers = context.saved_tensors
        result, rows = torch.empty_like(logits), 0
        for part in _parts(logits):
            here = slice(rows, rows + len(part))
            # d log p(y) / dx = [x is y] - p(x)
            part = (part.float() - normalizers[here, None]).exp_().neg_()
            part.scatter_add_(-1, labels[here, None], torch.ones_like(part[:, :1]))
            result[here] = part.mul_(gradient[here, None])
            rows = here.stop
        return result, None


def log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-softmax at the labels.

    Args:
        logits: [..., vocabulary], any floating-point dtype.
        labels: [...] int64.

    Returns:
        [...] float32. Gradients of the logits have their dtype.
    """
    vocabulary = logits.shape[-1]
    return _LogProbs.apply(logits.reshape(-1, vocabulary), labels.reshape(-1)).view(labels.shape)


def _parts(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return logits.split(max(1, _ELEMENTS_AT_ONCE // max(1, logits.shape[-1])))
