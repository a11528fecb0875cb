# SPDX-License-Identifier: Apache-2.0
"""Truncated importance sampling (TIS): a policy gradient from tokens that the quantized policy sampled.

The rollout engine samples a_t from pi_rollout (8-bit weights, its own kernels), the trainer differentiates
pi_theta. They differ before the first optimizer step, and DAPO's ratio corrects only from pi_old to pi_theta,
so its loss averages over the wrong distribution. TIS multiplies a token's clipped loss by the missing ratio:

    w_t = min(pi_old(a_t | s_t) / pi_rollout(a_t | s_t), C)            (no gradient flows through w_t)
    L   = -1/N sum_t w_t min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t),   r_t = pi_theta / pi_old

(Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"). The cap C bounds
the variance. With two bounds w_t is zero outside [lower, upper] instead (IcePop). At sequence level every
token carries the product of its response's ratios. Rejection takes tokens or whole responses out of the loss, by how far pi_old
and pi_rollout are apart on them (Liu et al. 2025, "When Speed Kills Stability").

The weights are verl's own, computed where the loss is: on the rows that a data-parallel rank holds. A weight
needs nothing outside its row, so neither sharding nor micro-batching changes it. verl's metrics are functions
of sums and extremes, so the shards' statistics add up to what verl reports for a whole batch. Element-wise
arithmetic keeps the inputs' dtype, so that a ratio at a threshold falls on verl's side; sums are float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from flashrl_verl.correction_metrics import Statistics, finalize_metrics, reduce_statistics, shard_statistics
from flashrl_verl.correction_rejection import judge
from flashrl_verl.correction_settings import CorrectionSettings
from flashrl_verl.errors import ConfigError, FlashRLError


@dataclass(frozen=True)
class Correction:
    """What a shard's rows enter the loss with."""

    weights: torch.Tensor | None
    """[B, T] in the log-probs' dtype, zero outside the batch's mask; None without `settings.level`."""
    keep: torch.Tensor | None
    """[B, T] bool, the tokens of the batch's mask that no criterion rejects; None without `settings.rejections`."""
    metrics: dict[str, float]
    """verl's `rollout_corr/*` of the whole batch."""


def correct_shard(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor | None,
    response_mask: torch.Tensor,
    settings: CorrectionSettings,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> Correction:
    """Computes weights and rejections of one data-parallel shard, and the metrics of the whole batch.

    Collective over `group`: every rank calls it, and gets the same metrics or the same error.

    Args:
        old_log_probs: [B, T] float, log pi_old of the sampled tokens, from the trainer.
        rollout_log_probs: [B, T] float, log pi_rollout of the same tokens, from the rollout engine.
        response_mask: [B, T] bool or 0/1, the tokens that are trained on.
        settings: level, bounds, normalization, rejections.
        group: the data-parallel group. Its ranks hold disjoint rows; ranks that share rows (tensor, sequence
            parallel) are in different groups, so nothing counts twice. None: this shard is the whole batch.
        device: where `group` communicates; by default where the tensors are.

    Raises:
        ConfigError: `rollout_log_probs` is None.
        FlashRLError: shapes differ; a log-prob in the mask is NaN or infinite; the batch has no token.
    """
    if rollout_log_probs is None:
        raise ConfigError(
            "The batch has no rollout_log_probs, which importance weights are made of. "
            "Set actor_rollout_ref.rollout.calculate_log_probs=true."
        )
    shapes = [tuple(x.shape) for x in (old_log_probs, rollout_log_probs, response_mask)]
    if len(set(shapes)) > 1:
        raise FlashRLError(f"old_log_probs, rollout_log_probs and response_mask differ in shape: {shapes}.")
    with torch.no_grad():
        mask = response_mask.bool()
        bad_old, bad_rollout = (mask & ~x.isfinite() for x in (old_log_probs, rollout_log_probs))
        # Zero what must not be read: NaN * 0 is NaN. Bad tokens are counted, and reported by every rank after
        # the reduction; raising here would leave the other ranks waiting in it.
        usable = mask & ~bad_old & ~bad_rollout
        old, rollout = (torch.where(usable, x, 0.0) for x in (old_log_probs, rollout_log_probs))
        weights = None if settings.level is None else shard_weights(old - rollout, mask, settings)
        judgements = judge(old - rollout, mask, settings.rejections)
        stats = shard_statistics(old, rollout, mask, weights, judgements, settings)
        stats.token_sums.update(_bad_old=bad_old.sum().item(), _bad_rollout=bad_rollout.sum().item())
        stats = reduce_statistics(stats, group, device or old.device)
        _refuse_unusable(stats)
        metrics = finalize_metrics(stats, settings)
        if weights is not None and settings.batch_normalize:
            weights = weights / metrics["rollout_corr/rollout_is_batch_norm_factor"]
    keep = None
    for judgement in judgements:  # weights and rejections do not know of one another, as in verl
        keep = judgement.keep & mask if keep is None else keep & judgement.keep
    return Correction(weights, keep, metrics)


def shard_weights(log_ratio: torch.Tensor, mask: torch.Tensor, settings: CorrectionSettings) -> torch.Tensor:
    """verl's truncated (or IcePop) weights, before batch normalization.

    verl's own normalization all-reduces over the world group in the middle of the call, where a rank with an
    empty shard never arrives; `correct_shard` normalizes with the reduced statistics instead.

    Args:
        log_ratio: [B, T] float, log(pi_old / pi_rollout), finite.
        mask: [B, T] bool.
        settings: with a `level`.

    Returns:
        [B, T] in `log_ratio`'s dtype, zero outside the mask, without gradient.
    """
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    if not mask.any():  # verl raises; on one rank of many it is no error
        return torch.zeros_like(log_ratio)
    try:
        return compute_rollout_correction_weights(
            log_ratio=log_ratio,
            response_mask=mask,
            rollout_is=settings.level.value,
            rollout_is_threshold=settings.threshold,
            rollout_is_batch_normalize=False,
        )[0]
    except ZeroDivisionError:
        # verl's effective sample size divides by the mean square weight, which is zero exactly when every
        # weight is: IcePop dropped the whole shard. That is an answer, not an error.
        return torch.zeros_like(log_ratio)


def _refuse_unusable(stats: Statistics) -> None:
    """Raises, on every rank alike, when the whole batch cannot be corrected."""
    tokens, bad_old, bad_rollout = (int(stats.token_sums[k]) for k in ("_tokens", "_bad_old", "_bad_rollout"))
    if tokens == 0:
        raise FlashRLError(
            "The batch has no token inside response_mask: nothing to train on. Check that responses are not "
            "empty (data.max_response_length, the chat template, the agent loop)."
        )
    if bad_rollout:
        raise FlashRLError(
            f"{bad_rollout} of {tokens} response tokens have NaN or infinite rollout_log_probs. Check that "
            "actor_rollout_ref.rollout.calculate_log_probs=true, that actor_rollout_ref.rollout."
            "logprobs_mode=processed_logprobs, and that the rollout engine's weights are finite."
        )
    if bad_old:
        raise FlashRLError(
            f"{bad_old} of {tokens} response tokens have NaN or infinite old_log_probs, which the trainer "
            "computes: its weights have diverged. Resume from an earlier checkpoint with a lower "
            "actor_rollout_ref.actor.optim.lr or actor_rollout_ref.actor.optim.clip_grad."
        )
