# SPDX-License-Identifier: Apache-2.0
"""A configuration that cannot work is refused before anything is loaded, by one message: value, reason and remedy."""

import copy
import json
import os
import subprocess
import sys

import pytest
from omegaconf import OmegaConf
from refusals import ACTOR, CORRECTION, ENGINE, ENV, ROLLOUT, ROOT, assert_refused, base, changed, names, refusal

from flashrl_verl.errors import ConfigError
from flashrl_verl.settings import FlashRLConfig
from flashrl_verl.tools.recipe_process import compose
from flashrl_verl.validation import GROUPS, check_paths, missing_paths, validate_config

MODEL = "actor_rollout_ref.model.path"
FRACTION = "flashrl.bf16_replica_fraction"
NO_CORRECTION = {f"{CORRECTION}.rollout_is": None, f"{CORRECTION}.rollout_is_threshold": None}
REJECTION = {f"{CORRECTION}.rollout_rs": "seq_mean_k1", f"{CORRECTION}.rollout_rs_threshold": "0.999_1.001"}
BYPASS = {f"{CORRECTION}.bypass_mode": True, f"{ACTOR}.policy_loss.loss_mode": "bypass_mode"}


# ---- the table of rules ----

OF_TRAINER_AND_ENGINE = [
    # the flashrl node, which has tests of its own
    ({"flashrl.precision": "int4"}, "flashrl.precision=int4", "int8"),
    ({"flashrl.receipt_tensors": 64}, "flashrl.receipt_tensors=64", "remove flashrl.receipt_tensors"),
    ({"corection": "icepop"}, "corection=icepop", "correction=icepop without a +"),
    # another trainer or backend than ours
    ({"trainer.use_v1": False}, "trainer.use_v1=false", "trainer.use_v1=true"),
    ({"trainer.v1.trainer_mode": "sync"}, "trainer.v1.trainer_mode=sync", "trainer.v1.trainer_mode=flashrl"),
    ({f"{ROLLOUT}.name": "vllm"}, f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.name=flashrl"),
    ({"actor_rollout_ref.hybrid_engine": False}, "hybrid_engine=false", "hybrid_engine=true"),
    # what verl tests by the rollout's name
    ({f"{ROLLOUT}.pipeline_model_parallel_size": 2}, "size=2", f"{ROLLOUT}.pipeline_model_parallel_size=1"),
    ({"actor_rollout_ref.actor.strategy": "megatron"}, "strategy=megatron", "actor_rollout_ref.actor.strategy=fsdp2"),
    ({f"{ROLLOUT}.expert_parallel_size": 2}, f"{ROLLOUT}.expert_parallel_size=2", "tensor_model_parallel_size"),
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
    ({f"{ENGINE}.kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8", "flashrl.kv_cache=auto or int8_per_token_head"),
    ({f"{ENGINE}.kv-cache-dtype": "fp8"}, "kv-cache-dtype=fp8", "flashrl.kv_cache=auto or int8_per_token_head"),
    (
        {f"{ENGINE}.calculate_kv_scales": True},
        "calculate_kv_scales=true",
        "flashrl.kv_cache=auto or int8_per_token_head",
    ),
    ({f"{ENGINE}.kv_cache_dtype_skip_layers": ["0"]}, 'skip_layers=["0"]', "flashrl.kv_cache for all layers"),
    ({f"{ENGINE}.config": "more.yaml"}, "config=more.yaml", f"remove {ENGINE}.config"),
    # a reward model that would share the training GPUs
    (
        {"reward.reward_model.enable": True, "reward.reward_model.enable_resource_pool": False},
        "reward.reward_model=",
        "reward.reward_model.enable_resource_pool=true",
    ),
]

OF_THE_CORRECTION = [
    # the correction itself
    ({f"{CORRECTION}.bypass_mode": True}, "bypass_mode=true", "correction=bypass"),
    (
        {f"{ACTOR}.policy_loss.loss_mode": "bypass_mode"},
        "loss_mode=bypass_mode",
        f"{ACTOR}.policy_loss.loss_mode=vanilla",
    ),
    (
        {f"{CORRECTION}.rollout_is_threshold": "0.5_5.0", **BYPASS, f"{CORRECTION}.loss_type": "reinforce"},
        "rollout_is_threshold=0.5_5.0",
        f"{CORRECTION}.rollout_is_threshold=2.0",
    ),
    ({**BYPASS}, "rollout_is=token", f"{CORRECTION}.rollout_is=null"),
    (
        {f"{ACTOR}.ppo_mini_batch_size": 7, **BYPASS, f"{CORRECTION}.rollout_is": None},
        "ppo_mini_batch_size=7",
        "divides data.train_batch_size",
    ),
    (
        {**BYPASS, f"{CORRECTION}.rollout_is": None, f"{CORRECTION}.loss_type": "reinforce"},
        "loss_type=reinforce",
        f"{CORRECTION}.rollout_is=token",
    ),
    (
        {**BYPASS, f"{CORRECTION}.loss_type": "reinforce", f"{CORRECTION}.rollout_is_batch_normalize": True},
        "rollout_is_batch_normalize=true",
        f"{CORRECTION}.rollout_is_batch_normalize=false",
    ),
    # settings that nothing would read
    ({f"{CORRECTION}.loss_type": "reinforce"}, "loss_type=reinforce", "correction=bypass"),
    ({f"{CORRECTION}.rollout_rs_threshold": 0.1}, "rollout_rs_threshold=0.1", "correction=geo_rs"),
    (
        {f"{CORRECTION}.rollout_is_batch_normalize": True, f"{CORRECTION}.rollout_is": None},
        "rollout_is_batch_normalize=true",
        "correction=tis",
    ),
    (
        {f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.loss_type": "clip"},
        "loss_type=clip",
        f"{CORRECTION}.loss_type=ppo_clip",
    ),
    (
        {"algorithm.adv_estimator": "optimal_token_baseline"},
        "estimator=optimal_token_baseline",
        "algorithm.adv_estimator=grpo",
    ),
    (
        {"algorithm.adv_estimator": "reinforce_plus_plus", **REJECTION},
        "estimator=reinforce_plus_plus",
        f"{CORRECTION}.rollout_rs=null",
    ),
    ({f"{CORRECTION}.rollout_is": "word"}, "rollout_is=word", f"{CORRECTION}.rollout_is=token"),
    ({f"{CORRECTION}.rollout_is_threshold": None}, "threshold=null", "rollout_is_threshold=2.0"),
    ({f"{CORRECTION}.rollout_is_threshold": 0}, "threshold=0", "rollout_is_threshold=2.0"),
    ({f"{CORRECTION}.rollout_is_threshold": -2.0}, "threshold=-2.0", "rollout_is_threshold=2.0"),
    ({f"{CORRECTION}.rollout_is_threshold": True}, "threshold=true", "rollout_is_threshold=2.0"),
    ({f"{CORRECTION}.rollout_is_threshold": "two"}, "threshold=two", "rollout_is_threshold=2.0"),
    ({f"{CORRECTION}.rollout_is_threshold": "nan"}, "threshold=nan", "rollout_is_threshold=2.0"),
    ({f"{CORRECTION}.rollout_is_threshold": "5.0_0.5"}, "threshold=5.0_0.5", "0.5_5.0"),
    ({f"{CORRECTION}.rollout_is_threshold": 0.5}, "threshold=0.5", "at least 1"),
    ({f"{CORRECTION}.rollout_rs": "geo"}, "rollout_rs=geo", "correction=geo_rs"),
    ({f"{CORRECTION}.rollout_rs": "token_k1"}, "rollout_rs_threshold=null", f"{CORRECTION}.rollout_rs_threshold="),
    ({**REJECTION, f"{CORRECTION}.rollout_rs_threshold": 0.5}, "rollout_rs_threshold=0.5", "rollout_rs_threshold="),
    (
        {**REJECTION, f"{ROLLOUT}.top_p": 0.9, f"{CORRECTION}.rollout_is": None},
        f"{ROLLOUT}.top_p=0.9",
        f"{ROLLOUT}.top_p=1.0",
    ),
    # TIS needs the log-probs of the policy that sampled, and that policy whole
    ({f"{ROLLOUT}.calculate_log_probs": False}, "probs=false", f"{ROLLOUT}.calculate_log_probs=true"),
    ({f"{ROLLOUT}.top_p": 0.9}, f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_p=1.0"),
    ({f"{ROLLOUT}.top_k": 50}, f"{ROLLOUT}.top_k=50", f"{ROLLOUT}.top_k=-1"),
    ({f"{ROLLOUT}.min_p": 0.05}, f"{ROLLOUT}.min_p=0.05", f"remove {ROLLOUT}.min_p"),
    ({f"{ROLLOUT}.repetition_penalty": 1.1}, "penalty=1.1", f"{ROLLOUT}.repetition_penalty=1.0"),
    ({f"{ROLLOUT}.logprobs_mode": "raw_logprobs"}, "mode=raw_logprobs", "logprobs_mode=processed_logprobs"),
    # metrics without weights (correction=metrics_only) mean the same only under the same rules
    *(
        (
            {key: value, f"{CORRECTION}.rollout_is": None},
            f"{key.rpartition('.')[2]}={json.dumps(value)}",
            "correction=none",
        )
        for key, value in (
            (f"{ROLLOUT}.calculate_log_probs", False),
            (f"{ROLLOUT}.top_p", 0.9),
            (f"{ROLLOUT}.top_k", 50),
        )
    ),
    # greedy training samples
    ({f"{ROLLOUT}.temperature": 0}, f"{ROLLOUT}.temperature=0", f"{ROLLOUT}.temperature=1.0"),
    ({f"{ROLLOUT}.temperature": -1.0, **NO_CORRECTION}, f"{ROLLOUT}.temperature=-1.0", f"{ROLLOUT}.temperature=1.0"),
]

OF_HARDWARE_AND_SERVERS = [
    # monitors that have no key
    ({f"{ROLLOUT}.prometheus.enable": True}, "prometheus.enable=true", f"{ROLLOUT}.prometheus.enable=false"),
    ({"trainer.logger": ["console", "rl_insight"]}, '["console", "rl_insight"]', "trainer.logger without rl_insight"),
    ({"trainer.logger": "rl_insight"}, "trainer.logger=rl_insight", "trainer.logger without rl_insight"),
    # verl's uvicorn gets no certificate
    ({f"{ENGINE}.ssl_certfile": "a.pem"}, f"{ENGINE}.ssl_certfile=a.pem", f"remove {ENGINE}.ssl_certfile"),
    ({f"{ENGINE}.enable-ssl-refresh": True}, "enable-ssl-refresh=true", "flashrl.server_address=loopback"),
    # hardware chosen by half
    ({"trainer.device": "cpu"}, "trainer.device=cpu", "hardware=cpu"),
    ({"trainer.device": "npu"}, "trainer.device=npu", "hardware=cuda or hardware=cpu"),
    (
        {f"{ENV}.VERL_PLATFORM": "cpu"},
        f"{ENV}.VERL_PLATFORM=cpu",
        "VERL_PLATFORM=cpu in the environment of the command",
    ),
    # no workers at all
    *(
        ({key: value}, f"{key}={json.dumps(value)}", f"{key}=1 or more")
        for key in ("trainer.nnodes", "trainer.n_gpus_per_node")
        for value in (0, -1, 0.5, True, None)
    ),
]

REFUSED = [*OF_TRAINER_AND_ENGINE, *OF_THE_CORRECTION, *OF_HARDWARE_AND_SERVERS]


@pytest.mark.parametrize(("settings", "value", "remedy"), REFUSED, ids=names(REFUSED))
def test_a_contradiction_is_refused_with_value_reason_and_remedy(settings, value, remedy):
    assert_refused(settings, value, remedy)


@pytest.mark.parametrize(
    ("settings", "value", "remedy"),
    [
        ({f"{ACTOR}.strategy": "fsdp"}, f"{ACTOR}.strategy=fsdp", f"{ACTOR}.strategy=fsdp2"),
        ({f"{ROLLOUT}.enable_sleep_mode": True}, "sleep_mode=true", f"{ROLLOUT}.enable_sleep_mode=false"),
        ({f"{ENV}.VERL_PLATFORM": None}, "trainer.device=cpu", "hardware=cpu"),
        ({"trainer.device": "cuda"}, f"{ENV}.VERL_PLATFORM=cpu", "hardware=cpu"),
        ({"flashrl.kv_cache": "int8_per_token_head"}, "flashrl.kv_cache=int8_per_token_head", "flashrl.kv_cache=auto"),
    ],
)
def test_what_a_cpu_does_not_do_and_half_of_the_platform_are_refused(settings, value, remedy):
    assert_refused(settings, value, remedy, hardware="cpu")


ACCEPTED = [
    {f"{ROLLOUT}.dtype": "float16"},
    {"actor_rollout_ref.model.lora_rank": 8, "actor_rollout_ref.model.lora.merge": True},
    {f"{ENGINE}.quantization": None},
    {f"{ENGINE}.dtype": "bfloat16", f"{ENGINE}.tensor_parallel_size": 2},
    {f"{ENGINE}.max_logprobs": 5, f"{ENGINE}.block_size": 32},
    {"flashrl.precision": "bf16"},
    {"my_own": {"a": 1}},
    {f"{ROLLOUT}.top_k": 0},
    {f"{ROLLOUT}.top_p": 1},
    {f"{ROLLOUT}.min_p": 0.0},
    {f"{ROLLOUT}.repetition_penalty": 1},
    {f"{ROLLOUT}.val_kwargs.top_p": 0.7, f"{ROLLOUT}.val_kwargs.top_k": 20},
    {f"{CORRECTION}.rollout_is": "sequence", f"{CORRECTION}.rollout_is_threshold": "5.0"},
    {f"{CORRECTION}.rollout_is_threshold": "0.5_5.0"},
    NO_CORRECTION,
    {**NO_CORRECTION, f"{ROLLOUT}.top_p": 0.9, f"{ROLLOUT}.calculate_log_probs": False},
    {f"{ROLLOUT}.temperature": 0.6, f"{ROLLOUT}.val_kwargs.temperature": 0},
    *(
        {"flashrl.fp32_lm_head": True, **operands}
        for operands in (
            {},
            {f"{ACTOR}.fsdp_config.mixed_precision": {"param_dtype": "bfloat16"}},
            {f"{ACTOR}.fsdp_config.mixed_precision": {"reduce_dtype": "fp32"}},
            {f"{ACTOR}.fsdp_config.mixed_precision": {"param_dtype": "fp16"}, f"{ROLLOUT}.dtype": "float16"},
        )
    ),
    {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 8, f"{ROLLOUT}.tensor_model_parallel_size": 4, FRACTION: 0.25},
]


@pytest.mark.parametrize("settings", ACCEPTED, ids=[",".join(row) for row in ACCEPTED])
def test_what_is_merely_unusual_is_accepted(settings):
    validate_config(changed(settings))


@pytest.mark.parametrize("hardware", ["cuda", "cpu"])
def test_base_is_valid_and_neither_it_nor_the_environment_is_changed(hardware):
    before, environment = copy.deepcopy(base(hardware)), dict(os.environ)
    assert validate_config(base(hardware)) == FlashRLConfig()
    assert base(hardware) == before and dict(os.environ) == environment


def test_checking_needs_neither_torch_nor_vllm_nor_verl():
    heavy = "{'torch', 'vllm', 'verl', 'ray', 'transformers'}"
    code = f"import sys, flashrl_verl.validation; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- what a user writes on the command line ----


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["flashrl.precision=int4"], ["flashrl.precision=int4", "int8, fp8"]),
        (["flashrl.precison=int8"], ["no key flashrl.precison"]),
        (["trainer.no_such_key=1"], ["no key trainer.no_such_key"]),
        (["correction=icepops"], ["correction/icepops", "icepop"]),
        (["+corection=icepop"], ["corection=icepop", "correction=icepop without a +"]),
        (
            ["algorithm.rollout_correction.rollout_is_threshold=0.5_5"],
            ["threshold=0.55", "YAML reads 0.5_5 as"],
        ),
        (["actor_rollout_ref.rollout.top_p=0.9"], ["top_p=0.9", "actor_rollout_ref.rollout.top_p=1.0"]),
        ([f"+{ENGINE}.quantization=fp8"], ["quantization=fp8", "flashrl.precision"]),
        (["trainer.device=cpu"], ["trainer.device=cpu", "Remedy: hardware=cpu"]),
        (["+flashrl.receipt_tensors=-1"], ["flashrl.receipt_tensors=-1", "remove flashrl.receipt_tensors"]),
        (["data.train_files=/no/such.parquet"], ["data.train_files=/no/such.parquet", "`flashrl data --help`"]),
    ],
    ids=lambda value: value[0],
)
def test_a_users_fault_is_one_error_that_names_the_key(words, parts):
    with pytest.raises(ConfigError) as caught:
        cfg = compose(["experiment=base", *words])
        validate_config(cfg)
        check_paths(cfg)
    assert all(part in str(caught.value) for part in parts)


def test_a_configuration_without_flashrl_is_refused():
    message = refusal(OmegaConf.create({"trainer": {"use_v1": True}}))
    assert "flashrl is missing" in message and "+experiment=base" in message


def test_the_groups_whose_misspelling_is_known_are_those_there_are():
    folders = {folder.name for folder in (ROOT / "flashrl_verl" / "configs").iterdir() if folder.is_dir()}
    assert folders - {"__pycache__"} == {*GROUPS}


@pytest.mark.slow
def test_verls_own_entry_point_without_the_variable_is_told_to_set_it(tmp_path):
    """verl writes the platform it found into trainer.device before our trainer sees the configuration; the remedy
    works."""
    code = (
        "import flashrl_verl.plugins.verl\n"
        "from hydra import compose, initialize_config_dir\n"
        "from flashrl_verl.validation import validate_config\n"
        "from verl.utils.device import auto_set_device\n"
        f"with initialize_config_dir({str(ROOT / 'recipe' / 'flashrl' / 'config')!r}, version_base=None):\n"
        "    cfg = compose('flashrl_trainer', overrides=['experiment=quickstart'])\n"
        "auto_set_device(cfg)\n"
        "validate_config(cfg)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "VERL_PLATFORM"} | {"PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-c", code]
    told = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert told.returncode != 0 and "Remedy: VERL_PLATFORM=cpu in the environment of the command" in told.stderr
    followed = subprocess.run(
        run, cwd=tmp_path, env=environment | {"VERL_PLATFORM": "cpu"}, capture_output=True, text=True
    )
    assert followed.returncode == 0, followed.stderr


# ---- two keys at once ----


@pytest.mark.parametrize(
    ("settings", "reason", "remedy"),
    [
        ({"trainer.n_gpus_per_node": 1, FRACTION: 0.5}, "number of replicas is 1", f"{FRACTION}=0.0"),
        (
            {"trainer.n_gpus_per_node": 8, f"{ROLLOUT}.tensor_model_parallel_size": 8, FRACTION: 0.5},
            "number of replicas is 1",
            f"a smaller {ROLLOUT}.tensor_model_parallel_size",
        ),
        ({"trainer.n_gpus_per_node": 4, FRACTION: 0.1}, "of 4 replicas", "from 0.25 to 0.75"),
        (
            {"trainer.n_gpus_per_node": 2, "trainer.nnodes": 2, FRACTION: 0.9},
            "that would be 4 in BF16",
            "from 0.25 to 0.75",
        ),
    ],
)
def test_a_mixture_that_the_replicas_do_not_make_is_refused(settings, reason, remedy):
    tensor_parallel = {f"{ROLLOUT}.tensor_model_parallel_size": 1}
    stated, _, suggested = refusal(changed({"trainer.nnodes": 1, **tensor_parallel, **settings})).partition(" Remedy: ")
    assert f"{FRACTION}={settings[FRACTION]}" in stated and reason in stated and remedy in suggested
    for key in ("trainer.nnodes", "trainer.n_gpus_per_node", f"{ROLLOUT}.tensor_model_parallel_size"):
        assert key in stated


@pytest.mark.parametrize(
    "changes, key",
    [
        ({"trainer.n_gpus_per_node": 2}, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=256"),
        (
            {"trainer.n_gpus_per_node": 2, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 128},
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=256",
        ),
    ],
)
def test_micro_batches_that_do_not_divide_a_ranks_share_are_refused_before_anything_is_loaded(changes, key):
    words = [f"{name}={value}" for name, value in changes.items()]
    with pytest.raises(
        ConfigError, match=f"{key} is refused: .*=32 prompts x 8 samples on 2 ranks are 128 sequences a rank"
    ):
        validate_config(compose(["experiment=quickstart", *words]))
    fits = [f"actor_rollout_ref.{name}_micro_batch_size_per_gpu=64" for name in ("actor.ppo", "rollout.log_prob")]
    validate_config(compose(["experiment=quickstart", *words[:1], *fits]))


# ---- local paths ----


def _config(train=(), val=None, model="gpt2"):
    return OmegaConf.create(
        {
            "data": {"train_files": train if isinstance(train, str) else list(train), "val_files": val},
            "actor_rollout_ref": {"model": {"path": model}},
        }
    )


@pytest.mark.parametrize("model", ["gpt2", "Qwen/Qwen2.5-32B", "hdfs://cluster/a/b"])
def test_names_of_the_hub_and_addresses_are_not_looked_for(tmp_path, model):
    assert missing_paths(_config(model=model, train="hdfs://a/b.parquet"), root=tmp_path) == []


@pytest.mark.parametrize(
    "model", ["/no/such", "./no", "../no/such", "~/no-such-model", "outputs/assets/model", "there/model"]
)
def test_what_looks_like_a_path_has_to_exist(tmp_path, model):
    (tmp_path / "there").mkdir()
    assert missing_paths(_config(model=model), root=tmp_path) == [(MODEL, model)]


def test_what_exists_is_accepted_wherever_it_is_written(tmp_path):
    for name in ("a.parquet", "there/model"):
        (tmp_path / name).mkdir(parents=True)
    check_paths(_config(["a.parquet", str(tmp_path / "a.parquet")], "./a.parquet", "there/model"), root=tmp_path)


def test_all_that_is_missing_is_one_line_with_its_keys(tmp_path):
    with pytest.raises(ConfigError) as caught:
        check_paths(_config("a.parquet", ["b.parquet"], "/no/such"), root=tmp_path)
    message = str(caught.value)
    for pair in ("data.train_files=a.parquet", "data.val_files=b.parquet", f"{MODEL}=/no/such", str(tmp_path)):
        assert pair in message
    assert "\n" not in message


def test_what_is_made_later_need_not_be_there(tmp_path):
    cfg = _config(str(tmp_path / "assets" / "train.parquet"), "gone.parquet")
    assert missing_paths(cfg, root=tmp_path, made_later=tmp_path / "assets") == [("data.val_files", "gone.parquet")]


@pytest.mark.parametrize("word", [(), pytest.param(("--dry-run",), marks=pytest.mark.slow)])
def test_the_recipe_refuses_before_ray_and_a_dry_run_only_warns(word):
    command = [
        sys.executable,
        "-m",
        "recipe.flashrl.main_flashrl",
        "experiment=quickstart",
        "quickstart.assets=/no/such",
        *word,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    said = (
        "data.train_files=/no/such/train.parquet, data.val_files=/no/such/test.parquet, "
        "actor_rollout_ref.model.path=/no"
    )
    if word:
        assert done.returncode == 0 and f"Warning: {said}" in done.stdout and "not found on this machine" in done.stdout
    else:
        assert done.returncode == 1 and f"ConfigError: {said}" in done.stderr and "flashrl quickstart" in done.stderr
        assert "Ray" not in done.stdout + done.stderr and "Traceback" not in done.stderr
