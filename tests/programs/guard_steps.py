# SPDX-License-Identifier: Apache-2.0
"""A guard and the steps that it looks at, as a trainer would show them."""

from flashrl_verl.correction.settings import CorrectionSettings, Level, Rejection
from flashrl_verl.settings import GuardConfig, Precision
from flashrl_verl.trainer.guard import Guard, limits

# Of a healthy INT8 run of the quickstart.
TRAINED = {
    "k3_kl": ("rollout_corr/k3_kl", 4e-4),
    "correlation": ("training/rollout_actor_probs_pearson_corr", 0.9993),
    "eff_sample_size": ("rollout_corr/rollout_is_eff_sample_size", 0.999),
    "truncated_share": ("rollout_corr/rollout_is_ratio_fraction_high", 1e-4),
    "rejected_share": ("rollout_corr/rollout_rs_masked_fraction", 0.0),
}
REFITTED = {"code_change_rate": ("flashrl/code_change_rate", 0.03)}
METRICS = {**TRAINED, **REFITTED}
"""Name of the limit to metric and a healthy value."""
NAMES = tuple(METRICS)

ALL = CorrectionSettings(level=Level.TOKEN, rejections=(Rejection(option="token_k2", upper=1.0),))
"""Every limit has its metric with it."""


def guard_of(precision: Precision = Precision.INT8, **settings) -> Guard:
    return Guard(GuardConfig(**settings), limits(precision, ALL))


def shown(which: dict, values: dict) -> dict[str, float]:
    """A step's metrics; ``values`` are by the name of the limit, None for one that is missing."""
    found = {metric: values.get(name, healthy) for name, (metric, healthy) in which.items()}
    return {metric: value for metric, value in found.items() if value is not None}


def step_of(guard: Guard, step: int, **values: float | None) -> None:
    """One step of a trainer: both looks, as it takes them."""
    guard.check(step, shown(TRAINED, values))
    guard.check(step, shown(METRICS, values), refitted=True)
