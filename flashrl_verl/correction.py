# SPDX-License-Identifier: Apache-2.0
"""Truncated importance sampling (TIS): a policy gradient from tokens that the quantized policy sampled.

The rollout engine samples a_t from pi_rollout (8-bit weights, its own kernels), the trainer differentiates
pi_theta. They differ before the first optimizer step, and DAPO's ratio corrects only from pi_old to pi_theta,
so its loss averages over the wrong distribution. TIS multiplies a token's clipped loss by the missing ratio:

    w_t = min(pi_old(a_t | s_t) / pi_rollout(a_t | s_t), C)            (no gradient flows through w_t)
    L   = -1/N sum_t w_t min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t),   r_t = pi_theta / pi_old

(Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"). The cap C bounds
the variance. With two bounds w_t is zero outside [lower, upper] instead (IcePop). At sequence level every
token carries the product of its response's ratios.

The weights are verl's own, computed where the loss is: on the rows that a data-parallel rank holds. A weight
needs nothing outside its row, so neither sharding nor micro-batching changes it. verl's metrics are functions
of sums and extremes, so the shards' statistics add up to what verl reports for a whole batch. Element-wise
arithmetic keeps the inputs' dtype, so that a ratio at a threshold falls on verl's side; sums are float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from flashrl_verl.errors import ConfigError, FlashRLError

KEY = "algorithm.rollout_correction"
EPS = 1e-8  # verl's guard against division by zero, in the effective sample size and the normalization


class Level(str, Enum):
    """What one importance weight covers."""

    TOKEN = "token"
    SEQUENCE = "sequence"


@dataclass(frozen=True, kw_only=True)
class CorrectionSettings:
    """How rollout tokens are weighted: verl's `algorithm.rollout_correction`, typed and validated."""

    level: Level | None
    """One weight per token, one per response, or None: no weights, only the off-policy metrics."""
    upper: float = 2.0
    """The cap C on a weight (ratio of probabilities, > 0)."""
    lower: float | None = None
    """None: cap at `upper` (TIS). In (0, upper]: zero the weights outside [lower, upper] (IcePop)."""
    batch_normalize: bool = False
    """Divide the weights by their mean over the whole batch."""

    @classmethod
    def from_config(cls, node: Mapping[str, Any] | None) -> CorrectionSettings:
        """Reads the keys of verl's `RolloutCorrectionConfig` from a dict, an OmegaConf node or the dataclass.

        Raises:
            ConfigError: the node is null, a value is out of range, or the actor cannot do what it asks for.
        """
        if node is None:
            raise ConfigError(
                "actor_rollout_ref.actor.policy_loss.rollout_correction=null, where the actor expects the "
                f"weights' settings. Set it to ${{{KEY}}}; for no weights set {KEY}.rollout_is=null."
            )
        if node.get("rollout_rs") is not None:
            raise ConfigError(
                f"{KEY}.rollout_rs={node.get('rollout_rs')!r}: the flashrl actor only weights tokens. "
                f"Leave {KEY}.rollout_rs=null; {KEY}.rollout_is_threshold='0.5_5.0' (IcePop) zeroes outliers."
            )
        if node.get("bypass_mode"):
            raise ConfigError(
                f"{KEY}.bypass_mode=true takes the rollout's log-probs for the trainer's: every weight would "
                f"be 1 and the quantization error uncorrected. Set {KEY}.bypass_mode=false."
            )
        level = node.get("rollout_is")
        if level is None:  # the threshold, often null too, has nothing to act on
            return cls(level=None)
        if level not in {member.value for member in Level}:
            raise ConfigError(f"{KEY}.rollout_is={level!r} is none of token, sequence, null.")
        upper, lower = _parse_threshold(node.get("rollout_is_threshold", cls.upper))
        normalize = bool(node.get("rollout_is_batch_normalize", cls.batch_normalize))
        return cls(level=Level(level), upper=upper, lower=lower, batch_normalize=normalize)

    @property
    def threshold(self) -> float | str:
        """The bounds as verl spells them: 2.0, or '0.5_5.0'."""
        return self.upper if self.lower is None else f"{self.lower!r}_{self.upper!r}"


def correct_shard(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor | None,
    response_mask: torch.Tensor,
    settings: CorrectionSettings,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor | None, dict[str, float]]:
    """Computes the importance weights of one data-parallel shard, and the metrics of the whole batch.

    Collective over `group`: every rank calls it, and gets the same metrics or the same error.

    Args:
        old_log_probs: [B, T] float, log pi_old of the sampled tokens, from the trainer.
        rollout_log_probs: [B, T] float, log pi_rollout of the same tokens, from the rollout engine.
        response_mask: [B, T] bool or 0/1, the tokens that are trained on.
        settings: level, bounds, normalization.
        group: the data-parallel group. Its ranks hold disjoint rows; ranks that share rows (tensor, sequence
            parallel) are in different groups, so nothing counts twice. None: this shard is the whole batch.
        device: where `group` communicates; by default where the tensors are.

    Returns:
        Weights [B, T] in the log-probs' dtype, zero outside the mask (None without `settings.level`), and
        verl's `rollout_corr/*` metrics.

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
        stats = shard_statistics(old, rollout, mask, weights, settings)
        stats.token_sums.update(_bad_old=bad_old.sum().item(), _bad_rollout=bad_rollout.sum().item())
        stats = reduce_statistics(stats, group, device or old.device)
        _refuse_unusable(stats)
        metrics = finalize_metrics(stats, settings)
        if weights is not None and settings.batch_normalize:
            weights = weights / metrics["rollout_corr/rollout_is_batch_norm_factor"]
    return weights, metrics


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


@dataclass(frozen=True)
class Statistics:
    """Statistics of a set of rows, by the name of the metric they become; a leading `_` marks an ingredient.

    While a shard is measured the values are tensors of summands or candidates, afterwards floats.
    """

    token_sums: dict[str, Any] = field(default_factory=dict)
    """Over the tokens in the mask; the metric is the mean."""
    row_sums: dict[str, Any] = field(default_factory=dict)
    """Over rows; the metric is the mean. As in verl, rows with an empty mask count, with value 0."""
    maxima: dict[str, Any] = field(default_factory=dict)
    minima: dict[str, Any] = field(default_factory=dict)


def shard_statistics(
    old: torch.Tensor,
    rollout: torch.Tensor,
    mask: torch.Tensor,
    weights: torch.Tensor | None,
    settings: CorrectionSettings,
) -> Statistics:
    """Measures one shard; one with an empty mask adds nothing to the sums over tokens or to their extremes.

    Args:
        old: [B, T] float, log pi_old, finite, zero outside the mask.
        rollout: [B, T] float, log pi_rollout, likewise.
        mask: [B, T] bool.
        weights: [B, T] from `shard_weights`; None for the off-policy metrics alone.
        settings: those of `weights`.
    """
    terms = Statistics()
    _add_offpolicy_terms(terms, old, rollout, mask)
    if weights is not None:
        _add_weight_terms(terms, old - rollout, mask, weights, settings)
    return Statistics(
        token_sums={k: v.double().sum().item() for k, v in terms.token_sums.items()},
        row_sums={k: v.double().sum().item() for k, v in terms.row_sums.items()},
        maxima={k: v.max().item() if v.numel() else -math.inf for k, v in terms.maxima.items()},
        minima={k: v.min().item() if v.numel() else math.inf for k, v in terms.minima.items()},
    )


def reduce_statistics(
    stats: Statistics, group: dist.ProcessGroup | None, device: torch.device | str
) -> Statistics:
    """Combines a process group's shards: one SUM and one MAX all-reduce of float64 vectors on `device`."""
    if group is None:
        return stats
    sums = [*stats.token_sums.values(), *stats.row_sums.values()]
    sums = torch.tensor(sums, dtype=torch.float64, device=device)
    extremes = [*stats.maxima.values(), *(-v for v in stats.minima.values())]
    extremes = torch.tensor(extremes, dtype=torch.float64, device=device)
    dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    sums, extremes = iter(sums.tolist()), iter(extremes.tolist())
    return Statistics(
        token_sums={k: next(sums) for k in stats.token_sums},
        row_sums={k: next(sums) for k in stats.row_sums},
        maxima={k: next(extremes) for k in stats.maxima},
        minima={k: -next(extremes) for k in stats.minima},
    )


def finalize_metrics(stats: Statistics, settings: CorrectionSettings) -> dict[str, float]:
    """Turns the statistics of a batch of one token or more into verl's metrics, named `rollout_corr/...`."""
    tokens, rows = stats.token_sums["_tokens"], stats.row_sums["_rows"]
    values = {k: v / tokens for k, v in stats.token_sums.items()}
    values |= {k: v / rows for k, v in stats.row_sums.items()} | stats.maxima | stats.minima
    if settings.level is not None:
        mean, square, seq_mean = (values[k] for k in ("rollout_is_mean", "_square", "rollout_is_seq_mean"))
        deviation, seq_deviation = (
            math.sqrt(max(x, 0.0)) for x in (square - mean**2, values["_seq_square"] - seq_mean**2)
        )
        values["rollout_is_std"] = deviation if tokens > 1 else 0.0
        # Over responses verl takes the unbiased deviation (torch.std), over tokens the biased one.
        values["rollout_is_seq_std"] = seq_deviation * math.sqrt(rows / (rows - 1)) if rows > 1 else 0.0
        # Kish's effective sample size, as a fraction of the tokens; verl fails when every weight is zero.
        values["rollout_is_eff_sample_size"] = (mean + EPS) ** 2 / square if square > 0 else 0.0
        if settings.batch_normalize:
            responses = stats.row_sums["_responses"]
            factor = mean if settings.level is Level.TOKEN else seq_mean * rows / responses
            values["rollout_is_batch_norm_factor"] = factor if factor > EPS else 1.0
    return {f"rollout_corr/{k}": v for k, v in values.items() if not k.startswith("_")}


def _add_offpolicy_terms(
    terms: Statistics, old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor
) -> None:
    """The summands and candidates of verl's `compute_offpolicy_metrics`."""
    from verl.trainer.ppo.rollout_corr_helper import SAFETY_BOUND
    from verl.utils.torch_functional import masked_mean, masked_sum

    def chi2(log_ratio: torch.Tensor) -> torch.Tensor:
        return log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp().square().double() - 1

    log_ratio, seq_log_ratio = (old - rollout)[mask], masked_sum(old - rollout, mask, axis=-1)
    mean_old, mean_rollout = masked_mean(old, mask, axis=-1), masked_mean(rollout, mask, axis=-1)  # [B]
    gap = mean_rollout - mean_old
    terms.token_sums.update(
        _tokens=torch.ones_like(log_ratio),
        kl=-log_ratio,
        k3_kl=log_ratio.exp() - log_ratio - 1,
        chi2_token=chi2(log_ratio),
    )
    terms.row_sums.update(
        _rows=torch.ones_like(gap),
        _responses=mask.any(-1),
        training_ppl=(-mean_old).exp(),
        training_log_ppl=-mean_old,
        rollout_ppl=(-mean_rollout).exp(),
        rollout_log_ppl=-mean_rollout,
        log_ppl_diff=gap,
        log_ppl_abs_diff=gap.abs(),
        ppl_ratio=gap.exp(),
        chi2_seq=chi2(seq_log_ratio),
    )
    terms.maxima.update(log_ppl_diff_max=gap)
    terms.minima.update(log_ppl_diff_min=gap)


def _add_weight_terms(
    terms: Statistics,
    log_ratio: torch.Tensor,
    mask: torch.Tensor,
    weights: torch.Tensor,
    settings: CorrectionSettings,
) -> None:
    """The same of verl's `compute_is_metrics`, whose clamps of the weights to [0, upper] change nothing."""
    from verl.trainer.ppo.rollout_corr_helper import SAFETY_BOUND
    from verl.utils.torch_functional import masked_mean, masked_sum

    upper, lower = settings.upper, settings.lower or 1.0 / settings.upper
    at_sequence = settings.level is Level.SEQUENCE
    seq_log_ratio = masked_sum(log_ratio, mask, axis=-1)
    exponent = seq_log_ratio.unsqueeze(-1).expand_as(log_ratio) if at_sequence else log_ratio
    raw = exponent.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp() * mask  # before truncation
    seq_raw, seq_w = masked_mean(raw, mask, axis=-1), masked_mean(weights, mask, axis=-1)  # [B]
    raw, w = raw[mask], weights[mask]
    terms.token_sums.update(rollout_is_mean=w, _square=w.double().square())
    terms.row_sums.update(
        rollout_is_seq_mean=seq_w,
        _seq_square=seq_w.double().square(),
        rollout_is_seq_fraction_high=seq_raw > upper,
        rollout_is_seq_fraction_low=seq_raw < lower,
    )
    terms.maxima.update(rollout_is_seq_max=seq_w, rollout_is_seq_max_deviation=(seq_w - 1.0).abs())
    terms.minima.update(rollout_is_seq_min=seq_w)
    if settings.lower is not None:
        terms.token_sums.update(rollout_is_oob_ratio=(raw < lower) | (raw > upper))
    if (
        at_sequence
    ):  # verl counts rows, compares products in log space, and reports extremes before truncation
        log_upper, log_lower = (
            torch.tensor(x, device=w.device).log() for x in (upper, lower)
        )  # float32, as verl
        fractions, high, low = terms.row_sums, seq_log_ratio > log_upper, seq_log_ratio < log_lower
        largest, smallest = seq_log_ratio.clamp(max=SAFETY_BOUND).exp(), seq_log_ratio.exp()
    else:
        fractions, high, low, largest, smallest = terms.token_sums, raw > upper, raw < lower, w, w
    fractions.update(rollout_is_ratio_fraction_high=high, rollout_is_ratio_fraction_low=low)
    terms.maxima.update(rollout_is_max=largest)
    terms.minima.update(rollout_is_min=smallest)


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
            "actor_rollout_ref.actor.optim.lr or actor_rollout_ref.actor.grad_clip."
        )


def _parse_threshold(spec: Any) -> tuple[float, float | None]:
    """Reads verl's threshold, 2.0 or '2.0' or 'lower_upper', as (upper, lower)."""
    try:
        bounds = [float(part) for part in str(spec).split("_", 1)]
    except ValueError:
        bounds = []
    if not bounds or not 0 < bounds[0] <= bounds[-1]:  # false for NaN, too
        raise ConfigError(
            f"{KEY}.rollout_is_threshold={spec!r} is neither a positive number (TIS: the cap) nor "
            "'lower_upper' with 0 < lower <= upper (IcePop). Usual: 2.0 with rollout_is=token."
        )
    return bounds[-1], bounds[0] if len(bounds) == 2 else None
