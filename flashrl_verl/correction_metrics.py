# SPDX-License-Identifier: Apache-2.0
"""verl's ``rollout_corr/*`` metrics of a whole batch from the statistics of its shards.

Every one of them is a function of sums and extremes over tokens or rows, so each data-parallel rank measures its own rows
and one SUM and one MAX all-reduce give what verl's driver computes from the whole padded batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from flashrl_verl.correction_rejection import Judgement
from flashrl_verl.correction_settings import CorrectionSettings, Level, Scope

EPS = 1e-8  # verl's guard against division by zero, in the effective sample size and the normalization


@dataclass(frozen=True)
class Statistics:
    """Statistics of a set of rows, by the name of the metric they become; a leading `_` marks an ingredient.

    While a shard is measured the values are tensors of summands or candidates, afterwards floats.
    """

    token_sums: dict[str, Any] = field(default_factory=dict)
    """Over the tokens in the mask; the metric is the mean."""
    row_sums: dict[str, Any] = field(default_factory=dict)
    """Over rows; the metric is the mean. As in verl, rows with an empty mask count, with value 0."""
    response_sums: dict[str, Any] = field(default_factory=dict)
    """Over rows with a token in the mask; the metric is the mean."""
    maxima: dict[str, Any] = field(default_factory=dict)
    minima: dict[str, Any] = field(default_factory=dict)


def shard_statistics(
    old: torch.Tensor,
    rollout: torch.Tensor,
    mask: torch.Tensor,
    weights: torch.Tensor | None,
    judgements: Sequence[Judgement],
    settings: CorrectionSettings,
) -> Statistics:
    """Measures one shard; one with an empty mask adds nothing to the sums over tokens or to their extremes.

    Args:
        old: [B, T] float, log pi_old, finite, zero outside the mask.
        rollout: [B, T] float, log pi_rollout, likewise.
        mask: [B, T] bool.
        weights: [B, T] from `shard_weights`; None for the off-policy metrics alone.
        judgements: of the same rows, from `judge`.
        settings: those of `weights` and `judgements`.
    """
    terms = Statistics()
    _add_offpolicy_terms(terms, old, rollout, mask)
    if weights is not None:
        _add_weight_terms(terms, old - rollout, mask, weights, settings)
    if judgements:
        _add_rejection_terms(terms, mask, judgements)
    sums = [{k: v.double().sum().item() for k, v in kind.items()} for kind in _sums(terms)]
    return Statistics(
        *sums,
        maxima={k: v.max().item() if v.numel() else -math.inf for k, v in terms.maxima.items()},
        minima={k: v.min().item() if v.numel() else math.inf for k, v in terms.minima.items()},
    )


def reduce_statistics(stats: Statistics, group: dist.ProcessGroup | None, device: torch.device | str) -> Statistics:
    """Combines a process group's shards: one SUM and one MAX all-reduce of float64 vectors on `device`."""
    if group is None:
        return stats
    sums = [value for kind in _sums(stats) for value in kind.values()]
    sums = torch.tensor(sums, dtype=torch.float64, device=device)
    extremes = [*stats.maxima.values(), *(-v for v in stats.minima.values())]
    extremes = torch.tensor(extremes, dtype=torch.float64, device=device)
    dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    sums, extremes = iter(sums.tolist()), iter(extremes.tolist())
    return Statistics(
        *({k: next(sums) for k in kind} for kind in _sums(stats)),
        maxima={k: next(extremes) for k in stats.maxima},
        minima={k: -next(extremes) for k in stats.minima},
    )


def _sums(stats: Statistics) -> tuple[dict[str, Any], ...]:
    """In the order of the dataclass's fields."""
    return stats.token_sums, stats.row_sums, stats.response_sums


def finalize_metrics(stats: Statistics, settings: CorrectionSettings) -> dict[str, float]:
    """Turns the statistics of a batch of one token or more into verl's metrics, named `rollout_corr/...`."""
    tokens, rows, responses = stats.token_sums["_tokens"], stats.row_sums["_rows"], stats.row_sums["_responses"]
    values = {k: v / tokens for k, v in stats.token_sums.items()}
    values |= {k: v / rows for k, v in stats.row_sums.items()} | {k: v / responses for k, v in stats.response_sums.items()}
    values |= stats.maxima | stats.minima
    for rejection in settings.rejections:
        name = f"rollout_rs_{rejection.option}"
        values[f"{name}_std"] = _deviation(values[f"_{name}_clamped"], values[f"_{name}_clamped_square"]) if tokens > 1 else 0.0
        # Over responses verl takes the unbiased deviation (torch.std), over tokens the biased one; below likewise.
        deviation = _deviation(values[f"{name}_seq_mean"], values[f"_{name}_seq_square"])
        values[f"{name}_seq_std"] = deviation * math.sqrt(responses / (responses - 1)) if responses > 1 else 0.0
        if rejection.lower is None:
            values[f"{name}_fraction_low"] = 0.0
    if settings.level is not None:
        mean, square, seq_mean = (values[k] for k in ("rollout_is_mean", "_square", "rollout_is_seq_mean"))
        values["rollout_is_std"] = _deviation(mean, square) if tokens > 1 else 0.0
        seq_deviation = _deviation(seq_mean, values["_seq_square"])
        values["rollout_is_seq_std"] = seq_deviation * math.sqrt(rows / (rows - 1)) if rows > 1 else 0.0
        # Kish's effective sample size, as a fraction of the tokens; verl fails when every weight is zero.
        values["rollout_is_eff_sample_size"] = (mean + EPS) ** 2 / square if square > 0 else 0.0
        if settings.batch_normalize:
            factor = mean if settings.level is Level.TOKEN else seq_mean * rows / responses
            values["rollout_is_batch_norm_factor"] = factor if factor > EPS else 1.0
    return {f"rollout_corr/{k}": v for k, v in values.items() if not k.startswith("_")}


def _deviation(mean: float, mean_square: float) -> float:
    return math.sqrt(max(mean_square - mean**2, 0.0))


def _add_offpolicy_terms(terms: Statistics, old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> None:
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
    if at_sequence:  # verl counts rows, compares products in log space, and reports extremes before truncation
        log_upper, log_lower = (torch.tensor(x, device=w.device).log() for x in (upper, lower))  # float32, as verl
        fractions, high, low = terms.row_sums, seq_log_ratio > log_upper, seq_log_ratio < log_lower
        largest, smallest = seq_log_ratio.clamp(max=SAFETY_BOUND).exp(), seq_log_ratio.exp()
    else:
        fractions, high, low, largest, smallest = terms.token_sums, raw > upper, raw < lower, w, w
    fractions.update(rollout_is_ratio_fraction_high=high, rollout_is_ratio_fraction_low=low)
    terms.maxima.update(rollout_is_max=largest)
    terms.minima.update(rollout_is_min=smallest)


def _add_rejection_terms(terms: Statistics, mask: torch.Tensor, judgements: Sequence[Judgement]) -> None:
    """The same of verl's `compute_rs_metrics` and of the fractions that `compute_rollout_rejection_mask` adds."""
    valid = mask.any(-1)
    for judgement in judgements:
        rejection, name = judgement.rejection, f"rollout_rs_{judgement.rejection.option}"
        lower, upper = rejection.bounds
        tokens, rows = judgement.statistic[mask], judgement.row_statistic[valid]
        rejected = ~judgement.keep & mask
        clamped = tokens.clamp(lower, upper).double()
        terms.token_sums.update(
            {
                f"{name}_mean": tokens,
                f"_{name}_clamped": clamped,
                f"_{name}_clamped_square": clamped.square(),
                f"{name}_masked_fraction": rejected[mask],
            }
        )
        terms.response_sums.update(
            {
                f"{name}_seq_mean": rows,
                f"_{name}_seq_square": rows.double().square(),
                f"{name}_seq_fraction_high": rows > upper,
                f"{name}_seq_masked_fraction": rejected.any(-1)[valid],
            }
        )
        of_tokens = rejection.scope is Scope.TOKEN
        values, fractions = (tokens, terms.token_sums) if of_tokens else (rows, terms.response_sums)
        fractions[f"{name}_fraction_high"] = values > upper
        if rejection.lower is not None:
            fractions[f"{name}_fraction_low"] = values < lower
            terms.response_sums[f"{name}_seq_fraction_low"] = rows < lower
        terms.maxima.update({f"{name}_max": values, f"{name}_seq_max": rows, f"{name}_seq_max_deviation": rows.abs()})
        terms.minima.update({f"{name}_min": values, f"{name}_seq_min": rows})
    rejected = mask & ~torch.stack([judgement.keep for judgement in judgements]).all(0)
    terms.token_sums["rollout_rs_masked_fraction"] = rejected[mask]
    terms.row_sums["rollout_rs_seq_masked_fraction"] = rejected.any(-1)
