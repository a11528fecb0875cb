# SPDX-License-Identifier: Apache-2.0
"""A guard and the steps that it looks at, as a trainer would show them."""

from pathlib import Path

from flashrl_verl.config import Precision
from flashrl_verl.correction_settings import CorrectionSettings, Level
from flashrl_verl.guard import Guard
from flashrl_verl.guard_settings import GuardConfig
from flashrl_verl.guard_watches import Moment, watches

K3, CORRELATION = "rollout_corr/k3_kl", "training/rollout_actor_probs_pearson_corr"
ESS, TRUNCATED = "rollout_corr/rollout_is_eff_sample_size", "rollout_corr/rollout_is_ratio_fraction_high"
REJECTED, CODES = "rollout_corr/rollout_rs_masked_fraction", "flashrl/code_change_rate"

# Of a healthy INT8 run of the quickstart; nothing is rejected there.
TRAINED = {K3: 4e-4, CORRELATION: 0.9993, ESS: 0.999, TRUNCATED: 1e-4, REJECTED: 0.0}
REFITTED = {CODES: 0.03}

NAMES = ("k3_kl", "correlation", "eff_sample_size", "truncated_share", "rejected_share", "code_change_rate")
ALL = frozenset(NAMES)

TIS = CorrectionSettings(level=Level.TOKEN)
"""The cap is verl's default, 2."""


def guard_of(sure: frozenset[str] = ALL, precision: Precision = Precision.INT8, first_step: int = 0, **settings) -> Guard:
    return Guard(GuardConfig(**settings), watches(precision, TIS), sure, first_step)


def step_of(guard: Guard, step: int, save_to: Path | None = None, **values: float) -> None:
    """One step of a trainer: both looks, as it takes them, and between them a checkpoint where ``save_to`` is given.

    ``values`` are by the name of the watch.
    """
    metrics = {watch.metric: values[watch.name] for watch in watches(Precision.INT8, TIS) if watch.name in values}
    guard.look(Moment.TRAINED, step, {**TRAINED, **metrics})
    if save_to is not None:
        guard.save(save_to)
    guard.look(Moment.REFITTED, step, {**TRAINED, **REFITTED, **metrics})
