# SPDX-License-Identifier: Apache-2.0
"""verl's ``rollout_corr/*`` metrics of a whole batch from sums over its shards.

Each is a function of sums over tokens or rows, so every data-parallel rank sums over its own rows, and one SUM
all-reduce gives what verl's driver computes from the rows of the whole batch that have a token: verl counts the rows
with which it fills a batch up, as of perplexity 1. verl's maxima and minima, its metrics by
criterion and its other spellings of the perplexities are left out. Element-wise arithmetic keeps the inputs' dtype, so
that a ratio at a threshold falls on verl's side; sums are float64.
"""

import math

import torch

from flashrl_verl.correction.settings import CorrectionSettings, Level

EPS = 1e-8  # verl's guard against division by zero, in the effective sample size and the normalization

TOKEN, ROW = "token", "row"
"""What a sum is over: the tokens in the mask, or the rows that have one."""

LAGS = 4
"""Ages of trajectories that are told apart, in updates; the last is that age or more."""

Sums = dict[tuple[str, str], float]
"""By what it is over and the metric whose mean it gives; a leading `_` marks an ingredient. The same keys on every
rank."""


def shard_sums(
    old: torch.Tensor,
    rollout: torch.Tensor,
    mask: torch.Tensor,
    weights: torch.Tensor | None,
    kept: torch.Tensor | None,
    settings: CorrectionSettings,
) -> Sums:
    """Sums over one shard; those of a shard with an empty mask are zero.

    Args:
        old: [B, T] float, log pi_old, finite, zero outside the mask.
        rollout: [B, T] float, log pi_rollout, likewise.
        mask: [B, T] bool.
        weights: [B, T] from `importance_weights`, or None.
        kept: [B, T] bool from `rejection_mask`, or None.
        settings: those of `weights` and `kept`.
    """
    terms = _offpolicy_terms(old, rollout, mask)
    rows = mask.any(-1)
    if weights is not None:
        terms |= _weight_terms(old - rollout, mask, weights, settings)
    if kept is not None:
        rejected = mask & ~kept
        terms[TOKEN, "rollout_rs_masked_fraction"] = rejected[mask]
        terms[ROW, "rollout_rs_seq_masked_fraction"] = rejected.any(-1)
    return {
        (over, name): (term[rows] if over == ROW else term).double().sum().item()
        for (over, name), term in terms.items()
    }


def lag_sums(log_ratio: torch.Tensor, mask: torch.Tensor, lags: torch.Tensor) -> Sums:
    """k3 KL by how old trajectories are.

    Args:
        log_ratio: [B, T] float, log(pi_old / pi_rollout), zero outside the mask.
        mask: [B, T] bool.
        lags: [B] int, updates since the first token of a row was sampled.
    """
    sums: Sums = {}
    for lag in range(LAGS):
        of_lag = log_ratio[mask & (lags.clamp(0, LAGS - 1) == lag).unsqueeze(-1)].double()
        sums[TOKEN, f"_lag_{lag}"] = float(of_lag.numel())
        sums[TOKEN, f"_lag_{lag}_k3"] = (of_lag.exp() - of_lag - 1).sum().item()
    return sums


def _offpolicy_terms(
    old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor
) -> dict[tuple[str, str], torch.Tensor]:
    """The summands of verl's `compute_offpolicy_metrics`."""
    from verl.trainer.ppo.rollout_corr_helper import SAFETY_BOUND
    from verl.utils.torch_functional import masked_mean

    log_ratio = (old - rollout)[mask]
    mean_old, mean_rollout = masked_mean(old, mask, axis=-1), masked_mean(rollout, mask, axis=-1)  # [B]
    return {
        (TOKEN, "_count"): torch.ones_like(log_ratio),
        (TOKEN, "kl"): -log_ratio,
        (TOKEN, "k3_kl"): log_ratio.exp() - log_ratio - 1,
        (TOKEN, "chi2_token"): log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp().square().double() - 1,
        (ROW, "_count"): torch.ones_like(mean_old),
        (ROW, "training_ppl"): (-mean_old).exp(),
        (ROW, "rollout_ppl"): (-mean_rollout).exp(),
        (ROW, "log_ppl_diff"): mean_rollout - mean_old,
    }


def _weight_terms(
    log_ratio: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor, settings: CorrectionSettings
) -> dict[tuple[str, str], torch.Tensor]:
    """The summands of verl's `compute_is_metrics`, whose clamps of the weights to [0, upper] change nothing."""
    from verl.trainer.ppo.rollout_corr_helper import SAFETY_BOUND
    from verl.utils.torch_functional import masked_mean, masked_sum

    upper, lower = settings.upper, settings.lower or 1.0 / settings.upper
    w = weights[mask]
    terms = {
        (TOKEN, "rollout_is_mean"): w,
        (TOKEN, "_square"): w.double().square(),
        (ROW, "rollout_is_seq_mean"): masked_mean(weights, mask, axis=-1),
    }
    log_ratios = log_ratio[mask]
    if settings.level is Level.SEQUENCE:
        by_row = masked_sum(log_ratio, mask, axis=-1)
        log_ratios = by_row.unsqueeze(-1).expand_as(log_ratio)[mask]
        # verl counts rows here, and compares in log space, with bounds in float32.
        log_upper, log_lower = (torch.tensor(bound, device=w.device).log() for bound in (upper, lower))
        terms[ROW, "rollout_is_ratio_fraction_high"] = by_row > log_upper
        terms[ROW, "rollout_is_ratio_fraction_low"] = by_row < log_lower
    ratios = log_ratios.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()  # before truncation
    if settings.level is Level.TOKEN:
        terms[TOKEN, "rollout_is_ratio_fraction_high"] = ratios > upper
        terms[TOKEN, "rollout_is_ratio_fraction_low"] = ratios < lower
    if settings.lower is not None:
        terms[TOKEN, "rollout_is_oob_ratio"] = (ratios < lower) | (ratios > upper)
    return terms


def metrics_of(sums: Sums, settings: CorrectionSettings) -> dict[str, float]:
    """verl's metrics, named `rollout_corr/...`, of a batch of one token or more.

    Args:
        sums: over the whole batch.
        settings: those of the sums.
    """
    count = {over: sums[over, "_count"] for over in (TOKEN, ROW)}
    values = {name: value / count[over] for (over, name), value in sums.items()}
    if settings.level is not None:
        mean, square = values["rollout_is_mean"], values["_square"]
        values["rollout_is_std"] = math.sqrt(max(square - mean**2, 0.0)) if count[TOKEN] > 1 else 0.0
        # Kish's effective sample size, as a fraction of the tokens; verl fails when every weight is zero.
        values["rollout_is_eff_sample_size"] = (mean + EPS) ** 2 / square if square > 0 else 0.0
        if settings.batch_normalize:
            factor = mean if settings.level is Level.TOKEN else values["rollout_is_seq_mean"]
            values["rollout_is_batch_norm_factor"] = factor if factor > EPS else 1.0
    for lag in range(LAGS):
        if tokens := sums.get((TOKEN, f"_lag_{lag}")):
            values[f"k3_kl_lag_{lag}"] = sums[TOKEN, f"_lag_{lag}_k3"] / tokens
            values[f"tokens_lag_{lag}"] = tokens / count[TOKEN]
    return {f"rollout_corr/{name}": value for name, value in values.items() if not name.startswith("_")}
