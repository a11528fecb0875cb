# SPDX-License-Identifier: Apache-2.0
"""The guard: limits, patience, recovery, what an event says and does, and counts that survive a resume."""

import json
import logging
import math

import pytest
from omegaconf import OmegaConf

from flashrl_verl.config import FlashRLConfig, Precision
from flashrl_verl.errors import ConfigError, FlashRLError, GuardError
from flashrl_verl.guard import STATE_FILE, Guard
from flashrl_verl.guard_settings import Action, GuardConfig
from flashrl_verl.guard_watches import Moment, produced, watches
from flashrl_verl.log_excerpt import last_error
from flashrl_verl.quickstart import compose
from flashrl_verl.validation import validate_config

K3, CORRELATION = "rollout_corr/k3_kl", "training/rollout_actor_probs_pearson_corr"
ESS, TRUNCATED = "rollout_corr/rollout_is_eff_sample_size", "rollout_corr/rollout_is_ratio_fraction_high"
REJECTED, CODES = "rollout_corr/rollout_rs_masked_fraction", "flashrl/code_change_rate"

# Of a healthy INT8 run of the quickstart; nothing is rejected there.
TRAINED = {K3: 4e-4, CORRELATION: 0.9993, ESS: 0.999, TRUNCATED: 1e-4, REJECTED: 0.0}
REFITTED = {CODES: 0.03, "flashrl/receipts_verified": 1}

NAMES = ("k3_kl", "correlation", "eff_sample_size", "truncated_share", "rejected_share", "code_change_rate")
ALL = frozenset(NAMES)


@pytest.fixture
def logged(monkeypatch, caplog):
    """Messages on verl.flashrl by level; verl keeps its loggers apart from the root logger, which caplog reads."""
    monkeypatch.setattr(logging.getLogger("verl"), "propagate", True)
    caplog.set_level(logging.INFO, logger="verl.flashrl")
    return lambda level: [r.getMessage() for r in caplog.records if r.levelno == level]


def _guard(sure=ALL, precision=Precision.INT8, first_step=0, **settings) -> Guard:
    return Guard(GuardConfig(**settings), watches(precision), sure, first_step)


def _step(guard: Guard, step: int, **values: float) -> None:
    """One step of a trainer: both looks, as it takes them. ``values`` are by the name of the watch."""
    metrics = {watch.metric: values[watch.name] for watch in watches(Precision.INT8) if watch.name in values}
    guard.look(Moment.TRAINED, step, {**TRAINED, **metrics})
    guard.look(Moment.REFITTED, step, {**TRAINED, **REFITTED, "flashrl/receipt_step": step, **metrics})


# ---- limits ----

BEYOND = {
    "k3_kl": ("k3_kl_max", 0.05, 0.0501),
    "correlation": ("correlation_min", 0.9, 0.8999),
    "eff_sample_size": ("eff_sample_size_min", 0.3, 0.2999),
    "truncated_share": ("truncated_share_max", 0.2, 0.2001),
    "rejected_share": ("rejected_share_max", 0.5, 0.5001),
    # At its limit, 0, nothing changed.
    "code_change_rate": ("code_change_rate_min", 1e-9, 0.0),
}
"""Watch -> its setting, a value at the default limit that is still accepted, and the first that is not."""


def test_every_watch_is_in_the_table_above():
    assert set(BEYOND) == ALL == {watch.name for watch in watches(Precision.INT8)}


@pytest.mark.parametrize("name", NAMES)
def test_a_value_at_its_limit_is_accepted_and_one_past_it_counts(name):
    _, accepted, refused = BEYOND[name]
    guard = _guard()
    _step(guard, 1, **{name: accepted})
    assert set(guard.metrics().values()) == {0}
    _step(guard, 2, **{name: refused})
    counts = guard.metrics()
    assert counts.pop(f"flashrl/guard_{name}_steps") == 1
    assert set(counts.values()) == {0}, "only the one whose value changed"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
@pytest.mark.parametrize("name", NAMES)
def test_a_value_that_is_not_finite_or_missing_is_beyond_every_limit(name, value):
    # Limits that no number exceeds.
    loose = dict(k3_kl_max=1e30, correlation_min=-1, eff_sample_size_min=0, truncated_share_max=1, rejected_share_max=1)
    guard = _guard(**loose)
    _step(guard, 1, **{name: value})
    assert guard.metrics()[f"flashrl/guard_{name}_steps"] == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_limit_of_null_turns_its_metric_off_and_no_other(name):
    guard = _guard(action="stop", patience=1, **{BEYOND[name][0]: None})
    _step(guard, 1, **{name: math.nan})
    assert {key.removeprefix("flashrl/guard_").removesuffix("_steps") for key in guard.metrics()} == ALL - {name} | {"events"}
    other = next(each for each in NAMES if each != name)
    with pytest.raises(GuardError, match=BEYOND[other][0]):
        _step(guard, 2, **{other: math.nan})


def test_the_default_limits_leave_the_measured_healthy_runs_alone():
    """The worst of docs/LOG.md, which is FP8 with random weights on a GPU, with margin: twice as far is still accepted."""
    guard = _guard(action="stop", patience=1)
    _step(guard, 1, k3_kl=2 * 9.2e-3, correlation=1 - 2 * (1 - 0.968), code_change_rate=0.003 / 2)


def test_the_default_limits_catch_the_correlation_that_stale_weights_had():
    for correlation in (0.37, 0.04):
        with pytest.raises(GuardError, match="correlation_min"):
            _step(_guard(action="stop", patience=1), 1, correlation=correlation)


# ---- patience ----


@pytest.mark.parametrize("patience", [1, 2, 5])
def test_an_event_comes_with_exactly_the_patience(patience):
    guard = _guard(action="stop", patience=patience)
    for step in range(1, patience):
        _step(guard, step, k3_kl=1.0)
        assert guard.metrics()["flashrl/guard_k3_kl_steps"] == step
    with pytest.raises(GuardError, match=f"step {patience}: .*for {patience} step"):
        _step(guard, patience, k3_kl=1.0)
    assert guard.metrics()["flashrl/guard_events"] == 1


def test_one_good_step_starts_the_count_anew():
    guard = _guard(action="stop", patience=3)
    for step, value in enumerate((1.0, 1.0, 1e-4) * 5):
        _step(guard, step, k3_kl=value)
    assert guard.metrics()["flashrl/guard_k3_kl_steps"] == 0 == guard.metrics()["flashrl/guard_events"]


def test_different_metrics_do_not_add_up_to_an_event():
    guard = _guard(action="stop", patience=2)
    _step(guard, 1, k3_kl=1.0)
    _step(guard, 2, correlation=0.1)
    _step(guard, 3, code_change_rate=0.0)


# ---- warn and stop ----


def test_an_event_is_warned_of_once_and_again_after_it_recovered(logged):
    guard = _guard(patience=2)
    bad = {3, 4, 5, 6, 9, 10}
    for step in range(1, 12):
        _step(guard, step, k3_kl=1.0 if step in bad else 1e-4)
    warnings = logged(logging.WARNING)
    assert [text.split(":")[0] for text in warnings] == ["step 4", "step 10"]
    assert guard.metrics()["flashrl/guard_events"] == 2
    recovered = [text for text in logged(logging.INFO) if "again" in text]
    assert [text.split(":")[0] for text in recovered] == ["step 7", "step 11"]
    assert "after 4 steps" in recovered[0]


def test_an_event_that_goes_on_is_told_again_after_ten_times_the_patience_and_counted_once(logged):
    guard = _guard(patience=2)
    for step in range(1, 50):
        _step(guard, step, correlation=0.5)
    assert [text.split(":")[0] for text in logged(logging.WARNING)] == ["step 2", "step 22", "step 42"]
    assert "for 42 steps in a row" in logged(logging.WARNING)[-1]
    assert guard.metrics()["flashrl/guard_events"] == 1


def test_two_events_of_a_step_are_one_message(logged):
    guard = _guard(patience=1)
    _step(guard, 1, k3_kl=0.31, correlation=0.5)
    (text,) = logged(logging.WARNING)
    assert "k3_kl=0.31" in text and "pearson_corr=0.5" in text
    assert guard.metrics()["flashrl/guard_events"] == 2


def test_a_stop_comes_before_the_checkpoint_except_for_what_only_the_refit_shows():
    guard = _guard(action="stop", patience=1)
    with pytest.raises(GuardError, match="No checkpoint was saved from this step"):
        guard.look(Moment.TRAINED, 1, {**TRAINED, K3: 1.0})
    guard = _guard(action="stop", patience=1)
    guard.look(Moment.TRAINED, 1, TRAINED)
    with pytest.raises(GuardError) as caught:
        guard.look(Moment.REFITTED, 1, {**REFITTED, "flashrl/receipt_step": 1, CODES: 0.0})
    assert "No checkpoint" not in str(caught.value) and "The last checkpoint is whole" in str(caught.value)


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("name", NAMES)
def test_a_message_has_step_metric_value_limit_duration_reason_and_keys_that_exist(name, precision, configuration):
    setting, _, refused = BEYOND[name]
    watch = next(w for w in watches(precision) if w.name == name)
    guard = _guard(precision=precision, action="stop", patience=2)
    with pytest.raises(GuardError) as caught:
        for step in (7, 8):
            _step(guard, step, **{name: refused})
    text = str(caught.value)
    assert "\n" not in text and text.startswith("step 8: ")
    assert f"{watch.metric}={refused:.4g} is beyond flashrl.guard.{setting}=" in text
    assert "for 2 steps in a row: " + watch.meaning in text and watch.remedy in text
    assert "flashrl.guard.action=warn" in text
    words = [word.strip("(),;.") for word in text.split() if word.startswith(("algorithm.", "actor_", "flashrl."))]
    tried = [word.split("=")[0].rpartition(".") for word in words if not word.startswith("flashrl.guard")]
    assert tried and all(key in OmegaConf.select(configuration, node) for node, _, key in tried), tried
    assert last_error(f"x\nflashrl_verl.errors.GuardError: {text}\nRuntimeError: later")[0].endswith(text)


def test_a_missing_metric_is_told_as_missing():
    with pytest.raises(GuardError, match="k3_kl, which is missing although this configuration produces it, is beyond"):
        _step(_guard(action="stop", patience=1), 1, k3_kl=None)


def test_a_guard_that_is_disabled_looks_at_nothing_and_writes_nothing(tmp_path):
    guard = _guard(enable=False, action="stop", patience=1)
    _step(guard, 1, k3_kl=math.nan, code_change_rate=0.0)
    guard.look(Moment.REFITTED, 1, {})
    guard.save(tmp_path / "global_step_1")
    assert guard.metrics() == {} and not list(tmp_path.iterdir())


# ---- receipts ----


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"flashrl/receipt_step": 4, "flashrl/receipts_verified": 1},
        {"flashrl/receipt_step": math.nan, "flashrl/receipts_verified": 1},
        {"flashrl/receipt_step": 5},
        {"flashrl/receipt_step": 5, "flashrl/receipts_verified": 0},
        {"flashrl/receipt_step": 5, "flashrl/receipts_verified": math.nan},
    ],
)
def test_a_receipt_of_another_step_or_of_nobody_stops_at_once_under_any_action(metrics):
    with pytest.raises(GuardError, match="step 5: .*receipt"):
        _guard(action="warn", patience=100).look(Moment.REFITTED, 5, {CODES: 0.1, **metrics})


# ---- what a configuration produces ----


@pytest.fixture(scope="module")
def configuration():
    return compose(["experiment=base"])


@pytest.mark.parametrize(
    "overrides, absent",
    [
        ([], {"rejected_share"}),
        (["flashrl.precision=fp8"], {"rejected_share"}),
        (["flashrl.precision=bf16"], {"rejected_share", "code_change_rate"}),
        (["correction=seq_tis"], {"rejected_share"}),
        (["correction=metrics_only"], {"rejected_share", "eff_sample_size", "truncated_share"}),
        (["correction=none"], {"rejected_share", "eff_sample_size", "truncated_share"}),
        (["actor_rollout_ref.rollout.calculate_log_probs=false"], ALL - {"code_change_rate"}),
        (["algorithm.rollout_correction.bypass_mode=true"], ALL - {"code_change_rate"}),
        (["algorithm.rollout_correction.rollout_rs=token_k1"], set()),
    ],
)
def test_only_what_the_configuration_cannot_produce_may_be_missing(overrides, absent):
    cfg = compose(["experiment=base", *overrides])
    settings = FlashRLConfig.from_mapping(cfg.flashrl)
    assert produced(cfg, settings) == ALL - absent
    guard = Guard.from_config(cfg, settings)
    guard.look(Moment.TRAINED, 1, {})
    guard.look(Moment.REFITTED, 1, {"flashrl/receipt_step": 1, "flashrl/receipts_verified": 1})
    counts = {key.removeprefix("flashrl/guard_").removesuffix("_steps"): n for key, n in guard.metrics().items()}
    assert counts == {"events": 0, **dict.fromkeys(ALL - absent, 1)}


def test_a_metric_that_nobody_expected_is_watched_when_it_comes():
    guard = _guard(sure=frozenset())
    assert guard.metrics() == {"flashrl/guard_events": 0}
    _step(guard, 1, rejected_share=0.9)
    assert guard.metrics()["flashrl/guard_rejected_share_steps"] == 1


def test_while_only_the_critic_trains_the_actor_may_stand_still_but_receipts_may_not_fail():
    cfg = compose(["experiment=base", "trainer.critic_warmup=3", "flashrl.guard.patience=1", "flashrl.guard.action=stop"])
    guard = Guard.from_config(cfg, validate_config(cfg))
    for step in (1, 2):
        _step(guard, step, code_change_rate=0.0, k3_kl=None)
    with pytest.raises(GuardError, match="receipt"):
        guard.look(Moment.REFITTED, 2, {"flashrl/receipt_step": 1, "flashrl/receipts_verified": 1})
    with pytest.raises(GuardError, match="code_change_rate"):
        _step(guard, 3, code_change_rate=0.0)


# ---- resume ----


def test_a_resumed_run_continues_the_counts_and_the_events(tmp_path, logged):
    folder = tmp_path / "global_step_2"
    before = _guard(patience=3)
    for step in (1, 2):
        guard_step_that_saves(before, step, folder if step == 2 else None, k3_kl=1.0, code_change_rate=0.0)
    assert not logged(logging.WARNING)
    after = _guard(patience=3)
    after.load(folder)
    assert after.metrics() == before.metrics()
    _step(after, 3, k3_kl=1.0)
    (text,) = logged(logging.WARNING)
    assert text.startswith("step 3: ") and "k3_kl=1 " in text and "for 3 steps" in text
    assert after.metrics()["flashrl/guard_events"] == 1 and after.metrics()["flashrl/guard_code_change_rate_steps"] == 0


def guard_step_that_saves(guard, step, folder, **values):
    """As verl does it: trained, saved, then refitted."""
    metrics = {watch.metric: values[watch.name] for watch in watches(Precision.INT8) if watch.name in values}
    guard.look(Moment.TRAINED, step, {**TRAINED, **metrics})
    if folder is not None:
        guard.save(folder)
    guard.look(Moment.REFITTED, step, {**TRAINED, **REFITTED, "flashrl/receipt_step": step, **metrics})


def test_what_the_refit_of_the_saved_step_showed_is_in_its_checkpoint_and_later_steps_are_not(tmp_path):
    folder = tmp_path / "global_step_1"
    guard = _guard(patience=10)
    guard_step_that_saves(guard, 1, folder, code_change_rate=0.0)
    _step(guard, 2, code_change_rate=0.0)
    assert json.loads((folder / STATE_FILE).read_text())["steps"]["code_change_rate"] == 1
    assert [path.name for path in folder.iterdir()] == [STATE_FILE], "nothing half-written is left"


def test_an_episode_that_was_told_is_not_told_again_after_a_resume_but_stops_a_run_that_now_stops(tmp_path, logged):
    before = _guard(patience=2)
    for step in (1, 2):
        _step(before, step, k3_kl=1.0)
    before.save(tmp_path)
    assert len(logged(logging.WARNING)) == 1
    same = _guard(patience=2)
    same.load(tmp_path)
    _step(same, 3, k3_kl=1.0)
    assert len(logged(logging.WARNING)) == 1 and same.metrics()["flashrl/guard_events"] == 1
    strict = _guard(patience=2, action="stop")
    strict.load(tmp_path)
    with pytest.raises(GuardError, match="step 3: .*for 3 steps"):
        _step(strict, 3, k3_kl=1.0)


def test_a_shorter_patience_after_a_resume_applies_to_the_count_so_far(tmp_path, logged):
    before = _guard(patience=5)
    for step in (1, 2, 3):
        _step(before, step, k3_kl=1.0)
    before.save(tmp_path)
    after = _guard(patience=2)
    after.load(tmp_path)
    _step(after, 4, k3_kl=1.0)
    assert len(logged(logging.WARNING)) == 1 and "for 4 steps" in logged(logging.WARNING)[0]


def test_a_checkpoint_from_before_there_was_a_guard_starts_the_count(tmp_path):
    guard = _guard()
    guard.load(tmp_path)
    assert set(guard.metrics().values()) == {0}


def test_counts_of_a_metric_that_is_no_longer_watched_are_dropped(tmp_path):
    before = _guard(patience=5)
    _step(before, 1, k3_kl=1.0)
    before.save(tmp_path)
    after = _guard(k3_kl_max=None)
    after.load(tmp_path)
    assert "flashrl/guard_k3_kl_steps" not in after.metrics()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"steps": {}}', '{"steps": {"k3_kl": "x"}, "told": [], "events": 0}'])
def test_a_damaged_file_of_counts_is_refused_by_its_name(tmp_path, text):
    (tmp_path / STATE_FILE).write_text(text)
    with pytest.raises(FlashRLError, match=f"{STATE_FILE} is damaged.*Remove it"):
        _guard().load(tmp_path)


# ---- settings ----


def test_the_defaults_of_the_yaml_are_those_of_the_dataclass(configuration):
    assert GuardConfig.read(configuration.flashrl.guard) == GuardConfig()
    assert list(configuration.flashrl.guard) == list(GuardConfig.__dataclass_fields__)


def test_settings_reach_the_guard_from_the_command_line_and_the_workers_parse_their_copy():
    cfg = compose(["experiment=base", "flashrl.guard.action=stop", "flashrl.guard.k3_kl_max=null", "flashrl.guard.patience=1"])
    settings = validate_config(cfg)
    assert settings.guard == GuardConfig(action=Action.STOP, k3_kl_max=None, patience=1)
    assert FlashRLConfig.from_mapping(cfg.actor_rollout_ref.rollout.custom.flashrl) == settings
    assert FlashRLConfig.from_mapping(OmegaConf.to_container(cfg.flashrl, resolve=True)) == settings
    with pytest.raises(GuardError, match="correlation_min"):
        _step(Guard.from_config(cfg, settings), 1, correlation=0.0, k3_kl=9.0)


@pytest.mark.parametrize(
    "settings, parts",
    [
        ({"patiense": 3}, ["flashrl.guard.patiense is not a setting", "patience"]),
        ({"enable": "yes"}, ["flashrl.guard.enable='yes'", "true or false"]),
        ({"action": "abort"}, ["flashrl.guard.action='abort'", "warn or stop"]),
        ({"action": None}, ["flashrl.guard.action=None", "flashrl.guard.enable"]),
        ({"patience": 0}, ["flashrl.guard.patience=0", "1 or more"]),
        ({"patience": 1.5}, ["flashrl.guard.patience=1.5", "number of steps"]),
        ({"patience": None}, ["flashrl.guard.patience=None", "number of steps"]),
        ({"patience": True}, ["flashrl.guard.patience=True", "number of steps"]),
        ({"k3_kl_max": 0}, ["flashrl.guard.k3_kl_max=0", "above 0", "null"]),
        ({"k3_kl_max": math.inf}, ["flashrl.guard.k3_kl_max=inf", "finite"]),
        ({"k3_kl_max": math.nan}, ["flashrl.guard.k3_kl_max=nan", "finite"]),
        ({"k3_kl_max": "0.05"}, ["flashrl.guard.k3_kl_max='0.05'", "number"]),
        ({"correlation_min": 1.0}, ["flashrl.guard.correlation_min=1.0", "below 1"]),
        ({"correlation_min": True}, ["flashrl.guard.correlation_min=True", "below 1"]),
        ({"eff_sample_size_min": 1}, ["flashrl.guard.eff_sample_size_min=1", "below 1"]),
        ({"eff_sample_size_min": -0.1}, ["flashrl.guard.eff_sample_size_min=-0.1", "from 0"]),
        ({"truncated_share_max": 1.1}, ["flashrl.guard.truncated_share_max=1.1", "between 0 and 1"]),
        ({"rejected_share_max": -1}, ["flashrl.guard.rejected_share_max=-1", "between 0 and 1"]),
        ({"code_change_rate_min": 1}, ["flashrl.guard.code_change_rate_min=1", "below 1"]),
    ],
)
def test_a_wrong_setting_is_one_error_that_names_its_key_and_what_is_accepted(settings, parts):
    with pytest.raises(ConfigError) as caught:
        FlashRLConfig.from_mapping({"guard": settings})
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [None, False, "off"])
def test_a_word_in_place_of_the_node_is_refused_with_the_switch(value):
    with pytest.raises(ConfigError, match="flashrl.guard=.*flashrl.guard.enable=false"):
        FlashRLConfig.from_mapping({"guard": value})
