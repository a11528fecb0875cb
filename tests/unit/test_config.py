# SPDX-License-Identifier: Apache-2.0
"""The flashrl node: types, ranges and unknown keys; each refusal names the key and the accepted values."""

import dataclasses
import math

import pytest
from omegaconf import OmegaConf

from flashrl_verl.config import FlashRLConfig, Precision
from flashrl_verl.errors import ConfigError


def test_settings_are_read_from_a_dict_and_from_a_node():
    settings = {
        "precision": "bf16",
        "update_timeout_s": 5,
        "receipt_tensors": -1,
        "max_num_gen_batches": 0,
        "ignore": ["a", "re:b"],
    }
    expected = FlashRLConfig(
        precision=Precision.BF16, update_timeout_s=5, receipt_tensors=-1, max_num_gen_batches=0, ignore=("a", "re:b")
    )
    assert FlashRLConfig.from_mapping(settings) == expected
    assert FlashRLConfig.from_mapping(OmegaConf.create(settings)) == expected


def test_settings_cannot_be_changed_after_they_were_checked():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FlashRLConfig().receipt_tensors = 0


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"precision": "int4"}, ["flashrl.precision='int4'", "int8", "bf16"]),
        ({"precision": None}, ["flashrl.precision=None", "int8", "bf16"]),
        ({"ignore": "re:.*down_proj"}, ["flashrl.ignore='re:.*down_proj'", "list of names"]),
        ({"ignore": [1]}, ["flashrl.ignore=[1]", "list of names"]),
        ({"ignore": ["re:(("]}, ["flashrl.ignore='re:(('", "regular expression"]),
        ({"ignore": ["model.layers.0.mlp.down_proj.weight"]}, ["down_proj.weight'", "Leave '.weight' out"]),
        ({"keep_first_layers": -1}, ["flashrl.keep_first_layers=-1", "0 or more"]),
        ({"keep_last_layers": True}, ["flashrl.keep_last_layers=True", "0 or more"]),
        ({"update_timeout_s": 0}, ["flashrl.update_timeout_s=0", "seconds above 0"]),
        ({"update_timeout_s": -1.5}, ["flashrl.update_timeout_s=-1.5", "seconds above 0"]),
        ({"update_timeout_s": math.inf}, ["flashrl.update_timeout_s=inf", "finite"]),
        ({"update_timeout_s": "60"}, ["flashrl.update_timeout_s='60'", "number of seconds"]),
        ({"receipt_tensors": 0}, ["flashrl.receipt_tensors=0", "at least 16", "or -1"]),
        ({"receipt_tensors": -2}, ["flashrl.receipt_tensors=-2", "at least 16", "or -1"]),
        ({"receipt_tensors": 6.5}, ["flashrl.receipt_tensors=6.5", "integer"]),
        ({"receipt_tensors": True}, ["flashrl.receipt_tensors=True", "integer"]),
        ({"max_num_gen_batches": -1}, ["flashrl.max_num_gen_batches=-1", "0 for no bound"]),
        ({"max_num_gen_batches": None}, ["flashrl.max_num_gen_batches=None", "integer"]),
        ({"self_check": 1}, ["flashrl.self_check=1", "true or false"]),
        ({"self_check": "false"}, ["flashrl.self_check='false'", "true or false"]),
        ({"fp32_lm_head": "true"}, ["flashrl.fp32_lm_head='true'", "true or false"]),
        ({"padded_vocab_mass_limit": 1.5}, ["flashrl.padded_vocab_mass_limit=1.5", "between 0 and 1"]),
        ({"padded_vocab_mass_limit": math.nan}, ["flashrl.padded_vocab_mass_limit=nan", "between 0 and 1"]),
        ({"bf16_replica_fraction": 1.0}, ["flashrl.bf16_replica_fraction=1.0", "below 1", "flashrl.precision=bf16"]),
        ({"bf16_replica_fraction": -0.5}, ["flashrl.bf16_replica_fraction=-0.5", "from 0 to below 1"]),
        ({"bf16_replica_fraction": True}, ["flashrl.bf16_replica_fraction=True", "from 0 to below 1"]),
        ({"bf16_replica_fraction": 0.5, "precision": "bf16"}, ["flashrl.bf16_replica_fraction=0.5", "flashrl.precision=bf16"]),
        ({"kv_cache": "fp8_e5m2"}, ["flashrl.kv_cache='fp8_e5m2'", "auto", "fp8", "int8_per_token_head"]),
        ({"kv_cache": None}, ["flashrl.kv_cache=None", "auto"]),
        ({"server_address": "0.0.0.0"}, ["flashrl.server_address='0.0.0.0'", "loopback", "node"]),
        ({"server_address": None}, ["flashrl.server_address=None", "loopback", "node"]),
        ({"precison": "int8"}, ["flashrl.precison", "precision, bf16_replica_fraction, kv_cache"]),
    ],
)
def test_wrong_setting_is_refused_with_the_accepted_values(settings, parts):
    with pytest.raises(ConfigError) as caught:
        FlashRLConfig.from_mapping(settings)
    for part in parts:
        assert part in str(caught.value)


def test_a_word_in_place_of_the_node_is_refused():
    with pytest.raises(ConfigError, match="flashrl='int8'.*flashrl.precision"):
        FlashRLConfig.from_mapping("int8")
