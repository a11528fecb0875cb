# SPDX-License-Identifier: Apache-2.0
"""A server stops unless the model its engine really holds is what the precision's name says."""

import pytest

from flashrl_verl.config import FlashRLConfig
from flashrl_verl.errors import FlashRLError
from flashrl_verl.quickstart import compose
from flashrl_verl.rollout.server import FlashRLReplica, require_precision

HELD = {
    "precision": "int8",
    "quantized": {"int8": 8},
    "quantized_layers": 8,
    "quantized_names": ["model.layers.0.mlp.down_proj"],
    "unquantized_layers": {},
    "kept_layers": [],
    "kept_numbers": [],
    "ignore_unused": [],
    "head_dtype": "bfloat16",
    "kv_cache": {"dtypes": {"auto": 2}, "backends": ["FLASH_ATTN"], "unfollowed": {}},
}
"""What ``flashrl_layers`` says of a small INT8 model; tests/e2e/test_engine_refit.py compares the keys with an engine's."""


def require(wanted: str, changes: dict) -> None:
    require_precision(FlashRLConfig(precision=wanted), {**HELD, **changes})


@pytest.mark.parametrize(
    "precision, changes",
    [
        ("int8", {}),
        ("int8", {"unquantized_layers": {"model.layers.0.mlp.gate": "ReplicatedLinear"}}),
        ("int8", {"unquantized_layers": {"model.layers.0.x": "RowParallelLinear"}, "kept_layers": ["model.layers.0.x"]}),
        ("fp8", {"precision": "fp8", "quantized": {"float8_e4m3fn": 8}}),
        ("fp8_block", {"precision": "fp8_block", "quantized": {"float8_e4m3fn by 128x128": 8}}),
        (
            "bf16",
            {"precision": "bf16", "quantized": {}, "quantized_layers": 0, "unquantized_layers": {"a": "ColumnParallelLinear"}},
        ),
    ],
)
def test_a_model_that_is_what_was_asked_for_is_accepted(precision, changes):
    require(precision, changes)


@pytest.mark.parametrize(
    "precision, changes, words",
    [
        ("int8", {"precision": "bf16"}, ["quantization 'bf16'", "engine_kwargs.vllm"]),
        (
            "int8",
            {"unquantized_layers": {"model.layers.0.x": "NewLinear"}},
            ["layers.0.x", "NewLinear", "flashrl.ignore"],
        ),
        ("int8", {"unquantized_layers": {"model.layers.0.x": "RowParallelLinear"}}, ["RowParallelLinear", "precision=bf16"]),
        ("int8", {"quantized": {"int8": 7, "float8_e4m3fn": 1}}, ["float8_e4m3fn", "flashrl.precision=int8"]),
        (
            "fp8_block",
            {"precision": "fp8_block", "quantized": {"float8_e4m3fn": 8}},
            ["float8_e4m3fn", "flashrl.precision=fp8_block"],
        ),
        (
            "int8",
            {"quantized": {}, "quantized_layers": 0, "kept_layers": ["a", "b"]},
            ["none", "keep_first_layers", "2 layer"],
        ),
        ("fp8", {"precision": "fp8"}, ["flashrl.precision=fp8", "'int8': 8"]),
        ("bf16", {"precision": "bf16"}, ["flashrl.precision=bf16", "'int8': 8"]),
        ("int8", {"ignore_unused": ["lm_haed"]}, ["lm_haed", "flashrl.ignore", "model.layers.0.mlp.down_proj"]),
    ],
)
def test_a_model_that_is_something_else_stops_the_run_with_the_reason(precision, changes, words):
    with pytest.raises(FlashRLError) as caught:
        require(precision, changes)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "wanted, found, words",
    [
        (True, "bfloat16", ["flashrl.fp32_lm_head=true", "in bfloat16", "quantization config", "fp32_lm_head=false"]),
        (True, "unknown (TypeError: x)", ["in unknown (TypeError: x)", "fp32_lm_head=false"]),
        (False, "float32", ["flashrl.fp32_lm_head=false", "head_dtype", "fp32_lm_head=true"]),
    ],
)
def test_a_head_that_is_not_the_one_asked_for_stops_the_run(wanted, found, words):
    with pytest.raises(FlashRLError) as caught:
        require_precision(FlashRLConfig(fp32_lm_head=wanted), {**HELD, "head_dtype": found})
    for word in words:
        assert word in str(caught.value)
    right = "float32" if wanted else "bfloat16"
    require_precision(FlashRLConfig(fp32_lm_head=wanted), {**HELD, "head_dtype": right})
    if not wanted:
        require_precision(FlashRLConfig(), {**HELD, "head_dtype": "unknown (TypeError: x)"})


@pytest.mark.parametrize(
    "wanted, dtypes",
    [
        ("auto", {"bfloat16": 2}),
        ("fp8", {"fp8": 2}),
        ("fp8", {"fp8_e4m3": 2}),
        ("int8_per_token_head", {"int8_per_token_head": 2}),
    ],
)
def test_a_kv_cache_that_is_the_one_asked_for_is_accepted(wanted, dtypes):
    require_precision(FlashRLConfig(kv_cache=wanted), {**HELD, "kv_cache": {**HELD["kv_cache"], "dtypes": dtypes}})


@pytest.mark.parametrize(
    "wanted, changes, words",
    [
        ("fp8", {"dtypes": {"auto": 2}}, ["flashrl.kv_cache=fp8", "{'auto': 2}", "FLASH_ATTN", "kv_cache=auto"]),
        ("fp8", {"dtypes": {"fp8": 1, "auto": 1}}, ["flashrl.kv_cache=fp8", "'auto': 1"]),
        ("auto", {"dtypes": {"fp8": 2}}, ["flashrl.kv_cache=auto", "{'fp8': 2}"]),
        ("fp8_per_token_head", {"dtypes": {"fp8": 2}}, ["flashrl.kv_cache=fp8_per_token_head"]),
        ("fp8", {"dtypes": {}}, ["flashrl.kv_cache=fp8", "none"]),
        (
            "fp8",
            {"dtypes": {"fp8": 2}, "unfollowed": {"model.layers.0.self_attn.attn": "no bound is known for X"}},
            ["flashrl.kv_cache=fp8", "1 layers", "layers.0.self_attn.attn", "no bound is known for X", "int8_per_token_head"],
        ),
    ],
)
def test_a_kv_cache_that_is_another_or_whose_scales_stand_still_stops_the_run(wanted, changes, words):
    with pytest.raises(FlashRLError) as caught:
        require_precision(FlashRLConfig(kv_cache=wanted), {**HELD, "kv_cache": {**HELD["kv_cache"], **changes}})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("kept, accepted", [([0, 1, 27], True), ([0, 1], False), ([], False)])
def test_layers_to_keep_that_the_model_does_not_have_are_refused(kept, accepted):
    settings = FlashRLConfig(keep_first_layers=2, keep_last_layers=1)
    held = {**HELD, "kept_numbers": kept}
    if accepted:
        require_precision(settings, held)
        return
    with pytest.raises(FlashRLError, match=f"keep {len(kept)} layers of this model instead of 3.*flashrl.ignore"):
        require_precision(settings, held)


def test_replicas_that_share_a_configuration_take_the_precisions_of_the_mixture():
    from verl.utils.config import omega_conf_to_dataclass

    words = ["trainer.n_gpus_per_node=2", "flashrl.bf16_replica_fraction=0.5", "flashrl.guard.action=stop"]
    composed = compose(["experiment=smoke", *words]).actor_rollout_ref.rollout
    for config in (composed, omega_conf_to_dataclass(composed)):  # as verl hands it over, and as an object that all share
        replicas = [FlashRLReplica(rank, config, None, gpus_per_node=2) for rank in (0, 1)]
        for replica in replicas:
            replica.take_precision(2)
        taken = [FlashRLConfig.from_mapping(replica.config.custom["flashrl"]) for replica in replicas]
        assert [settings.precision.value for settings in taken] == ["int8", "bf16"]
        assert all(settings.bf16_replica_fraction == 0 and settings.guard.action.value == "stop" for settings in taken)
        assert all(replica.config.logprobs_mode == config.logprobs_mode for replica in replicas)
        assert config.custom["flashrl"]["precision"] == "int8" and config.custom["flashrl"]["bf16_replica_fraction"] == 0.5
