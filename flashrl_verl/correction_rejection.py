# SPDX-License-Identifier: Apache-2.0
"""Rejection: which tokens and responses are too far from the trainer's policy to learn from.

verl's criteria (``rollout_corr_helper.compute_rollout_rejection_mask``), value by value in the same dtype, so that a token at a
threshold falls on the same side. A criterion needs nothing outside its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashrl_verl.correction_settings import Estimator, Rejection, Scope


@dataclass(frozen=True)
class Judgement:
    """One criterion applied to one shard."""

    rejection: Rejection
    statistic: torch.Tensor
    """[B, T] divergence of the token, or of its response."""
    row_statistic: torch.Tensor
    """[B] divergence of the response: what is compared, or the mean over its tokens where tokens are."""
    keep: torch.Tensor
    """[B, T] bool; says nothing outside the mask."""


def judge(log_ratio: torch.Tensor, mask: torch.Tensor, rejections: Sequence[Rejection]) -> list[Judgement]:
    """Apply every criterion.

    Args:
        log_ratio: [B, T] float, log(pi_old / pi_rollout), finite.
        mask: [B, T] bool, the tokens that are trained on.
        rejections: the criteria.
    """
    return [_judge(log_ratio, mask, rejection) for rejection in rejections]


def _judge(log_ratio: torch.Tensor, mask: torch.Tensor, rejection: Rejection) -> Judgement:
    from verl.trainer.ppo.rollout_corr_helper import SAFETY_BOUND
    from verl.utils.torch_functional import masked_mean, masked_sum

    log_ratio = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    divergence = {
        Estimator.K1: lambda: -log_ratio,
        Estimator.K2: lambda: 0.5 * log_ratio**2,
        Estimator.K3: lambda: log_ratio.exp() - 1.0 - log_ratio,
    }[rejection.estimator]()
    over_rows = {
        Scope.TOKEN: lambda: masked_mean(divergence, mask, axis=-1),
        Scope.SEQ_SUM: lambda: masked_sum(divergence, mask, axis=-1),
        Scope.SEQ_MEAN: lambda: masked_mean(divergence, mask, axis=-1),
        Scope.SEQ_MAX: lambda: torch.where(mask.any(-1), divergence.masked_fill(~mask, -torch.inf).amax(-1), 0.0),
    }[rejection.scope]()
    statistic = divergence if rejection.scope is Scope.TOKEN else over_rows.unsqueeze(-1).expand_as(divergence)
    lower, upper = rejection.bounds
    keep = statistic <= upper
    if rejection.lower is not None:
        keep = keep & (statistic >= lower)
    return Judgement(rejection, statistic, over_rows, keep)
