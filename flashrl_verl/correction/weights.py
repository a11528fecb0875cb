# SPDX-License-Identifier: Apache-2.0
"""Truncated importance sampling (TIS): a policy gradient from tokens that the quantized policy sampled.

The rollout engine samples a_t from pi_rollout (8-bit weights, its own kernels), the trainer differentiates
pi_theta. They differ before the first optimizer step, and DAPO's ratio corrects only from pi_old to pi_theta,
so its loss averages over the wrong distribution. TIS multiplies a token's clipped loss by the missing ratio:

    w_t = min(pi_old(a_t | s_t) / pi_rollout(a_t | s_t), C)            (no gradient flows through w_t)
    L   = -1/N sum_t w_t min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t),   r_t = pi_theta / pi_old

(Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"). The cap C bounds
the variance. With two bounds w_t is zero outside [lower, upper] instead (IcePop). At sequence level every
token carries the product of its response's ratios. Rejection takes tokens or whole responses out of the loss, by how
far pi_old and pi_rollout are apart on them (Liu et al. 2025, "When Speed Kills Stability").

Both are verl's own functions, called where the loss is: on the rows that a data-parallel rank holds. A weight and a
rejection need nothing outside their row, so neither sharding nor micro-batching changes them. Here is only what verl
fails on: a shard without a token, and one whose every token IcePop drops.
"""

import torch

from flashrl_verl.correction.settings import CorrectionSettings


def importance_weights(
    log_ratio: torch.Tensor, mask: torch.Tensor, settings: CorrectionSettings
) -> torch.Tensor | None:
    """verl's truncated (or IcePop) weights, before batch normalization.

    verl normalizes by an all-reduce over the world group in the middle of the call, where a rank with an empty shard
    never arrives; ``correct_shard`` normalizes by the reduced sums instead.

    Args:
        log_ratio: [B, T] float, log(pi_old / pi_rollout), finite.
        mask: [B, T] bool, the tokens that are trained on.
        settings: level and bounds.

    Returns:
        [B, T] in `log_ratio`'s dtype, zero outside the mask, without gradient; None where `settings` has no level.
    """
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    if settings.level is None:
        return None
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


def rejection_mask(log_ratio: torch.Tensor, mask: torch.Tensor, settings: CorrectionSettings) -> torch.Tensor | None:
    """The tokens of the mask that every criterion of verl's keeps.

    Args:
        log_ratio, mask: as in ``importance_weights``.
        settings: the criteria.

    Returns:
        [B, T] bool; None where `settings` has no criterion.
    """
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    if not settings.rejections:
        return None
    if not mask.any():  # verl raises
        return mask
    return compute_rollout_rejection_mask(log_ratio, mask, settings.rejections, settings.rejection_thresholds)[0]
