# SPDX-License-Identifier: Apache-2.0
"""The node flashrl: types, ranges, unknown and removed keys; each refusal is one line with its key and a remedy."""

import dataclasses
import math

import pytest
from omegaconf import OmegaConf

from flashrl_verl.errors import ConfigError
from flashrl_verl.settings import Action, FlashRLConfig, GuardConfig, SamplingConfig
from flashrl_verl.tools.recipe_process import compose
from flashrl_verl.validation import validate_config

DEFAULTS = {
    **{f.name: f.default for f in dataclasses.fields(FlashRLConfig) if f.name not in {"guard", "sampling"}},
    **{f"guard.{f.name}": f.default for f in dataclasses.fields(GuardConfig)},
    **{f"sampling.{f.name}": f.default for f in dataclasses.fields(SamplingConfig)},
}
WITH_NULL = {name for name in DEFAULTS if name.startswith("guard.") and name.endswith(("_min", "_max"))}
"""Numbers that null turns off."""

RANGES = {
    "keep_first_layers": ([0, 3], [-1, 0.5]),
    "keep_last_layers": ([0, 3], [-1, 0.5]),
    "max_num_gen_batches": ([0, 1], [-1, 6.5]),
    "failed_rewards_max": ([0, 1], [-0.1, 1.1]),
    "update_timeout_s": ([0.1, 5], [0, -1.5, math.inf]),
    "bf16_replica_fraction": ([0, 0.99], [-0.5, 1.0]),
    "guard.patience": ([1, 7], [0, 1.5]),
    "guard.k3_kl_max": ([1e-6, 9], [0, math.inf]),
    "guard.correlation_min": ([-1, 0.99], [-1.1, 1.0]),
    "guard.eff_sample_size_min": ([0, 0.99], [-0.1, 1]),
    "guard.truncated_share_max": ([0, 1], [-0.1, 1.1]),
    "guard.rejected_share_max": ([0, 1], [-0.1, 1.1]),
    "guard.code_change_rate_min": ([0, 0.99], [-0.1, 1]),
}
"""Of every number: values at the ends of its range, and values beyond them."""

CHOICES = {
    "precision": (["int8", "fp8", "bf16"], ["int4", "INT8", "fp8_block"]),
    "rotation": ([True, False, None], ["true", 1]),
    "kv_cache": (["auto", "int8_per_token_head"], ["fp8_e5m2", "fp8", "fp8_per_token_head"]),
    "server_address": (["loopback", "node"], ["0.0.0.0"]),
    "guard.action": (["warn", "stop"], ["abort"]),
    "ignore": ([[], ["lm_head", "re:.*down_proj"]], ["re:.*down_proj", [1], ["re:(("], ["a.down_proj.weight"]]),
    **{
        name: ([True, False], ["true", 1])
        for name in (
            "fp32_lm_head",
            "self_check",
            "ship_code",
            "guard.enable",
            "sampling.refill",
            "sampling.even_mini_batches",
        )
    },
}


def read(key: str, value) -> FlashRLConfig:
    node, _, name = key.rpartition(".")
    return FlashRLConfig.from_mapping({node: {name: value}} if node else {name: value})


def refusal(key: str, value) -> str:
    with pytest.raises(ConfigError) as caught:
        read(key, value)
    message = str(caught.value)
    assert message.startswith(f"flashrl.{key}=") and " is refused: " in message and "\n" not in message
    return message.partition(" Remedy: ")[2]


def test_every_setting_takes_its_range_and_refuses_what_is_beyond_it_or_of_another_type():
    table = {**RANGES, **CHOICES}
    assert {*table} == {*DEFAULTS}, "a new setting needs a line here"
    for key, (accepted, refused) in table.items():
        for value in accepted:
            read(key, value)
        for value in [*refused, {"a": 1}, *([] if key in WITH_NULL or None in accepted else [None])]:
            refusal(key, value)
        for value in [True, "60", math.nan] if key in RANGES else []:
            assert f"flashrl.{key}={DEFAULTS[key]:g}" in refusal(key, value)
    for key in WITH_NULL:
        assert getattr(read(key, None).guard, key.removeprefix("guard.")) is None


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("precison", "int8", "remove it, or use one of precision, bf16_replica_fraction, rotation"),
        ("guard.patiense", 3, "remove it, or use one of enable, action, patience"),
        *(("guard", value, "flashrl.guard.enable=false") for value in (None, False, "off")),
    ],
)
def test_an_unknown_key_and_a_word_for_a_node_are_told_what_there_is(key, value, remedy):
    assert remedy in refusal(key, value)


def test_settings_that_contradict_each_other_are_refused():
    for precision in ("fp8", "bf16"):
        with pytest.raises(ConfigError, match="flashrl.rotation=true is refused: .*flashrl.rotation=null"):
            FlashRLConfig.from_mapping({"rotation": True, "precision": precision})
    with pytest.raises(ConfigError, match="flashrl.bf16_replica_fraction=0.5 is refused: .*flashrl.precision=bf16"):
        FlashRLConfig.from_mapping({"bf16_replica_fraction": 0.5, "precision": "bf16"})


def test_the_yaml_repeats_the_dataclasses_and_nothing_else(base):
    assert FlashRLConfig.from_mapping(base.flashrl) == FlashRLConfig()
    for node, settings in ((base.flashrl, FlashRLConfig), (base.flashrl.guard, GuardConfig)):
        assert sorted(node) == sorted(field.name for field in dataclasses.fields(settings))


def test_settings_of_the_command_line_are_those_that_driver_and_workers_read():
    words = ["action=stop", "k3_kl_max=null", "patience=1"]
    cfg = compose(["experiment=base", "flashrl.ignore=[a,'re:b']", *(f"flashrl.guard.{word}" for word in words)])
    guard = GuardConfig(action=Action.STOP, k3_kl_max=None, patience=1)
    expected = FlashRLConfig(ignore=("a", "re:b"), guard=guard)
    assert validate_config(cfg) == expected
    copy = cfg.actor_rollout_ref.rollout.custom.flashrl
    for node in (copy, OmegaConf.to_container(copy, resolve=True), expected):
        assert FlashRLConfig.from_mapping(node) == expected
