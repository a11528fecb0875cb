# SPDX-License-Identifier: Apache-2.0
"""The guard: limits, patience, recovery, what an event says and does, and what it watches of a configuration."""

import logging
import math

import pytest
from omegaconf import OmegaConf

from flashrl_verl.correction.settings import CorrectionSettings, Level
from flashrl_verl.errors import GuardError
from flashrl_verl.settings import ASYNC, GuardConfig, Precision
from flashrl_verl.tools.recipe_process import compose
from flashrl_verl.trainer.guard import Guard, limits
from flashrl_verl.validation import validate_config

# Of a healthy INT8 run of the quickstart.
TRAINED = {
    "k3_kl": ("rollout_corr/k3_kl", 4e-4),
    "correlation": ("training/rollout_actor_probs_pearson_corr", 0.9993),
    "eff_sample_size": ("rollout_corr/rollout_is_eff_sample_size", 0.999),
    "grad_norm": ("actor/grad_norm", 0.7),
}
REFITTED = {"code_change_rate": ("flashrl/code_change_rate", 0.03)}
METRICS = {**TRAINED, **REFITTED}
"""Name of the limit to metric and a healthy value."""
NAMES = tuple(METRICS)

BEYOND = {
    "k3_kl": ("k3_kl_max", 0.02, 0.0201),
    "correlation": ("correlation_min", 0.9, 0.8999),
    "eff_sample_size": ("eff_sample_size_min", 0.3, 0.2999),
    "grad_norm": ("grad_norm_max", 1e6, 1.01e6),
    # At its limit, 0, nothing changed.
    "code_change_rate": ("code_change_rate_min", 1e-9, 0.0),
}
"""Limit -> its setting, a value at the default limit that is still accepted, and the first that is not."""


ALL = CorrectionSettings(level=Level.TOKEN)
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


def counts(guard: Guard) -> dict[str, int]:
    return {"events": guard.metrics()["flashrl/guard_events"], **guard._steps}


# ---- limits ----


@pytest.mark.parametrize("name", NAMES)
def test_a_value_at_its_limit_is_accepted_and_one_past_it_or_not_finite_or_missing_counts(name):
    setting, accepted, refused = BEYOND[name]
    guard = guard_of()
    step_of(guard, 1, **{name: accepted})
    assert counts(guard) == {"events": 0, **dict.fromkeys(NAMES, 0)}
    for step, value in enumerate((refused, math.nan, math.inf, -math.inf, None), 1):
        step_of(guard, step, **{name: value})
        assert counts(guard) | {"events": 0} == {"events": 0, **dict.fromkeys(NAMES, 0), name: step}
    with pytest.raises(GuardError, match=f"{METRICS[name][0]}, which is missing .* beyond flashrl.guard.{setting}="):
        step_of(guard_of(action="stop", patience=1), 1, **{name: None})


def test_a_guard_that_is_off_accepts_everything():
    step_of(guard_of(enable=False, action="stop", patience=1), 1, correlation=0.37)


# ---- patience ----


@pytest.mark.parametrize("patience", [2, 5])
def test_an_event_is_a_row_of_as_many_steps_told_once_and_again_after_recovery(patience, logged):
    bad = [step for length in (patience - 1, patience, patience + 3) for step in [True] * length + [False]]
    events = [2 * patience - 1, 3 * patience]
    # What another metric adds between the rows makes them no longer.
    steps = list(enumerate({"k3_kl": 1.0} if beyond else {"correlation": 0.1} for beyond in bad))
    warns, stops = guard_of(patience=patience), guard_of(action="stop", patience=patience)
    for step, values in steps:
        step_of(warns, step, **values)
    assert [text.split(":")[0] for text in logged(logging.WARNING)] == [f"step {step}" for step in events]
    assert counts(warns)["events"] == 2
    with pytest.raises(GuardError, match=f"^step {events[0]}: .*for {patience} steps in a row"):
        for step, values in steps:
            step_of(stops, step, **values)


# ---- a stop ----


def test_a_stop_comes_before_the_checkpoint_except_for_what_only_the_refit_shows():
    with pytest.raises(GuardError, match="k3_kl=1 "):
        guard_of(action="stop", patience=1).check(1, shown(TRAINED, {"k3_kl": 1.0}))
    guard = guard_of(action="stop", patience=1)
    guard.check(1, shown(TRAINED, {}))
    with pytest.raises(GuardError, match="code_change_rate=0 "):
        guard.check(1, shown(REFITTED, {"code_change_rate": 0.0}), refitted=True)


@pytest.mark.parametrize("precision", Precision)
def test_a_stop_names_value_limit_and_last_checkpoint_and_every_key_it_recommends_exists(precision, base, tmp_path):
    for limit in limits(precision, ALL):
        setting, _, refused = BEYOND[limit.name]
        guard = guard_of(precision=precision, action="stop", patience=1)
        guard.last_checkpoint = tmp_path / "global_step_2"
        with pytest.raises(GuardError, match=f"Resume from {tmp_path}/global_step_2, or go on regardless") as caught:
            step_of(guard, 8, **{limit.name: refused})
        text = str(caught.value)
        assert "\n" not in text and f"{limit.metric}={refused:.4g} is beyond flashrl.guard.{setting}=" in text
        words = [word.strip("(),;.").split("=")[0] for word in text.split()]
        keys = [word for word in words if word.startswith(("algorithm.", "actor_", "flashrl.", "trainer."))]
        missing = [key for key in keys if (at := key.rpartition("."))[2] not in OmegaConf.select(base, at[0])]
        assert len(keys) > 2 and not missing


# ---- what a configuration has ----

TWO_UPDATES = ("correction=bypass", "data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=32")


def configured(*overrides: str) -> Guard:
    cfg = compose(["experiment=base", "flashrl.guard.action=stop", "flashrl.guard.patience=1", *overrides])
    return Guard.from_config(cfg, validate_config(cfg))


NO_LOG_PROBS = ("correction=none", "actor_rollout_ref.rollout.calculate_log_probs=false")


@pytest.mark.parametrize(
    "overrides, absent",
    [
        ((), set()),
        (("flashrl.precision=bf16",), {"code_change_rate"}),
        (("correction=seq_tis",), set()),
        (("correction=none",), {"eff_sample_size"}),
        (NO_LOG_PROBS, {*NAMES} - {"code_change_rate", "grad_norm"}),
        (("correction=bypass",), {*NAMES} - {"code_change_rate", "grad_norm"}),
        ((f"trainer.v1.trainer_mode={ASYNC}",), {"correlation", "k3_kl"}),
    ],
)
def test_what_the_configuration_produces_may_not_be_missing_and_nothing_else_is_missed(overrides, absent):
    guard = configured(*overrides, "flashrl.guard.action=warn")
    guard.check(1, {})
    guard.check(1, {}, refitted=True)
    assert counts(guard) | {"events": 0} == {"events": 0, **dict.fromkeys({*NAMES} - absent, 1)}


def test_an_asynchronous_mismatch_is_that_of_trajectories_of_the_last_update():
    guard = configured(f"trainer.v1.trainer_mode={ASYNC}")
    weights = {"rollout_corr/rollout_is_eff_sample_size": 1.0, "actor/grad_norm": 0.7}
    guard.check(1, {**weights, "rollout_corr/k3_kl": 9.0, "rollout_corr/k3_kl_lag_0": 1e-4})
    with pytest.raises(GuardError, match="rollout_corr/k3_kl_lag_0=0.5 is beyond flashrl.guard.k3_kl_max"):
        guard.check(2, {**weights, "rollout_corr/k3_kl": 1e-4, "rollout_corr/k3_kl_lag_0": 0.5})


def test_an_asynchronous_step_without_such_a_trajectory_ends_a_row_of_bad_ones():
    guard = configured(f"trainer.v1.trainer_mode={ASYNC}", "flashrl.guard.patience=2")
    weights = {"rollout_corr/rollout_is_eff_sample_size": 1.0, "actor/grad_norm": 0.7}
    bad = {**weights, "rollout_corr/k3_kl_lag_0": 0.5}
    for step, metrics in enumerate((bad, weights, bad)):
        guard.check(step, metrics)
        assert guard.healthy is (metrics is weights)
    with pytest.raises(GuardError, match="2 steps in a row"):
        guard.check(3, bad)


def test_while_only_the_critic_trains_the_actor_may_stand_still():
    guard = configured("trainer.critic_warmup=3", "critic.enable=true")
    for step in (1, 2):
        step_of(guard, step, code_change_rate=0.0, k3_kl=None)
    with pytest.raises(GuardError, match="code_change_rate"):
        step_of(guard, 3, code_change_rate=0.0)


def test_in_bypass_mode_a_second_update_moves_the_policy_away_from_the_rollouts_and_is_no_mismatch(logged):
    moved = dict(k3_kl=0.2, correlation=0.5, eff_sample_size=0.2)
    step_of(configured(*TWO_UPDATES), 1, **moved)
    # No update has moved the policy yet when it is compared with the rollout's.
    one = (*TWO_UPDATES, "data.train_batch_size=32")
    with pytest.raises(GuardError, match="k3_kl"):
        step_of(configured(*one), 1, **moved)
    step_of(configured(*one, "actor_rollout_ref.actor.ppo_epochs=2"), 1, **moved)
    assert not logged(logging.WARNING)
    configured(*TWO_UPDATES, "flashrl.precision=bf16", "flashrl.guard.grad_norm_max=null")
    assert "nothing to watch" in logged(logging.WARNING)[0]


def test_with_two_bounds_no_remedy_drops_more():
    settings = CorrectionSettings(level=Level.TOKEN, lower=0.5, upper=5.0)
    remedies = [limit.remedy for limit in limits(Precision.INT8, settings)]
    assert not any("lower algorithm.rollout_correction" in remedy for remedy in remedies)
    assert any("wider bounds" in remedy for remedy in remedies)
