# SPDX-License-Identifier: Apache-2.0
"""Log-probs of given tokens from logits, where the package flash-attn is missing: many tokens at a time, in float32.

On a GPU both functions of the logits are compiled, and make nothing of their size in float32. On a CPU that is bounded
by taking some rows at a time.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_ELEMENTS_AT_ONCE = 1 << 26
"""Logits that are float32 at one time on a CPU: 256 MiB."""


class _LogProbs(torch.autograd.Function):
    """log p(y) = x_y - logsumexp(x). Nothing is kept for the backward pass but the logits and a number a token."""

    @staticmethod
    def forward(context: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        normalizers = _of_rows(_normalizers, logits)
        context.save_for_backward(logits, labels, normalizers)
        return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1).float() - normalizers

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _of_rows(_gradients, *context.saved_tensors, gradient), None


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


def _normalizers(logits: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(logits.float(), -1)


def _gradients(
    logits: torch.Tensor, labels: torch.Tensor, normalizers: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    """d log p(y) / dx = [x is y] - p(x), times the gradient."""
    is_label = labels[:, None] == torch.arange(logits.shape[-1], device=logits.device)
    p = (logits.float() - normalizers[:, None]).exp()
    return ((is_label.float() - p) * gradient[:, None]).to(logits.dtype)


def _of_rows(function: Callable, logits: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    if logits.is_cuda:
        return _compiled(function)(logits, *others)
    rows = max(1, _ELEMENTS_AT_ONCE // max(1, logits.shape[-1]))
    return torch.cat([function(*part) for part in zip(*(of.split(rows) for of in (logits, *others)), strict=True)])


@cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=True)
