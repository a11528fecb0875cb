# SPDX-License-Identifier: Apache-2.0
"""What the guard watches of a configuration: what it produces, and what its metrics mean there."""

import logging
import math
from statistics import NormalDist

import pytest
import torch
from guard_steps import ALL, CODES, CORRELATION, ESS, K3, REFITTED, REJECTED, TIS, TRAINED, TRUNCATED, guard_of, step_of
from omegaconf import OmegaConf

from flashrl_verl.config import FlashRLConfig, Precision
from flashrl_verl.correction import correct_shard
from flashrl_verl.correction_settings import CorrectionSettings, Level
from flashrl_verl.errors import GuardError
from flashrl_verl.guard import Guard
from flashrl_verl.guard_settings import GuardConfig
from flashrl_verl.guard_watches import Moment, produced, watches
from flashrl_verl.quickstart import compose
from flashrl_verl.validation import validate_config

OUTSIDE = "rollout_corr/rollout_is_oob_ratio"
SEVERAL_UPDATES = ["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=16"]


def _guard(*overrides: str) -> Guard:
    """Of ``experiment=base``; an event stops at once."""
    cfg = compose(["experiment=base", "flashrl.guard.patience=1", "flashrl.guard.action=stop", *overrides])
    return Guard.from_config(cfg, validate_config(cfg))


def _watched(guard: Guard) -> set[str]:
    """Names of the watches that the guard has counted something of, after a step that shows every metric."""
    guard.look(Moment.TRAINED, 1, {**TRAINED, OUTSIDE: 0.0})
    guard.look(Moment.REFITTED, 1, REFITTED)
    return {key.removeprefix("flashrl/guard_").removesuffix("_steps") for key in guard.metrics()} - {"events"}


@pytest.mark.parametrize(
    "overrides, absent",
    [
        ([], {"rejected_share"}),
        (["flashrl.precision=fp8"], {"rejected_share"}),
        (["flashrl.precision=bf16"], {"rejected_share", "code_change_rate"}),
        (["correction=seq_tis"], {"rejected_share"}),
        (["correction=icepop"], {"rejected_share"}),
        (["correction=metrics_only"], {"rejected_share", "eff_sample_size", "truncated_share"}),
        (["correction=none"], {"rejected_share", "eff_sample_size", "truncated_share"}),
        (["actor_rollout_ref.rollout.calculate_log_probs=false"], ALL - {"code_change_rate"}),
        (["correction=bypass"], ALL - {"code_change_rate"}),
        (["algorithm.rollout_correction.rollout_rs=token_k1", "algorithm.rollout_correction.rollout_rs_threshold=2.0"], set()),
    ],
)
def test_only_what_the_configuration_cannot_produce_may_be_missing(overrides, absent):
    cfg = compose(["experiment=base", *overrides])
    settings = FlashRLConfig.from_mapping(cfg.flashrl)
    correction = CorrectionSettings.from_config(cfg.algorithm.rollout_correction)
    assert produced(cfg, settings, correction) == ALL - absent
    guard = Guard.from_config(cfg, settings)
    guard.look(Moment.TRAINED, 1, {})
    guard.look(Moment.REFITTED, 1, {})
    counts = {key.removeprefix("flashrl/guard_").removesuffix("_steps"): n for key, n in guard.metrics().items()}
    assert counts == {"events": 0, **dict.fromkeys(ALL - absent, 1)}


def test_a_metric_that_nobody_expected_is_watched_when_it_comes():
    guard = guard_of(sure=frozenset())
    assert guard.metrics() == {"flashrl/guard_events": 0}
    step_of(guard, 1, rejected_share=0.9)
    assert guard.metrics()["flashrl/guard_rejected_share_steps"] == 1


def test_while_only_the_critic_trains_the_actor_may_stand_still():
    guard = _guard("trainer.critic_warmup=3")
    for step in (1, 2):
        step_of(guard, step, code_change_rate=0.0, k3_kl=None)
    with pytest.raises(GuardError, match="code_change_rate"):
        step_of(guard, 3, code_change_rate=0.0)


# ---- bypass mode ----


@pytest.mark.parametrize("loss", [[], ["algorithm.rollout_correction.loss_type=reinforce"]])
def test_what_an_update_does_to_the_ratios_of_bypass_mode_is_no_event(loss):
    if loss:
        loss += ["algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_threshold=2.0"]
    moved = {K3: 0.2, CORRELATION: 0.5, ESS: 0.2, TRUNCATED: 0.4}
    guard = _guard("correction=bypass", *SEVERAL_UPDATES, *loss)
    guard.look(Moment.TRAINED, 1, {**TRAINED, **moved})
    guard.look(Moment.REFITTED, 1, {**TRAINED, **moved, **REFITTED})
    assert guard.metrics()["flashrl/guard_events"] == 0
    with pytest.raises(GuardError, match="k3_kl"):
        _guard("correction=tis").look(Moment.TRAINED, 1, {**TRAINED, **moved})


def test_with_one_update_a_step_bypass_modes_kl_is_the_mismatch_and_is_watched():
    """No update has moved pi_theta yet when it is compared with pi_rollout."""
    one = ["correction=bypass", "data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=64"]
    with pytest.raises(GuardError, match="k3_kl"):
        _guard(*one).look(Moment.TRAINED, 1, {**TRAINED, K3: 0.2})
    _guard(*one, "actor_rollout_ref.actor.ppo_epochs=2").look(Moment.TRAINED, 1, {**TRAINED, K3: 0.2})


def test_what_is_watched_is_told_once_and_nothing_to_watch_is_a_warning(logged):
    _guard("correction=bypass", *SEVERAL_UPDATES)
    assert [text for text in logged(logging.INFO) if "the guard watches code_change_rate (" in text]
    assert not logged(logging.WARNING)
    _guard("correction=bypass", *SEVERAL_UPDATES, "flashrl.precision=bf16")
    assert "nothing to watch" in logged(logging.WARNING)[-1] and "flashrl.guard.action" in logged(logging.WARNING)[-1]
    _guard()
    (text,) = [text for text in logged(logging.INFO) if "correlation" in text]
    assert "the guard watches k3_kl, correlation, eff_sample_size, truncated_share, code_change_rate" in text


def test_without_weights_no_share_of_them_is_watched_or_warned_of(logged):
    guard = _guard("correction=none", "flashrl.guard.truncated_share_max=0.1")
    assert not {"truncated_share", "eff_sample_size"} & _watched(guard) and not logged(logging.WARNING)


def test_bypass_mode_leaves_the_rejected_share_and_the_codes_watched():
    bypass = ["correction=bypass", *SEVERAL_UPDATES, "algorithm.rollout_correction.rollout_rs=seq_mean_k3"]
    bypass += ["algorithm.rollout_correction.rollout_rs_threshold=0.01"]
    assert _watched(_guard(*bypass)) == {"rejected_share", "code_change_rate"}
    with pytest.raises(GuardError, match="rejected_share_max"):
        _guard(*bypass).look(Moment.TRAINED, 1, {**TRAINED, REJECTED: 0.6})
    with pytest.raises(GuardError, match="code_change_rate_min"):
        _guard(*bypass).look(Moment.REFITTED, 1, {CODES: 0.0})


# ---- caps ----


def _share_above(cap: float, spread: float) -> float:
    """Of log-normal ratios with mean 1."""
    return 1 - NormalDist(-(spread**2) / 2, spread).cdf(math.log(cap))


@pytest.mark.parametrize("cap", [1.0, 1.05, 1.2, 1.43, 2.0, 8.0])
def test_no_spread_of_the_ratios_has_more_above_the_cap_than_is_called_ordinary_and_one_has_as_much(cap):
    (ordinary,) = (
        w.ordinary for w in watches(Precision.INT8, CorrectionSettings(level=Level.TOKEN, upper=cap)) if w.ordinary is not None
    )
    shares = [_share_above(cap, spread / 1000) for spread in range(1, 10_000)]
    assert max(shares) <= ordinary + 1e-12
    assert max(shares) == pytest.approx(ordinary, abs=1e-3)


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("spread", [0.02, 0.15, math.sqrt(2 * math.log(2)), 3.0])
def test_at_a_cap_of_2_no_spread_reaches_the_default_limit_per_token_or_per_response(level, spread):
    """Log-normal ratios with mean 1, of the given spread per token, or per response of 64 tokens."""
    rows, tokens = 4000, 64
    each = spread if level is Level.TOKEN else spread / math.sqrt(tokens)
    old = torch.randn(rows, tokens, generator=torch.Generator().manual_seed(0)) * each - each**2 / 2
    settings = CorrectionSettings(level=level, upper=2.0)
    metrics = correct_shard(old, torch.zeros_like(old), torch.ones_like(old), settings).metrics
    assert metrics[TRUNCATED] == pytest.approx(_share_above(2.0, spread), abs=0.02)
    assert metrics[TRUNCATED] < 0.14 < GuardConfig().truncated_share_max


@pytest.mark.parametrize(
    "cap, limit, is_watched",
    [(1.0, 0.2, False), (1.42, 0.2, False), (1.43, 0.2, True), (1.2, 0.28, True), (1.2, 0.27, False), (2.0, 0.1, False)],
)
def test_a_truncated_share_that_ordinary_ratios_reach_is_not_watched_and_that_is_told_once(cap, limit, is_watched, logged):
    words = [f"algorithm.rollout_correction.rollout_is_threshold={cap}", f"flashrl.guard.truncated_share_max={limit}"]
    guard = _guard(*words)
    told = [text for text in logged(logging.WARNING) if "the guard does not watch" in text]
    assert len(told) == (not is_watched)
    assert all(TRUNCATED in text and f"flashrl.guard.truncated_share_max={limit:g}" in text for text in told)
    assert ("truncated_share" in _watched(guard)) is is_watched
    assert _watched(guard) >= {"k3_kl", "correlation", "eff_sample_size", "code_change_rate"}
    if is_watched:
        with pytest.raises(GuardError, match="truncated_share_max"):
            guard.look(Moment.TRAINED, 2, {**TRAINED, TRUNCATED: 0.6})
    else:
        guard.look(Moment.TRAINED, 2, {**TRAINED, TRUNCATED: 0.6})


def test_a_limit_that_is_off_is_left_out_without_a_word(logged):
    guard = _guard("algorithm.rollout_correction.rollout_is_threshold=1.0", "flashrl.guard.truncated_share_max=null")
    assert "truncated_share" not in _watched(guard)
    assert not [text for text in logged(logging.WARNING) if "the guard does not watch" in text]


# ---- two bounds ----


def test_with_two_bounds_what_is_dropped_on_either_side_is_watched(base):
    with pytest.raises(GuardError) as caught:
        _guard("correction=icepop").look(Moment.TRAINED, 1, {**TRAINED, TRUNCATED: 0.05, OUTSIDE: 0.25})
    text = str(caught.value)
    assert f"{OUTSIDE}=0.25 is beyond flashrl.guard.truncated_share_max=0.2" in text
    assert "dropped" in text and "cut at the cap" not in text and "wider bounds" in text
    assert "algorithm.rollout_correction.rollout_is_threshold" in text
    assert OmegaConf.select(base, "algorithm.rollout_correction.rollout_is_threshold") is not None
    # What is above alone says nothing, and bounds near 1 are watched all the same.
    _guard("correction=icepop").look(Moment.TRAINED, 1, {**TRAINED, TRUNCATED: 0.9, OUTSIDE: 0.1})
    with pytest.raises(GuardError, match="oob_ratio"):
        narrow = _guard("correction=icepop", "algorithm.rollout_correction.rollout_is_threshold='0.99_1.01'")
        narrow.look(Moment.TRAINED, 1, {**TRAINED, OUTSIDE: 0.25})


def test_what_two_bounds_drop_is_the_metric_that_the_correction_reports():
    settings = CorrectionSettings(level=Level.TOKEN, lower=0.5, upper=5.0)
    old = torch.tensor([[0.0, math.log(0.4), math.log(6.0), math.log(4.0)]])
    metrics = correct_shard(old, torch.zeros_like(old), torch.ones_like(old), settings).metrics
    assert metrics[OUTSIDE] == 0.5 and metrics[TRUNCATED] == 0.25
    reported = {watch.metric for watch in watches(Precision.INT8, settings) if watch.moment is Moment.TRAINED}
    assert reported - metrics.keys() == {CORRELATION, REJECTED}, "verl's own, and that of rejection, which is not set here"


@pytest.mark.parametrize("precision", list(Precision))
def test_with_two_bounds_a_small_sample_has_no_remedy_that_would_drop_more(precision):
    (few,) = (
        w
        for w in watches(precision, CorrectionSettings(level=Level.TOKEN, lower=0.5, upper=5.0))
        if w.name == "eff_sample_size"
    )
    (capped,) = (w for w in watches(precision, TIS) if w.name == "eff_sample_size")
    assert "wider bounds" in few.remedy and "a lower algorithm.rollout_correction" not in few.remedy
    assert "a lower algorithm.rollout_correction.rollout_is_threshold" in capped.remedy
