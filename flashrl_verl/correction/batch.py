# SPDX-License-Identifier: Apache-2.0
"""The correction in verl's batch: a rank's rows in, their weights and rejections beside them, metrics of the whole
batch out.

verl's batch reaches ``update_actor`` with ``old_log_probs`` and ``rollout_log_probs``. Its ``ppo_loss`` multiplies the
policy loss by ``rollout_is_weights`` when it finds them, under the ``response_mask``. So it suffices to correct once,
before verl cuts the rows into mini-batches and micro-batches. As on verl's driver, a rejected token leaves
``response_mask`` and still counts in the mean: ``loss_mask`` stays.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from tensordict import TensorDict

from flashrl_verl.correction.metrics import TOKEN, Sums, lag_sums, metrics_of, shard_sums
from flashrl_verl.correction.settings import CorrectionSettings
from flashrl_verl.correction.weights import importance_weights, rejection_mask
from flashrl_verl.errors import ConfigError, FlashRLError

LAG = "flashrl_lag"
"""Our column: updates since the first token of a trajectory was sampled, [B, 1]. Only asynchronous runs have it."""


@dataclass(frozen=True)
class Correction:
    """What a shard's rows enter the loss with."""

    weights: torch.Tensor | None
    """[B, T] in the log-probs' dtype, zero outside the batch's mask; None without `settings.level`."""
    kept: torch.Tensor | None
    """[B, T] in the mask's dtype, the tokens of the mask that no criterion rejects; None without
    `settings.rejections`."""
    metrics: dict[str, float]
    """verl's `rollout_corr/*` of the whole batch."""


def attach_correction(
    data: TensorDict,
    settings: CorrectionSettings,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> dict[str, float]:
    """Puts `rollout_is_weights` into `data`, shaped as its `old_log_probs`, takes rejected tokens out of its
    `response_mask`.

    In bypass mode it changes nothing, and only looks for NaN and Inf: verl's `bypass_mode` loss weights and rejects by
    pi_theta / pi_rollout, which change with every mini-batch.

    Args:
        data: `old_log_probs`, `rollout_log_probs`, `response_mask`: jagged [B, *] with equal row lengths, as
            verl's transfer queue delivers them; `LAG` in asynchronous runs, which is taken out.
        settings: level, bounds, normalization, rejections, bypass; without a level no weights are added.
        group: the data-parallel group, or None.
        device: where `group` communicates.

    Returns:
        The `rollout_corr/*` metrics of the whole batch; none in bypass mode, or when nothing is corrected and the
        rollout sent no log-probs.

    Raises:
        ConfigError: there are no `rollout_log_probs`.
        FlashRLError: from `correct_shard`; also when the three fields differ in row lengths. On all ranks alike.
    """
    old, mask, rollout = data["old_log_probs"], data["response_mask"], data.get("rollout_log_probs", None)
    lags = data.pop(LAG, None)
    if lags is not None:
        lags = (lags.values() if lags.is_nested else lags).reshape(-1)
    if settings.bypass:  # the old log-probs are the rollout's
        inside = mask.values().bool()
        aligned = torch.equal(old.offsets(), mask.offsets())
        bad = inside & ~old.values().isfinite() if aligned else inside
        sums = {(TOKEN, "_count"): inside.sum().item(), (TOKEN, "_bad_old"): 0}
        sums[TOKEN, "_bad_rollout"] = bad.sum().item()
        _require_usable(_all_reduce(sums, group, device or old.device))
        return {}
    if rollout is None and settings.level is None and not settings.rejections:
        return {}  # calculate_log_probs=false and no correction: there is nothing to compare
    if rollout is None:  # on all ranks: verl's queue drops a column that a row lacks
        raise ConfigError(
            "The batch has no rollout_log_probs, which importance weights are made of. "
            "Set actor_rollout_ref.rollout.calculate_log_probs=true."
        )
    if any(not torch.equal(x.offsets(), mask.offsets()) for x in (old, rollout)):
        # Told by every rank after the reduction; raising here would leave the others waiting in it.
        nothing = torch.full_like(mask.values(), torch.nan, dtype=torch.float32)
        old = rollout = torch.nested.nested_tensor_from_jagged(nothing, offsets=mask.offsets())
    lengths = old.offsets().diff()
    filled = torch.arange(int(lengths.max()), device=old.device) < lengths.unsqueeze(-1)  # [B, T]
    padded = [None if x is None else _pad(x, filled) for x in (old, rollout, mask)]
    correction = correct_shard(*padded, settings, group, device, lags)
    # Without these bounds PyTorch later pads rows to the *total* number of values.
    bounds = {"min_seqlen": int(lengths.min()), "max_seqlen": int(lengths.max())}
    corrected = {"rollout_is_weights": correction.weights, "response_mask": correction.kept}
    for field, x in corrected.items():
        if x is not None:
            data[field] = torch.nested.nested_tensor_from_jagged(x[filled], offsets=old.offsets(), **bounds)
    return correction.metrics


def correct_shard(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    settings: CorrectionSettings,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    lags: torch.Tensor | None = None,
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
        lags: [B] int, the rows' `LAG`, on all ranks or none; None: k3 KL is not told by it.

    Raises:
        FlashRLError: a log-prob in the mask is NaN or infinite; the batch has no token.
    """
    with torch.no_grad():
        mask = response_mask.bool()
        bad_old, bad_rollout = (mask & ~x.isfinite() for x in (old_log_probs, rollout_log_probs))
        # Zero what must not be read: NaN * 0 is NaN. Bad tokens are counted, and reported by every rank after
        # the reduction; raising here would leave the other ranks waiting in it.
        usable = mask & ~bad_old & ~bad_rollout
        old, rollout = (torch.where(usable, x, 0.0) for x in (old_log_probs, rollout_log_probs))
        # Weights and rejections do not know of one another, as in verl.
        weights, kept = importance_weights(old - rollout, mask, settings), rejection_mask(old - rollout, mask, settings)
        sums = shard_sums(old, rollout, mask, weights, kept, settings)
        sums |= {(TOKEN, "_bad_old"): bad_old.sum().item(), (TOKEN, "_bad_rollout"): bad_rollout.sum().item()}
        if lags is not None:
            sums |= lag_sums(old - rollout, mask, lags.to(mask.device))
        sums = _all_reduce(sums, group, device or old.device)
        _require_usable(sums)
        metrics = metrics_of(sums, settings)
        if weights is not None and settings.batch_normalize:
            weights = weights / metrics["rollout_corr/rollout_is_batch_norm_factor"]
    return Correction(weights, None if kept is None else kept.to(response_mask.dtype), metrics)


def _pad(jagged: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
    """Jagged [B, *] to [B, T], zero where `filled` [B, T] bool is false."""
    padded = jagged.values().new_zeros(filled.shape)
    padded[filled] = jagged.values()
    return padded


def _all_reduce(sums: Sums, group: dist.ProcessGroup | None, device: torch.device | str) -> Sums:
    """Adds up the shards of a process group: one SUM of a float64 vector on `device`."""
    if group is None:
        return sums
    total = torch.tensor(list(sums.values()), dtype=torch.float64, device=device)
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
    return dict(zip(sums, total.tolist(), strict=True))


def _require_usable(sums: Sums) -> None:
    """Raises, on every rank alike, when the whole batch cannot be corrected."""
    tokens, bad_old, bad_rollout = (int(sums[TOKEN, name]) for name in ("_count", "_bad_old", "_bad_rollout"))
    if tokens == 0:
        raise FlashRLError(
            "The batch has no token inside response_mask: nothing to train on. Check that responses are not "
            "empty (data.max_response_length, the chat template, the agent loop)."
        )
    if bad_rollout:
        raise FlashRLError(
            f"{bad_rollout} of {tokens} response tokens have NaN, infinite or no rollout_log_probs (the agent loop's "
            "response_logprobs has one for each). Check that actor_rollout_ref.rollout.calculate_log_probs=true, that "
            "actor_rollout_ref.rollout.logprobs_mode=processed_logprobs, and that the rollout engine's weights are "
            "finite."
        )
    if bad_old:
        raise FlashRLError(
            f"{bad_old} of {tokens} response tokens have NaN or infinite old_log_probs, which the trainer "
            "computes: its weights have diverged. Resume from an earlier checkpoint with a lower "
            "actor_rollout_ref.actor.optim.lr or actor_rollout_ref.actor.optim.clip_grad."
        )
