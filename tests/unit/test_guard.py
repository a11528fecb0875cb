# SPDX-License-Identifier: Apache-2.0
"""The guard: limits, patience, recovery, what an event says and does."""

import logging
import math

import pytest
from guard_steps import ALL, CODES, K3, NAMES, REFITTED, TIS, TRAINED, guard_of, step_of
from omegaconf import OmegaConf

from flashrl_verl.config import Precision
from flashrl_verl.errors import GuardError
from flashrl_verl.guard_watches import Moment, watches
from flashrl_verl.log_excerpt import last_error

# ---- limits ----

BEYOND = {
    "k3_kl": ("k3_kl_max", 0.02, 0.0201),
    "correlation": ("correlation_min", 0.9, 0.8999),
    "eff_sample_size": ("eff_sample_size_min", 0.3, 0.2999),
    "truncated_share": ("truncated_share_max", 0.2, 0.2001),
    "rejected_share": ("rejected_share_max", 0.5, 0.5001),
    # At its limit, 0, nothing changed.
    "code_change_rate": ("code_change_rate_min", 1e-9, 0.0),
}
"""Watch -> its setting, a value at the default limit that is still accepted, and the first that is not."""


def test_every_watch_is_in_the_table_above():
    assert set(BEYOND) == ALL == {watch.name for watch in watches(Precision.INT8, TIS)}


@pytest.mark.parametrize("name", NAMES)
def test_a_value_at_its_limit_is_accepted_and_one_past_it_counts(name):
    _, accepted, refused = BEYOND[name]
    guard = guard_of()
    step_of(guard, 1, **{name: accepted})
    assert set(guard.metrics().values()) == {0}
    step_of(guard, 2, **{name: refused})
    counts = guard.metrics()
    assert counts.pop(f"flashrl/guard_{name}_steps") == 1
    assert set(counts.values()) == {0}, "only the one whose value changed"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
@pytest.mark.parametrize("name", NAMES)
def test_a_value_that_is_not_finite_or_missing_is_beyond_every_limit(name, value):
    # Limits that no number exceeds.
    loose = dict(k3_kl_max=1e30, correlation_min=-1, eff_sample_size_min=0, truncated_share_max=1, rejected_share_max=1)
    guard = guard_of(**loose)
    step_of(guard, 1, **{name: value})
    assert guard.metrics()[f"flashrl/guard_{name}_steps"] == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_limit_of_null_turns_its_metric_off_and_no_other(name):
    guard = guard_of(action="stop", patience=1, **{BEYOND[name][0]: None})
    step_of(guard, 1, **{name: math.nan})
    assert {key.removeprefix("flashrl/guard_").removesuffix("_steps") for key in guard.metrics()} == ALL - {name} | {"events"}
    other = next(each for each in NAMES if each != name)
    with pytest.raises(GuardError, match=BEYOND[other][0]):
        step_of(guard, 2, **{other: math.nan})


def test_the_default_limits_leave_the_measured_healthy_runs_alone():
    """The worst of docs/LOG.md, which is FP8 with random weights on a GPU, with margin: twice as far is still accepted. Nor do
    single steps of runs that learned stop one (docs/results/learning.md)."""
    guard = guard_of(action="stop", patience=1)
    step_of(guard, 1, k3_kl=1.26e-2, correlation=0.968, code_change_rate=0.003)
    step_of(guard, 2, k3_kl=2 * 9.2e-3, correlation=1 - 2 * (1 - 0.968), code_change_rate=0.003 / 2)


def test_the_default_limits_catch_the_correlation_that_stale_weights_had():
    for correlation in (0.37, 0.04):
        with pytest.raises(GuardError, match="correlation_min"):
            step_of(guard_of(action="stop", patience=1), 1, correlation=correlation)


# ---- patience ----


@pytest.mark.parametrize("patience", [1, 2, 5])
def test_an_event_comes_with_exactly_the_patience(patience):
    guard = guard_of(action="stop", patience=patience)
    for step in range(1, patience):
        step_of(guard, step, k3_kl=1.0)
        assert guard.metrics()["flashrl/guard_k3_kl_steps"] == step
    with pytest.raises(GuardError, match=f"step {patience}: .*for {patience} step"):
        step_of(guard, patience, k3_kl=1.0)
    assert guard.metrics()["flashrl/guard_events"] == 1


def test_one_good_step_starts_the_count_anew():
    guard = guard_of(action="stop", patience=3)
    for step, value in enumerate((1.0, 1.0, 1e-4) * 5):
        step_of(guard, step, k3_kl=value)
    assert guard.metrics()["flashrl/guard_k3_kl_steps"] == 0 == guard.metrics()["flashrl/guard_events"]


def test_different_metrics_do_not_add_up_to_an_event():
    guard = guard_of(action="stop", patience=2)
    step_of(guard, 1, k3_kl=1.0)
    step_of(guard, 2, correlation=0.1)
    step_of(guard, 3, code_change_rate=0.0)


# ---- warn and stop ----


def test_an_event_is_warned_of_once_and_again_after_it_recovered(logged):
    guard = guard_of(patience=2)
    bad = {3, 4, 5, 6, 9, 10}
    for step in range(1, 12):
        step_of(guard, step, k3_kl=1.0 if step in bad else 1e-4)
    warnings = logged(logging.WARNING)
    assert [text.split(":")[0] for text in warnings] == ["step 4", "step 10"]
    assert guard.metrics()["flashrl/guard_events"] == 2
    recovered = [text for text in logged(logging.INFO) if "again" in text]
    assert [text.split(":")[0] for text in recovered] == ["step 7", "step 11"]
    assert "after 4 steps" in recovered[0]


def test_an_event_that_goes_on_is_told_again_after_ten_times_the_patience_and_counted_once(logged):
    guard = guard_of(patience=2)
    for step in range(1, 50):
        step_of(guard, step, correlation=0.5)
    assert [text.split(":")[0] for text in logged(logging.WARNING)] == ["step 2", "step 22", "step 42"]
    assert "for 42 steps in a row" in logged(logging.WARNING)[-1]
    assert guard.metrics()["flashrl/guard_events"] == 1


def test_two_events_of_a_step_are_one_message(logged):
    guard = guard_of(patience=1)
    step_of(guard, 1, k3_kl=0.31, correlation=0.5)
    (text,) = logged(logging.WARNING)
    assert "k3_kl=0.31" in text and "pearson_corr=0.5" in text
    assert guard.metrics()["flashrl/guard_events"] == 2


def test_a_stop_comes_before_the_checkpoint_except_for_what_only_the_refit_shows():
    guard = guard_of(action="stop", patience=1)
    with pytest.raises(GuardError, match="k3_kl=1 "):
        guard.look(Moment.TRAINED, 1, {**TRAINED, K3: 1.0})
    guard = guard_of(action="stop", patience=1)
    guard.look(Moment.TRAINED, 1, TRAINED)
    with pytest.raises(GuardError, match="code_change_rate=0 "):
        guard.look(Moment.REFITTED, 1, {**REFITTED, CODES: 0.0})


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("name", NAMES)
def test_a_message_has_step_metric_value_limit_duration_reason_and_keys_that_exist(name, precision, base):
    setting, _, refused = BEYOND[name]
    watch = next(w for w in watches(precision, TIS) if w.name == name)
    guard = guard_of(precision=precision, action="stop", patience=2)
    with pytest.raises(GuardError) as caught:
        for step in (7, 8):
            step_of(guard, step, **{name: refused})
    text = str(caught.value)
    assert "\n" not in text and text.startswith("step 8: ")
    assert f"{watch.metric}={refused:.4g} is beyond flashrl.guard.{setting}=" in text
    assert "for 2 steps in a row: " + watch.meaning in text and watch.remedy in text
    assert "flashrl.guard.action=warn" in text
    words = [word.strip("(),;.") for word in text.split() if word.startswith(("algorithm.", "actor_", "flashrl."))]
    tried = [word.split("=")[0].rpartition(".") for word in words if not word.startswith("flashrl.guard")]
    assert tried and all(key in OmegaConf.select(base, node) for node, _, key in tried), tried
    assert last_error(f"x\nflashrl_verl.errors.GuardError: {text}\nRuntimeError: later")[0].endswith(text)


def test_a_missing_metric_is_told_as_missing():
    with pytest.raises(GuardError, match="k3_kl, which is missing although this configuration produces it, is beyond"):
        step_of(guard_of(action="stop", patience=1), 1, k3_kl=None)


def test_a_guard_that_is_disabled_looks_at_nothing_and_writes_nothing(tmp_path):
    guard = guard_of(enable=False, action="stop", patience=1)
    step_of(guard, 1, k3_kl=math.nan, code_change_rate=0.0)
    guard.look(Moment.REFITTED, 1, {})
    guard.save(tmp_path / "global_step_1")
    assert guard.metrics() == {} and not list(tmp_path.iterdir())
