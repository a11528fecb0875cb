# SPDX-License-Identifier: Apache-2.0
"""A wrong setting is refused before anything is loaded, by one message: value, reason and remedy."""

import copy
import dataclasses
import os
import subprocess
import sys

import pytest
from omegaconf import OmegaConf
from refusals import ACTOR, CORRECTION, ENGINE, ROLLOUT, ROOT, assert_refused, base, changed, names, refusal

from flashrl_verl.config import FlashRLConfig
from flashrl_verl.validation import validate_config


def test_defaults_of_the_yaml_are_those_of_the_dataclass():
    assert FlashRLConfig.from_mapping(base("cuda").flashrl) == FlashRLConfig()
    assert sorted(base("cuda").flashrl) == sorted(field.name for field in dataclasses.fields(FlashRLConfig))


@pytest.mark.parametrize("hardware", ["cuda", "cpu"])
def test_base_is_valid_on_both_kinds_of_hardware(hardware):
    assert validate_config(base(hardware)) == FlashRLConfig()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"actor_rollout_ref.actor.fsdp_config.mixed_precision": {"param_dtype": "bfloat16"}},
        {"actor_rollout_ref.actor.fsdp_config.mixed_precision": {"reduce_dtype": "fp32"}},
        {"actor_rollout_ref.actor.fsdp_config.mixed_precision": {"param_dtype": "fp16"}, f"{ROLLOUT}.dtype": "float16"},
    ],
)
def test_an_fp32_head_is_accepted_where_both_sides_multiply_the_same_operands(settings):
    assert validate_config(changed({"flashrl.fp32_lm_head": True, **settings})).fp32_lm_head


def test_a_configuration_without_flashrl_is_refused():
    message = refusal(OmegaConf.create({"trainer": {"use_v1": True}}))
    assert "flashrl is missing" in message and "+experiment=base" in message


REFUSED = [
    # precision reaches the whole-config check
    ({"flashrl.precision": "int4"}, "flashrl.precision='int4'", "int8"),
    ({f"{ROLLOUT}.expert_parallel_size": 2}, f"{ROLLOUT}.expert_parallel_size=2", "tensor_model_parallel_size"),
    ({"flashrl.update_timeout_s": 0}, "flashrl.update_timeout_s=0", "above 0"),
    ({"flashrl.receipt_tensors": 0}, "flashrl.receipt_tensors=0", "-1 for all"),
    ({"flashrl.max_num_gen_batches": -1}, "flashrl.max_num_gen_batches=-1", "0 for no bound"),
    # another trainer or backend than ours
    ({"trainer.use_v1": False}, "trainer.use_v1=false", "trainer.use_v1=true"),
    ({"trainer.v1.trainer_mode": "sync"}, "trainer.v1.trainer_mode=sync", "trainer.v1.trainer_mode=flashrl"),
    ({f"{ROLLOUT}.name": "vllm"}, f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.name=flashrl"),
    ({"actor_rollout_ref.hybrid_engine": False}, "hybrid_engine=false", "hybrid_engine=true"),
    # what verl tests by the rollout's name
    ({f"{ROLLOUT}.pipeline_model_parallel_size": 2}, "size=2", f"{ROLLOUT}.pipeline_model_parallel_size=1"),
    ({"actor_rollout_ref.actor.strategy": "megatron"}, "strategy=megatron", "actor_rollout_ref.actor.strategy=fsdp2"),
    ({f"{ROLLOUT}.data_parallel_size": 2}, "size=2", f"{ROLLOUT}.data_parallel_size=1"),
    ({f"{ROLLOUT}.disaggregation.enabled": True}, "enabled=true", f"{ROLLOUT}.disaggregation.enabled=false"),
    ({f"{ROLLOUT}.scheduling_policy": "priority"}, "policy=priority", f"{ROLLOUT}.scheduling_policy=fcfs"),
    ({"actor_rollout_ref.model.lora_rank": 8}, "lora_rank=8", "actor_rollout_ref.model.lora.merge=True"),
    ({"actor_rollout_ref.model.lora.rank": 8}, "lora.rank=8", "actor_rollout_ref.model.lora.merge=True"),
    (
        {"actor_rollout_ref.model.mtp.enable_rollout": True},
        f"{ROLLOUT}.mtp.enable_rollout=true",
        "actor_rollout_ref.model.mtp.enable_rollout=false",
    ),
    (
        {f"{ROLLOUT}.checkpoint_engine.backend": "nccl"},
        f"{ROLLOUT}.checkpoint_engine.backend=nccl",
        f"{ROLLOUT}.checkpoint_engine.backend=naive",
    ),
    # one side would compute its logits otherwise
    (
        {"flashrl.fp32_lm_head": True, "actor_rollout_ref.model.use_fused_kernels": True},
        "use_fused_kernels=true",
        "actor_rollout_ref.model.use_fused_kernels=false, or flashrl.fp32_lm_head=false",
    ),
    (
        {"flashrl.fp32_lm_head": True, "actor_rollout_ref.actor.fsdp_config.mixed_precision": {"param_dtype": "fp32"}},
        "mixed_precision.param_dtype=float32",
        "mixed_precision.param_dtype=bfloat16, or flashrl.fp32_lm_head=false",
    ),
    (
        {"flashrl.fp32_lm_head": True, f"{ROLLOUT}.dtype": "float16"},
        "mixed_precision.param_dtype=bfloat16",
        f"{ROLLOUT}.dtype=bfloat16",
    ),
    # number formats that contradict ours
    ({f"{ROLLOUT}.dtype": "float32"}, f"{ROLLOUT}.dtype=float32", f"{ROLLOUT}.dtype=bfloat16"),
    ({f"{ROLLOUT}.load_format": "bitsandbytes"}, "load_format=bitsandbytes", f"{ROLLOUT}.load_format=dummy"),
    ({f"{ROLLOUT}.quantization": "fp8"}, f"{ROLLOUT}.quantization=fp8", f"{ROLLOUT}.quantization=null"),
    (
        {f"{ROLLOUT}.quantization_config_file": "q.json"},
        "quantization_config_file=q.json",
        f"{ROLLOUT}.quantization_config_file=null",
    ),
    (
        {f"{ACTOR}.fsdp_config.qat.enable": True},
        f"{ROLLOUT}.qat.enable=true",
        f"{ACTOR}.fsdp_config.qat.enable=false",
    ),
    # settings that would not reach the workers
    (
        {f"{ROLLOUT}.custom.flashrl": {"precision": "bf16"}},
        f"{ROLLOUT}.custom.flashrl=",
        f"{ROLLOUT}.custom.flashrl='${{flashrl}}'",
    ),
    (
        {f"{ACTOR}.policy_loss.rollout_correction": {"rollout_is": None}},
        f"{ACTOR}.policy_loss.rollout_correction=",
        f"'${{{CORRECTION}}}'",
    ),
    # engine arguments that would win over ours
    ({f"{ENGINE}.quantization": "fp8"}, f"{ENGINE}.quantization=fp8", "flashrl.precision"),
    ({f"{ENGINE}.q": "fp8"}, f"{ENGINE}.q=fp8", "flashrl.precision"),
    ({f"{ENGINE}.quantization_config": {"a": 1}}, f"{ENGINE}.quantization_config=", "flashrl.precision"),
    (
        {f"{ENGINE}.hf_overrides": {"quantization_config": {"quant_method": "fp8"}}},
        f"{ENGINE}.hf_overrides=",
        f"remove {ENGINE}.hf_overrides",
    ),
    (
        {f"{ENGINE}.hf_overrides": '{"rope_scaling": {"factor": 4}}'},
        f"{ENGINE}.hf_overrides=",
        "config.json of the model",
    ),
    ({f"{ENGINE}.load_format": "auto"}, f"{ENGINE}.load_format=auto", f"set {ROLLOUT}.load_format"),
    ({f"{ENGINE}.dtype": "float16"}, f"{ENGINE}.dtype=float16", f"set {ROLLOUT}.dtype"),
    ({f"{ENGINE}.logprobs_mode": "raw_logits"}, "mode=raw_logits", f"set {ROLLOUT}.logprobs_mode"),
    ({f"{ENGINE}.logprobs-mode": "raw_logits"}, "mode=raw_logits", f"set {ROLLOUT}.logprobs_mode"),
    ({f"{ENGINE}.tensor_parallel_size": 8}, "size=8", f"set {ROLLOUT}.tensor_model_parallel_size"),
    ({f"{ENGINE}.pipeline_parallel_size": 2}, "size=2", f"set {ROLLOUT}.pipeline_model_parallel_size"),
    ({f"{ENGINE}.scheduling_policy": "priority"}, "policy=priority", f"set {ROLLOUT}.scheduling_policy"),
    ({f"{ENGINE}.worker_extension_cls": "a.B"}, "cls=a.B", f"remove {ENGINE}.worker_extension_cls"),
    ({f"{ENGINE}.override_generation_config": {"min_p": 0.1}}, '{"min_p": 0.1}', f"{ROLLOUT}.temperature"),
    ({f"{ENGINE}.logits_processors": ["a.B"]}, '["a.B"]', f"remove {ENGINE}.logits_processors"),
    ({f"{ENGINE}.speculative_config": {"method": "eagle"}}, "eagle", f"remove {ENGINE}.speculative_config"),
    ({f"{ENGINE}.enable_lora": True}, "enable_lora=true", "actor_rollout_ref.model.lora.merge=True"),
    ({f"{ENGINE}.api_key": ["x"]}, 'api_key=["x"]', f"remove {ENGINE}.api_key"),
    ({f"{ENGINE}.api-key": "x"}, "api-key=x", f"remove {ENGINE}.api-key"),
    ({f"{ENGINE}.kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8", "flashrl.kv_cache=auto, fp8"),
    ({f"{ENGINE}.kv-cache-dtype": "fp8"}, "kv-cache-dtype=fp8", "flashrl.kv_cache=auto, fp8"),
    ({f"{ENGINE}.calculate_kv_scales": True}, "calculate_kv_scales=true", "flashrl.kv_cache=fp8"),
    ({f"{ENGINE}.kv_cache_dtype_skip_layers": ["0"]}, 'skip_layers=["0"]', "flashrl.kv_cache for all layers"),
    ({f"{ENGINE}.config": "more.yaml"}, "config=more.yaml", f"remove {ENGINE}.config"),
]


@pytest.mark.parametrize(("settings", "value", "remedy"), REFUSED, ids=names(REFUSED))
def test_contradiction_is_refused_with_value_reason_and_remedy(settings, value, remedy):
    assert_refused(settings, value, remedy)


ACCEPTED = [
    {f"{ROLLOUT}.dtype": "float16"},
    {"actor_rollout_ref.model.lora_rank": 8, "actor_rollout_ref.model.lora.merge": True},
    {f"{ENGINE}.quantization": None},
    {f"{ENGINE}.dtype": "bfloat16", f"{ENGINE}.tensor_parallel_size": 2},
    {f"{ENGINE}.max_logprobs": 5, f"{ENGINE}.block_size": 32},
    {"flashrl.precision": "bf16", "flashrl.receipt_tensors": -1},
]


@pytest.mark.parametrize("settings", ACCEPTED, ids=[",".join(row) for row in ACCEPTED])
def test_what_is_merely_unusual_is_accepted(settings):
    validate_config(changed(settings))


@pytest.mark.parametrize("hardware", ["cuda", "cpu"])
def test_checking_a_configuration_changes_neither_it_nor_the_environment(hardware):
    before, environment = copy.deepcopy(base(hardware)), dict(os.environ)
    validate_config(base(hardware))
    assert base(hardware) == before and dict(os.environ) == environment


def test_checking_needs_neither_torch_nor_vllm_nor_verl():
    heavy = "{'torch', 'vllm', 'verl', 'ray', 'transformers'}"
    code = f"import sys, flashrl_verl.validation; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
