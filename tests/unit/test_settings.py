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
NUMBERS = {
    "max_num_gen_batches": (0, -1),
    "failed_responses_max": (1, 1.1),
    "update_timeout_s": (0.1, math.inf),
    "guard.patience": (1, 0),
    "guard.k3_kl_max": (1e-6, 0),
    "guard.correlation_min": (-1, 1.0),
    "guard.eff_sample_size_min": (0, 1),
    "guard.grad_norm_max": (1.0, math.inf),
    "guard.code_change_rate_min": (0, -0.1),
}
"""A value at an end of its range, and one beyond an end."""
OTHERS = {
    "precision": "int4",
    "kv_cache": "fp8",
    "guard.action": "abort",
    **dict.fromkeys((name for name, default in DEFAULTS.items() if isinstance(default, bool)), 1),
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
    assert {*NUMBERS, *OTHERS, "ignore"} == {*DEFAULTS}, "a new setting needs a line here"
    for key, (accepted, beyond) in NUMBERS.items():
        read(key, accepted)
        for value in (beyond, True, "60", math.nan, {"a": 1}):
            assert f"flashrl.{key}={DEFAULTS[key]:g}" in refusal(key, value)
        if key.startswith("guard.") and key != "guard.patience":
            assert getattr(read(key, None).guard, key.removeprefix("guard.")) is None, "null turns a limit off"
        else:
            refusal(key, None)
    for key, value in OTHERS.items():
        refusal(key, value)
    for value in ("re:.*down_proj", [1], ["re:(("], ["a.down_proj.weight"], None):
        refusal("ignore", value)
    assert read("ignore", ["lm_head", "re:.*down_proj"]).ignore == ("lm_head", "re:.*down_proj")


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("precison", "int8", "remove it, or use one of precision, rotation, kv_cache"),
        ("guard.patiense", 3, "remove it, or use one of enable, action, patience"),
        *(("guard", value, "flashrl.guard.enable=false") for value in (None, False, "off")),
    ],
)
def test_an_unknown_key_and_a_word_for_a_node_are_told_what_there_is(key, value, remedy):
    assert remedy in refusal(key, value)


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
