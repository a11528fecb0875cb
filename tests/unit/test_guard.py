# SPDX-License-Identifier: Apache-2.0
"""The guard: limits, patience, recovery, what an event says and does, and what it watches of a configuration."""

import logging
import math

import pytest
import torch
from guard_steps import ALL, METRICS, NAMES, REFITTED, TRAINED, guard_of, shown, step_of
from omegaconf import OmegaConf

from flashrl_verl.correction.batch import correct_shard
from flashrl_verl.correction.settings import CorrectionSettings, Level
from flashrl_verl.errors import GuardError
from flashrl_verl.settings import Precision
from flashrl_verl.tools.log_excerpt import last_error
from flashrl_verl.tools.recipe_process import compose
from flashrl_verl.trainer.guard import Guard, limits
from flashrl_verl.validation import validate_config

OUTSIDE = "rollout_corr/rollout_is_oob_ratio"

BEYOND = {
    "k3_kl": ("k3_kl_max", 0.02, 0.0201),
    "correlation": ("correlation_min", 0.9, 0.8999),
    "eff_sample_size": ("eff_sample_size_min", 0.3, 0.2999),
    "truncated_share": ("truncated_share_max", 0.2, 0.2001),
    "rejected_share": ("rejected_share_max", 0.5, 0.5001),
    # At its limit, 0, nothing changed.
    "code_change_rate": ("code_change_rate_min", 1e-9, 0.0),
}
"""Limit -> its setting, a value at the default limit that is still accepted, and the first that is not."""


def counts(guard: Guard) -> dict[str, int]:
    return {key.removeprefix("flashrl/guard_").removesuffix("_steps"): value for key, value in guard.metrics().items()}


# ---- limits ----


@pytest.mark.parametrize("name", NAMES)
def test_a_value_at_its_limit_is_accepted_and_one_past_it_counts(name):
    assert {limit.name: limit.setting for limit in limits(Precision.INT8, ALL)} == {
        n: row[0] for n, row in BEYOND.items()
    }
    _, accepted, refused = BEYOND[name]
    guard = guard_of()
    step_of(guard, 1, **{name: accepted})
    assert counts(guard) == {"events": 0, **dict.fromkeys(NAMES, 0)}
    step_of(guard, 2, **{name: refused})
    assert counts(guard) == {"events": 0, **dict.fromkeys(NAMES, 0), name: 1}, "only the one whose value changed"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
@pytest.mark.parametrize("name", NAMES)
def test_a_value_that_is_not_finite_or_missing_is_beyond_every_limit(name, value):
    # Limits that no number exceeds.
    loose = dict(k3_kl_max=1e30, correlation_min=-1, eff_sample_size_min=0, truncated_share_max=1, rejected_share_max=1)
    guard = guard_of(action="stop", patience=1, **loose)
    why = "which is missing although this configuration produces it, is beyond" if value is None else "is beyond"
    with pytest.raises(GuardError, match=f"{METRICS[name][0]}.*{why} flashrl.guard.{BEYOND[name][0]}="):
        step_of(guard, 1, **{name: value})


@pytest.mark.parametrize("name", NAMES)
def test_a_limit_of_null_turns_its_metric_off_and_no_other(name):
    guard = guard_of(action="stop", patience=1, **{BEYOND[name][0]: None})
    step_of(guard, 1, **{name: math.nan})
    assert counts(guard).keys() == {*NAMES, "events"} - {name}
    other = next(each for each in NAMES if each != name)
    with pytest.raises(GuardError, match=BEYOND[other][0]):
        step_of(guard, 2, **{other: math.nan})


def test_the_default_limits_leave_the_measured_healthy_runs_alone_and_catch_stale_weights():
    """The worst of docs/LOG.md, which is FP8 with random weights on a GPU, with margin: twice as far is still accepted.
    Nor do single steps of runs that learned stop one (docs/results/learning.md)."""
    guard = guard_of(action="stop", patience=1)
    step_of(guard, 1, k3_kl=1.26e-2, correlation=0.968, code_change_rate=0.003)
    step_of(guard, 2, k3_kl=2 * 9.2e-3, correlation=1 - 2 * (1 - 0.968), code_change_rate=0.003 / 2)
    for correlation in (0.37, 0.04):
        with pytest.raises(GuardError, match="correlation_min"):
            step_of(guard_of(action="stop", patience=1), 1, correlation=correlation)


# ---- patience ----


@pytest.mark.parametrize("patience", [1, 2, 5])
def test_a_stop_comes_with_exactly_the_patience(patience):
    guard = guard_of(action="stop", patience=patience)
    for step in range(1, patience):
        step_of(guard, step, k3_kl=1.0)
        assert counts(guard)["k3_kl"] == step
    with pytest.raises(GuardError, match=f"step {patience}: .*for {patience} step"):
        step_of(guard, patience, k3_kl=1.0)
    assert counts(guard)["events"] == 1


def test_neither_steps_with_a_good_one_between_nor_different_metrics_add_up():
    guard = guard_of(action="stop", patience=3)
    for step, value in enumerate((1.0, 1.0, 1e-4) * 5):
        step_of(guard, step, k3_kl=value)
    assert counts(guard)["k3_kl"] == 0 == counts(guard)["events"]
    step_of(guard, 1, k3_kl=1.0)
    step_of(guard, 2, correlation=0.1)
    step_of(guard, 3, code_change_rate=0.0)


def test_an_event_is_warned_of_once_and_again_after_it_recovered(logged):
    guard = guard_of(patience=2)
    bad = {3, 4, 5, 6, 9, 10}
    for step in range(1, 12):
        step_of(guard, step, k3_kl=1.0 if step in bad else 1e-4)
    assert [text.split(":")[0] for text in logged(logging.WARNING)] == ["step 4", "step 10"]
    assert counts(guard)["events"] == 2
    recovered = [text for text in logged(logging.INFO) if "again" in text]
    assert [text.split(":")[0] for text in recovered] == ["step 7", "step 11"]
    assert "after 4 steps" in recovered[0]


def test_two_events_of_a_step_are_one_message(logged):
    guard = guard_of(patience=1)
    step_of(guard, 1, k3_kl=0.31, correlation=0.5)
    (text,) = logged(logging.WARNING)
    assert "k3_kl=0.31" in text and "pearson_corr=0.5" in text
    assert counts(guard)["events"] == 2


# ---- a stop ----


def test_a_stop_comes_before_the_checkpoint_except_for_what_only_the_refit_shows():
    guard = guard_of(action="stop", patience=1)
    with pytest.raises(GuardError, match="k3_kl=1 "):
        guard.look(1, shown(TRAINED, {"k3_kl": 1.0}))
    guard = guard_of(action="stop", patience=1)
    guard.look(1, shown(TRAINED, {}))
    with pytest.raises(GuardError, match="code_change_rate=0 "):
        guard.look(1, shown(REFITTED, {"code_change_rate": 0.0}), refitted=True)


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.FP8])
@pytest.mark.parametrize("name", NAMES)
def test_a_message_has_step_metric_value_limit_duration_reason_and_keys_that_exist(name, precision, base):
    setting, _, refused = BEYOND[name]
    limit = next(each for each in limits(precision, ALL) if each.name == name)
    guard = guard_of(precision=precision, action="stop", patience=2)
    with pytest.raises(GuardError) as caught:
        for step in (7, 8):
            step_of(guard, step, **{name: refused})
    text = str(caught.value)
    assert "\n" not in text and text.startswith("step 8: ")
    assert f"{limit.metric}={refused:.4g} is beyond flashrl.guard.{setting}=" in text
    assert "for 2 steps in a row: " + limit.meaning in text and limit.remedy in text
    assert (
        "No checkpoint was saved so far (trainer.save_freq=-1), or go on regardless with flashrl.guard.action=warn"
        in text
    )
    words = [word.strip("(),;.") for word in text.split() if word.startswith(("algorithm.", "actor_", "flashrl."))]
    tried = [word.split("=")[0].rpartition(".") for word in words if not word.startswith("flashrl.guard")]
    assert tried and all(key in OmegaConf.select(base, node) for node, _, key in tried), tried
    assert last_error(f"x\nflashrl_verl.errors.GuardError: {text}\nRuntimeError: later")[0].endswith(text)


def test_a_stop_names_the_last_checkpoint(tmp_path):
    guard = guard_of(action="stop", patience=1)
    guard.last_checkpoint = tmp_path / "global_step_2"
    with pytest.raises(GuardError, match=f"Resume from {tmp_path}/global_step_2, or go on regardless"):
        step_of(guard, 3, k3_kl=1.0)


def test_a_guard_that_is_disabled_looks_at_nothing():
    guard = guard_of(enable=False, action="stop", patience=1)
    step_of(guard, 1, k3_kl=math.nan, code_change_rate=0.0)
    assert guard.metrics() == {}


# ---- what a configuration has ----

REJECTING = [
    "algorithm.rollout_correction.rollout_rs=token_k1",
    "algorithm.rollout_correction.rollout_rs_threshold=2.0",
]
SEVERAL_UPDATES = ["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=16"]


def configured(*overrides: str) -> Guard:
    cfg = compose(["experiment=base", "flashrl.guard.action=stop", "flashrl.guard.patience=1", *overrides])
    return Guard.from_config(cfg, validate_config(cfg))


NO_WEIGHTS = {"eff_sample_size", "truncated_share"}


@pytest.mark.parametrize(
    "overrides, absent",
    [
        ([], {"rejected_share"}),
        (["flashrl.precision=bf16"], {"rejected_share", "code_change_rate"}),
        (["correction=seq_tis"], {"rejected_share"}),
        (["correction=icepop"], {"rejected_share"}),
        (["correction=metrics_only"], {"rejected_share", *NO_WEIGHTS}),
        (["correction=none"], {"rejected_share", *NO_WEIGHTS}),
        (["correction=none", "actor_rollout_ref.rollout.calculate_log_probs=false"], {*NAMES} - {"code_change_rate"}),
        (["correction=bypass"], {*NAMES} - {"code_change_rate"}),
        (REJECTING, set()),
    ],
)
def test_what_the_configuration_produces_may_not_be_missing_and_nothing_else_is_missed(overrides, absent):
    cfg = compose(["experiment=base", *overrides])
    guard = Guard.from_config(cfg, validate_config(cfg))
    guard.look(1, {})
    guard.look(1, {}, refitted=True)
    assert counts(guard) == {"events": 0, **dict.fromkeys({*NAMES} - absent, 1)}


def test_what_is_watched_is_told_once_and_nothing_to_watch_is_a_warning(logged):
    configured("correction=bypass", *SEVERAL_UPDATES)
    assert [text for text in logged(logging.INFO) if "the guard watches code_change_rate (" in text]
    configured()
    (text,) = [text for text in logged(logging.INFO) if "correlation" in text]
    assert "the guard watches k3_kl, correlation, eff_sample_size, truncated_share, code_change_rate (" in text
    assert not logged(logging.WARNING)
    configured("correction=bypass", *SEVERAL_UPDATES, "flashrl.precision=bf16")
    assert "nothing to watch" in logged(logging.WARNING)[-1] and "flashrl.guard.action" in logged(logging.WARNING)[-1]


def test_while_only_the_critic_trains_the_actor_may_stand_still():
    guard = configured("trainer.critic_warmup=3")
    for step in (1, 2):
        step_of(guard, step, code_change_rate=0.0, k3_kl=None)
    with pytest.raises(GuardError, match="code_change_rate"):
        step_of(guard, 3, code_change_rate=0.0)


def test_in_bypass_mode_several_updates_leave_rejections_and_codes_and_one_leaves_the_mismatch():
    moved = dict(k3_kl=0.2, correlation=0.5, eff_sample_size=0.2, truncated_share=0.4)
    weights = ["algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_threshold=2.0"]
    reinforce = ["algorithm.rollout_correction.loss_type=reinforce", *weights]
    for loss in ([], reinforce):
        bypass = ["correction=bypass", *SEVERAL_UPDATES, *REJECTING, *loss]
        guard = configured(*bypass)
        step_of(guard, 1, **moved)
        assert counts(guard) == {"events": 0, "rejected_share": 0, "code_change_rate": 0}
        with pytest.raises(GuardError, match="rejected_share_max"):
            step_of(configured(*bypass), 1, rejected_share=0.6)
        with pytest.raises(GuardError, match="code_change_rate_min"):
            step_of(configured(*bypass), 1, code_change_rate=0.0)
    # No update has moved pi_theta yet when it is compared with pi_rollout.
    one = ["correction=bypass", "data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=64"]
    with pytest.raises(GuardError, match="k3_kl"):
        step_of(configured(*one), 1, k3_kl=0.2)
    step_of(configured(*one, "actor_rollout_ref.actor.ppo_epochs=2"), 1, k3_kl=0.2)


def test_with_two_bounds_what_is_dropped_on_either_side_is_watched_and_no_remedy_drops_more():
    settings = CorrectionSettings(level=Level.TOKEN, lower=0.5, upper=5.0)
    old = torch.tensor([[0.0, math.log(0.4), math.log(6.0), math.log(4.0)]])
    metrics = correct_shard(old, torch.zeros_like(old), torch.ones_like(old), settings).metrics
    assert metrics[OUTSIDE] == 0.5 and metrics["rollout_corr/rollout_is_ratio_fraction_high"] == 0.25
    with pytest.raises(GuardError) as caught:
        configured("correction=icepop").look(1, {**shown(TRAINED, {}), **metrics, OUTSIDE: 0.25})
    text = str(caught.value)
    assert f"{OUTSIDE}=0.25 is beyond flashrl.guard.truncated_share_max=0.2" in text
    assert "dropped" in text and "cut at the cap" not in text and "wider bounds" in text
    for precision in Precision:
        of_two, of_cap = ({limit.name: limit.remedy for limit in limits(precision, s)} for s in (settings, ALL))
        assert "a lower algorithm.rollout_correction" not in of_two["eff_sample_size"]
        assert "a lower algorithm.rollout_correction.rollout_is_threshold" in of_cap["eff_sample_size"]
