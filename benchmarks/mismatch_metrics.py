# SPDX-License-Identifier: Apache-2.0
"""How far two policies are apart on the same tokens, from their log-probs: verl's numbers under verl's names."""

from collections.abc import Sequence

import torch

K3_KL = "rollout_corr/k3_kl"
"""``mean(exp(d) - d - 1)`` with ``d = log pi_trainer - log pi_rollout``, over response tokens (Schulman's k3 estimator
of KL(rollout || trainer) when the tokens are the rollout's own samples)."""
K3_ERROR = "k3_kl_standard_error"
"""Of ``K3_KL``; not verl's."""
PROBS_DIFF = "training/rollout_probs_diff_mean"
"""Mean absolute difference of the probabilities."""
CORRELATION = "training/rollout_actor_probs_pearson_corr"
"""Pearson's correlation of the probabilities."""


def log_prob_metrics(trainer: Sequence[Sequence[float]], rollout: Sequence[Sequence[float]]) -> dict[str, float]:
    """Compare log-probs of the same responses by verl's own functions, in float64.

    float64, because ``exp(d) - d - 1`` is about d^2 / 2: at BF16's differences float32 would lose most of its digits.

    Args:
        trainer: B responses, the log-prob of each of their tokens under the trainer's policy.
        rollout: the same under the rollout's.

    Returns:
        ``tokens``, ``responses``, ``K3_ERROR``, and verl's ``rollout_corr/*`` and ``training/rollout_*`` metrics.

    Raises:
        ValueError: the responses differ in number or length, or there is no token.
    """
    from verl.protocol import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_corr_metrics_from_logprobs
    from verl.utils.debug.metrics import calculate_debug_metrics

    old, mask = padded(trainer)
    other, other_mask = padded(rollout)
    if mask.shape != other_mask.shape or not torch.equal(mask, other_mask):
        raise ValueError("trainer and rollout have log-probs of different tokens: the responses' lengths differ")
    if not mask.any():
        raise ValueError("no response has a token")
    batch = DataProto.from_dict(
        tensors={
            "old_log_probs": old,
            "rollout_log_probs": other,
            "response_mask": mask,
            "responses": torch.zeros_like(mask, dtype=torch.long),  # verl reads their width only
        }
    )
    return {
        "tokens": int(mask.sum()),
        "responses": mask.shape[0],
        K3_ERROR: standard_error(k3(old, other), mask),
        **compute_rollout_corr_metrics_from_logprobs(old, other, mask),
        **calculate_debug_metrics(batch),
    }


def k3(trainer: torch.Tensor, rollout: torch.Tensor) -> torch.Tensor:
    """Return ``exp(d) - d - 1`` of log-probs of any shape; ``expm1`` keeps its digits where d is small."""
    d = trainer - rollout
    return d.expm1() - d


def standard_error(values: torch.Tensor, mask: torch.Tensor) -> float:
    """Standard error of the mean over tokens, with responses as the independent draws (tokens of one are correlated).

    The mean is a ratio, sum_b s_b / sum_b n_b, so its linearized error is ``sqrt(B/(B-1) sum_b (s_b - m n_b)^2) / sum_b
    n_b``.

    Args:
        values: [B, T] float64.
        mask: [B, T] bool.

    Returns:
        The error; NaN for a single response.
    """
    rows = mask.shape[0]
    if rows < 2:
        return float("nan")
    sums, counts = (values * mask).sum(-1), mask.sum(-1)
    total = counts.sum()
    residuals = sums - sums.sum() / total * counts
    return float((residuals.square().sum() * rows / (rows - 1)).sqrt() / total)


def padded(rows: Sequence[Sequence[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of different lengths as [B, T] float64, zero past their end, and the mask [B, T] bool."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.long)
    width = int(lengths.max()) if len(rows) else 0
    mask = torch.arange(width) < lengths.unsqueeze(-1)
    values = torch.zeros(mask.shape, dtype=torch.float64)
    values[mask] = torch.tensor([value for row in rows for value in row], dtype=torch.float64)
    return values, mask
