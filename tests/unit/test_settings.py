# SPDX-License-Identifier: Apache-2.0
"""The node flashrl: types, ranges, unknown and removed keys; each refusal is one line with the accepted values and a
remedy."""

import dataclasses
import math

import pytest
from guard_steps import step_of
from omegaconf import OmegaConf

from flashrl_verl.errors import ConfigError, GuardError, words
from flashrl_verl.settings import Action, FlashRLConfig, GuardConfig, Precision
from flashrl_verl.tools.recipe_process import compose
from flashrl_verl.trainer.guard import Guard
from flashrl_verl.validation import validate_config


def test_settings_are_read_from_a_dict_and_from_a_node():
    settings = {"precision": "bf16", "update_timeout_s": 5, "max_num_gen_batches": 0, "ignore": ["a", "re:b"]}
    expected = FlashRLConfig(precision=Precision.BF16, update_timeout_s=5, max_num_gen_batches=0, ignore=("a", "re:b"))
    for node in (settings, OmegaConf.create(settings), expected):
        assert FlashRLConfig.from_mapping(node) == expected


def test_settings_cannot_be_changed_after_they_were_checked():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FlashRLConfig().self_check = False


def test_the_defaults_of_the_yaml_are_those_of_the_dataclasses(base):
    assert FlashRLConfig.from_mapping(base.flashrl) == FlashRLConfig()
    for node, settings in ((base.flashrl, FlashRLConfig), (base.flashrl.guard, GuardConfig)):
        assert sorted(node) == sorted(field.name for field in dataclasses.fields(settings))


def test_settings_reach_the_guard_from_the_command_line_and_the_workers_parse_their_copy():
    cfg = compose(
        ["experiment=base", "flashrl.guard.action=stop", "flashrl.guard.k3_kl_max=null", "flashrl.guard.patience=1"]
    )
    settings = validate_config(cfg)
    assert settings.guard == GuardConfig(action=Action.STOP, k3_kl_max=None, patience=1)
    assert FlashRLConfig.from_mapping(cfg.actor_rollout_ref.rollout.custom.flashrl) == settings
    assert FlashRLConfig.from_mapping(OmegaConf.to_container(cfg.flashrl, resolve=True)) == settings
    with pytest.raises(GuardError, match="correlation_min"):
        step_of(Guard.from_config(cfg, settings), 1, correlation=0.0, k3_kl=9.0)


REFUSED = [
    ("precision", "int4", "int8, fp8"),
    ("precision", None, "bf16"),
    ("kv_cache", "fp8_e5m2", "auto (BF16) or int8_per_token_head"),
    ("kv_cache", None, "auto"),
    ("server_address", "0.0.0.0", "loopback"),
    ("server_address", None, "node"),
    ("ignore", "re:.*down_proj", "a list of names"),
    ("ignore", [1], "a list of names"),
    ("keep_first_layers", -1, "0 or more"),
    ("keep_last_layers", True, "0 or more"),
    ("update_timeout_s", 0, "seconds above 0"),
    ("update_timeout_s", -1.5, "seconds above 0"),
    ("update_timeout_s", math.inf, "finite"),
    ("max_num_gen_batches", -1, "0 for no bound"),
    ("max_num_gen_batches", None, "integer"),
    ("max_num_gen_batches", 6.5, "integer"),
    ("self_check", 1, "true or false"),
    ("ship_code", None, "true or false"),
    ("padded_vocab_mass_limit", 1.5, "between 0 and 1"),
    ("padded_vocab_mass_limit", math.nan, "between 0 and 1"),
    ("bf16_replica_fraction", 1.0, "below 1 (flashrl.precision=bf16"),
    ("bf16_replica_fraction", -0.5, "from 0 to below 1"),
    ("bf16_replica_fraction", True, "from 0 to below 1"),
    ("guard", None, "flashrl.guard.enable=false"),
    ("guard", False, "flashrl.guard.enable=false"),
    ("guard", "off", "flashrl.guard.enable=false"),
    ("precison", "int8", "one of precision, bf16_replica_fraction, kv_cache"),
    ("guard.patiense", 3, "one of enable, action, patience"),
    ("guard.action", "abort", "warn or stop"),
    ("guard.action", None, "flashrl.guard.enable"),
    ("guard.patience", 0, "1 or more"),
    ("guard.patience", 1.5, "number of steps"),
    ("guard.patience", None, "number of steps"),
    ("guard.patience", True, "number of steps"),
    ("guard.k3_kl_max", 0, "above 0, or null to turn it off"),
    ("guard.k3_kl_max", math.inf, "finite"),
    ("guard.k3_kl_max", math.nan, "finite"),
    ("guard.correlation_min", 1.0, "below 1"),
    ("guard.correlation_min", True, "below 1"),
    ("guard.eff_sample_size_min", 1, "below 1"),
    ("guard.eff_sample_size_min", -0.1, "from 0"),
    ("guard.truncated_share_max", 1.1, "between 0 and 1"),
    ("guard.rejected_share_max", -1, "between 0 and 1"),
    ("guard.code_change_rate_min", 1, "below 1"),
    # of earlier releases
    ("receipt_tensors", 64, "remove flashrl.receipt_tensors"),
    ("precision", "fp8_block", "it was removed. Remedy: flashrl.precision=fp8,"),
    ("kv_cache", "fp8", "it was removed. Remedy: flashrl.kv_cache=int8_per_token_head (A100"),
    ("kv_cache", "fp8_per_token_head", "it was removed. Remedy: flashrl.kv_cache=int8_per_token_head (A100"),
]


def refusal(settings: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        FlashRLConfig.from_mapping(settings)
    message = str(caught.value)
    assert "\n" not in message and " is refused: " in message and " Remedy: " in message
    return message


@pytest.mark.parametrize(("key", "value", "part"), REFUSED)
def test_a_wrong_setting_is_one_line_with_its_key_and_what_is_accepted(key, value, part):
    node, _, name = key.rpartition(".")
    message = refusal({node: {name: value}} if node else {name: value})
    assert message.startswith(f"flashrl.{key}={words(value)} is refused: ") and part in message


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"update_timeout_s": "60"}, ["flashrl.update_timeout_s='60'", "number of seconds"]),
        ({"fp32_lm_head": "true"}, ["flashrl.fp32_lm_head='true'", "true or false"]),
        ({"guard": {"k3_kl_max": "0.05"}}, ["flashrl.guard.k3_kl_max='0.05'", "number"]),
        ({"ignore": ["re:(("]}, ["flashrl.ignore=re:((", "regular expression"]),
        ({"ignore": ["a.down_proj.weight"]}, ["flashrl.ignore=a.down_proj.weight", "leave '.weight' out"]),
        (
            {"bf16_replica_fraction": 0.5, "precision": "bf16"},
            ["flashrl.bf16_replica_fraction=0.5", "flashrl.precision=bf16"],
        ),
    ],
)
def test_settings_that_are_wrong_in_one_part_or_together_are_refused(settings, parts):
    message = refusal(settings)
    assert all(part in message for part in parts)


def test_a_word_in_place_of_the_node_is_refused():
    with pytest.raises(ConfigError, match="flashrl=int8 is refused.*flashrl.precision"):
        FlashRLConfig.from_mapping("int8")
