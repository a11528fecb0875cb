# SPDX-License-Identifier: Apache-2.0
"""The node flashrl.guard: defaults, their way from the command line, and what is refused."""

import math

import pytest
from guard_steps import step_of
from omegaconf import OmegaConf

from flashrl_verl.config import FlashRLConfig
from flashrl_verl.errors import ConfigError, GuardError
from flashrl_verl.guard import Guard
from flashrl_verl.guard_settings import Action, GuardConfig
from flashrl_verl.quickstart import compose
from flashrl_verl.validation import validate_config


def test_the_defaults_of_the_yaml_are_those_of_the_dataclass(base):
    assert GuardConfig.read(base.flashrl.guard) == GuardConfig()
    assert list(base.flashrl.guard) == list(GuardConfig.__dataclass_fields__)


def test_settings_reach_the_guard_from_the_command_line_and_the_workers_parse_their_copy():
    cfg = compose(["experiment=base", "flashrl.guard.action=stop", "flashrl.guard.k3_kl_max=null", "flashrl.guard.patience=1"])
    settings = validate_config(cfg)
    assert settings.guard == GuardConfig(action=Action.STOP, k3_kl_max=None, patience=1)
    assert FlashRLConfig.from_mapping(cfg.actor_rollout_ref.rollout.custom.flashrl) == settings
    assert FlashRLConfig.from_mapping(OmegaConf.to_container(cfg.flashrl, resolve=True)) == settings
    with pytest.raises(GuardError, match="correlation_min"):
        step_of(Guard.from_config(cfg, settings), 1, correlation=0.0, k3_kl=9.0)


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
