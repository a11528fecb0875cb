# SPDX-License-Identifier: Apache-2.0
"""A configuration that cannot work is refused before anything is loaded, by one message: key and value, reason, and a
remedy that works."""

import math
import re

import pytest
import yaml
from omegaconf import OmegaConf
from refusals import ENGINE, changed, refusal

from flashrl_verl import validation
from flashrl_verl.errors import ConfigError, words
from flashrl_verl.settings import ACTOR, ASYNC, CORRECTION, MODEL, ROLLOUT, get
from flashrl_verl.tools.recipe_process import compose
from flashrl_verl.validation import PLATFORM, rules, validate_by_verl, validate_config

ACTOR_MODEL = "actor_rollout_ref.model"
MIXED = f"{ACTOR}.fsdp_config.mixed_precision"
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
GPUS, TENSOR_PARALLEL = "trainer.n_gpus_per_node", f"{ROLLOUT}.tensor_model_parallel_size"
MINI_BATCH, NORMALIZE = f"{ACTOR}.ppo_mini_batch_size", f"{CORRECTION}.rollout_is_batch_normalize"
ATTENTION = f"{ACTOR_MODEL}.override_config.attn_implementation"
CRITICS = "critic.model.override_config.attn_implementation"
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"
MODE, THRESHOLD = "trainer.v1.trainer_mode", "trainer.v1.sampler.max_off_policy_threshold"
NO_WEIGHTS = {f"{CORRECTION}.rollout_is": None, f"{CORRECTION}.rollout_is_threshold": None}
REJECTION = {f"{CORRECTION}.rollout_rs": "seq_mean_k1", f"{CORRECTION}.rollout_rs_threshold": "0.999_1.001"}
BYPASS = {f"{CORRECTION}.bypass_mode": True, LOSS_MODE: "bypass_mode"}
SPECULATION = f"{ENGINE}.speculative_config"
REINFORCE = {**BYPASS, f"{CORRECTION}.loss_type": "reinforce"}

# ---- the table of rules: settings, of which the last key is the one to be refused, and a remedy. Where the remedy is
# an override of a key, it is followed, and the configuration has to be valid then. ----

CASES = [
    # another trainer or backend than ours
    ({"trainer.resume_mode": "yes"}, "trainer.resume_mode=auto"),
    ({"trainer.v1.trainer_mode": "sync"}, "trainer.v1.trainer_mode=flashrl"),
    ({f"{ROLLOUT}.name": "vllm"}, f"{ROLLOUT}.name=flashrl"),
    # hardware
    ({PLATFORM: "cpu"}, "before verl's own main_ppo VERL_PLATFORM=cpu"),
    *(({TENSOR_PARALLEL: 1, "trainer.nnodes": bad}, "trainer.nnodes=1") for bad in (0, 0.5, True, None)),
    *(
        ({TENSOR_PARALLEL: 1, key: "two"}, f"{key}=1")
        for key in (
            *(GPUS, TENSOR_PARALLEL, MINI_BATCH, "data.train_batch_size"),
            f"{ROLLOUT}.max_num_seqs",
            f"{ACTOR}.ulysses_sequence_parallel_size",
            f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
            f"{ROLLOUT}.prompt_length",
            f"{ROLLOUT}.response_length",
        )
    ),
    *(({"trainer.total_training_steps": bad}, "trainer.total_training_steps=1") for bad in ("ten", 0, -5, 30.5, True)),
    ({"trainer.max_actor_ckpt_to_keep": "abc"}, "trainer.max_actor_ckpt_to_keep=1"),
    *(({"data.seed": bad}, "data.seed=1") for bad in ("abc", 0.5)),
    *(
        ({f"{ROLLOUT}.gpu_memory_utilization": bad}, f"{ROLLOUT}.gpu_memory_utilization=0.8")
        for bad in (0, 1.8, "half", math.nan)
    ),
    *(({key: 3}, f"{key}=null") for key in (ENGINE, MIXED, OVERLONG)),
    *(({f"{ACTOR}.optim.lr": bad}, f"{ACTOR}.optim.lr=1.0e-6") for bad in (-1e-6, "fast", math.nan)),
    *(({f"{ROLLOUT}.n": bad}, "n=1 or more") for bad in (0, -1)),
    ({"algorithm.filter_groups.enable": False, f"{ROLLOUT}.n": 1}, f"{ROLLOUT}.n=16"),
    ({f"{ROLLOUT}.n": 1}, f"{ROLLOUT}.n=16"),
    ({f"{ACTOR}.ulysses_sequence_parallel_size": 3}, "<a divisor of 8>"),
    ({f"{ACTOR}.ulysses_sequence_parallel_size": 2, ATTENTION: "sdpa"}, f"{ATTENTION}=flash_attention_2"),
    ({"actor_rollout_ref.ref.ulysses_sequence_parallel_size": 2, ATTENTION: "sdpa"}, f"{ATTENTION}=flash_attention_2"),
    (
        {"critic.enable": True, "critic.fsdp.ulysses_sequence_parallel_size": 2, CRITICS: "sdpa"},
        f"{CRITICS}=flash_attention_2",
    ),
    ({ATTENTION: "flash_attention_4"}, f"{ATTENTION}=varlen"),
    # losses whose gradient depends on how a mini-batch is cut
    ({f"{ACTOR}.policy_loss.loss_mode": "geo_mean"}, f"{ACTOR}.policy_loss.loss_mode=gspo"),
    (
        {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor": None},
        f"{ACTOR}.loss_scale_factor=<data.max_response_length>",
    ),
    ({f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean", MINI_BATCH: 3}, "<a divisor of"),
    # a teacher of distillation, which takes the rollout's name
    (
        {"distillation.enabled": True, "distillation.teacher_models.teacher_model.inference.name": "flashrl"},
        "distillation.teacher_models.teacher_model.inference.name=vllm",
    ),
    # lengths that do not go together
    ({f"{ROLLOUT}.max_model_len": 700}, f"{ROLLOUT}.max_model_len=1024"),
    *(({f"{OVERLONG}.enable": True, f"{OVERLONG}.len": bad}, f"{OVERLONG}.enable=false") for bad in (0, 512)),
    # what verl tests by the rollout's name, and what would not be checked or arrive whole
    ({f"{ROLLOUT}.pipeline_model_parallel_size": 2}, f"{ROLLOUT}.pipeline_model_parallel_size=1"),
    ({f"{ROLLOUT}.data_parallel_size": 2}, f"{ROLLOUT}.data_parallel_size=1"),
    ({f"{ROLLOUT}.expert_parallel_size": 2}, f"{ROLLOUT}.expert_parallel_size=1"),
    ({f"{ACTOR}.strategy": "megatron"}, f"{ACTOR}.strategy=fsdp2"),
    ({MODE: ASYNC, f"{CORRECTION}.rollout_is": "sequence"}, "correction=tis"),
    ({MODE: ASYNC, f"{CORRECTION}.rollout_rs": "token_k1,seq_mean_k1"}, "correction=tis"),
    ({MODE: ASYNC, THRESHOLD: None}, f"{THRESHOLD}=8"),
    ({f"{ACTOR_MODEL}.lora_rank": 8}, f"{ACTOR_MODEL}.lora.merge=True"),
    ({f"{ACTOR_MODEL}.lora_adapter_path": "a"}, f"{ACTOR_MODEL}.lora_adapter_path=null"),
    ({f"{ACTOR_MODEL}.lora.rank": 8}, f"{ACTOR_MODEL}.lora.merge=True"),
    ({f"{ACTOR_MODEL}.mtp.enable_rollout": True}, f"{ACTOR_MODEL}.mtp.enable_rollout=false"),
    (
        {"reward.reward_model.enable_resource_pool": False, "reward.reward_model.enable": True},
        "reward.reward_model.enable_resource_pool=true",
    ),
    # number formats that contradict ours
    ({f"{ROLLOUT}.dtype": "float32"}, f"{ROLLOUT}.dtype=bfloat16"),
    ({"flashrl.kv_cache": "int8_per_token_head", f"{ROLLOUT}.dtype": "float16"}, f"{ROLLOUT}.dtype=bfloat16"),
    ({f"{ROLLOUT}.load_format": "bitsandbytes"}, f"{ROLLOUT}.load_format=dummy"),
    ({f"{ROLLOUT}.quantization": "fp8"}, f"{ROLLOUT}.quantization=null"),
    ({f"{ROLLOUT}.enable_rollout_routing_replay": True}, f"{ROLLOUT}.enable_rollout_routing_replay=false"),
    ({f"{ACTOR}.fsdp_config.qat.enable": True}, f"{ACTOR}.fsdp_config.qat.enable=false"),
    ({f"{ACTOR_MODEL}.use_fused_kernels": True}, f"{ACTOR_MODEL}.use_fused_kernels=false"),
    ({"flashrl.fp32_lm_head": True, f"{MIXED}.param_dtype": "float32"}, f"{MIXED}.param_dtype=bfloat16"),
    ({f"{ROLLOUT}.dtype": "half"}, f"{ROLLOUT}.dtype=bfloat16"),
    ({f"{MIXED}.param_dtype": 16}, f"{MIXED}.param_dtype=bfloat16"),
    # what nothing reads
    ({"model": "x"}, "the key below actor_rollout_ref"),
    ({"trainer.val_generations": "x"}, "log_val_generations"),
    ({"custom_reward_function.path": "x"}, "custom_reward_function.path=null"),
    *(({key: "unusual"}, f"{key}=") for key in validation._VOID if not key.endswith(".")),
    ({f"{ROLLOUT}.repetition_penalty": 1.05}, f"{ROLLOUT}.repetition_penalty=1.0"),
    ({f"{ROLLOUT}.val_kwargs.n": 4}, f"{ROLLOUT}.val_kwargs.temperature=1.0"),
    ({f"{ROLLOUT}.val_kwargs.do_sample": True}, f"{ROLLOUT}.val_kwargs.do_sample=false"),
    ({f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.0}, f"{ACTOR}.kl_loss_coef=0.001"),
    ({"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0}, "algorithm.use_kl_in_reward=false"),
    ({"trainer.resume_from_path": "a/global_step_2"}, "trainer.resume_mode=resume_path"),
    ({"trainer.resume_mode": "resume_path", "trainer.resume_from_path": None}, "<run>/global_step_<n>"),
    ({f"{ACTOR}.checkpoint.async_save": True}, f"{ACTOR}.checkpoint.async_save=false"),
    ({"trainer.val_only": True, "trainer.val_before_train": False}, "trainer.val_before_train=true"),
    ({"trainer.critic_warmup": 20}, "trainer.critic_warmup=0"),
    (
        {f"{OVERLONG}.len": 8, "reward.reward_manager.name": "naive", f"{OVERLONG}.enable": True},
        f"{OVERLONG}.enable=false",
    ),
    ({f"{ACTOR}.optim.lr_warmup_steps_ratio": 10}, f"{ACTOR}.optim.lr_warmup_steps_ratio=0.0"),
    ({f"{ACTOR}.optim.lr_scheduler_type": "linear"}, f"{ACTOR}.optim.lr_scheduler_type=constant"),
    ({f"{ACTOR}.checkpoint.save_contents": ["models"]}, "[model,optimizer,extra]"),
    ({"algorithm.filter_groups.metric": "seq_reward"}, "algorithm.filter_groups.metric=acc"),
    *(
        ({dynamic: True, key: 1000}, f"{key}=<1024 or more>")
        for key, dynamic in (
            (f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ACTOR}.use_dynamic_bsz"),
            (f"{ROLLOUT}.log_prob_max_token_len_per_gpu", f"{ROLLOUT}.log_prob_use_dynamic_bsz"),
        )
    ),
    # a text that is no switch, and no number
    ({"algorithm.norm_adv_by_std_in_grpo": "flase"}, "algorithm.norm_adv_by_std_in_grpo=true"),
    ({"trainer.val_before_train": 2}, "trainer.val_before_train=true"),
    ({"trainer.save_freq": "ten"}, "trainer.save_freq=-1"),
    # speculation but by n-grams on a GPU; the second accepts drafts otherwise
    ({SPECULATION: {"method": "eagle"}}, "remove"),
    ({SPECULATION: {"method": "ngram", "rejection_sample_method": "synthetic"}}, "remove"),
    ({"flashrl.kv_cache": "int8_per_token_head", SPECULATION: {"method": "ngram"}}, "remove"),
    # monitors that have no key
    ({f"{ROLLOUT}.prometheus.enable": True}, f"{ROLLOUT}.prometheus.enable=false"),
    ({"trainer.logger": ["console", "rl_insight"]}, "trainer.logger=[console]"),
    # a correction of which something would be ignored, or that divides by zero (the rest: test_correction_settings.py)
    ({f"{CORRECTION}.rollout_is": "word"}, f"{CORRECTION}.rollout_is=token"),
    ({f"{CORRECTION}.loss_type": "reinforce"}, f"{CORRECTION}.loss_type=ppo_clip"),
    ({f"{CORRECTION}.rollout_rs_threshold": 0.1}, f"{CORRECTION}.rollout_rs_threshold=null"),
    ({**NO_WEIGHTS, NORMALIZE: True}, f"{NORMALIZE}=false"),
    ({**NO_WEIGHTS, f"{CORRECTION}.bypass_mode": True}, "correction=bypass"),
    ({LOSS_MODE: "bypass_mode"}, f"{LOSS_MODE}=vanilla"),
    ({**BYPASS, **NO_WEIGHTS, f"{CORRECTION}.loss_type": "gspo"}, f"{CORRECTION}.loss_type=ppo_clip"),
    ({**BYPASS, f"{CORRECTION}.rollout_is": "token"}, f"{CORRECTION}.rollout_is=null"),
    ({**REINFORCE, f"{CORRECTION}.rollout_is": None}, f"{CORRECTION}.loss_type=ppo_clip"),
    ({**REINFORCE, NORMALIZE: True}, f"{NORMALIZE}=false"),
    ({**REINFORCE, f"{CORRECTION}.rollout_is_threshold": "0.5_5.0"}, f"{CORRECTION}.rollout_is_threshold=2.0"),
    ({"algorithm.adv_estimator": "optimal_token_baseline"}, "algorithm.adv_estimator=grpo"),
    ({**REJECTION, "algorithm.adv_estimator": "reinforce_plus_plus"}, "algorithm.adv_estimator=grpo"),
    # what is sampled: the correction, and metrics without weights too, need the log-probs of the policy that sampled
    ({f"{ROLLOUT}.temperature": 0.001}, f"{ROLLOUT}.temperature=1.0"),
    ({**NO_WEIGHTS, f"{ROLLOUT}.top_p": 0.9}, f"{ROLLOUT}.top_p=1.0"),
    *(
        ({**correction, f"{ROLLOUT}.{key}": bad}, remedy.format(f"{ROLLOUT}.{key}"))
        for correction in ({}, {**NO_WEIGHTS, **REJECTION})
        for key, bad, remedy in (
            ("calculate_log_probs", False, "{}=true"),
            ("logprobs_mode", "raw_logprobs", "{}=processed_logprobs"),
            ("top_p", 0.9, "{}=1.0"),
            ("top_k", 50, "{}=-1"),
        )
    ),
    # settings that would not reach the workers
    ({f"{ROLLOUT}.custom.flashrl": {"precision": "bf16"}}, f"{ROLLOUT}.custom.flashrl='${{flashrl}}'"),
    (
        {f"{ACTOR}.policy_loss.rollout_correction": {"rollout_is": None}},
        f"{ACTOR}.policy_loss.rollout_correction='${{{CORRECTION}}}'",
    ),
    # two keys at once
    ({"corection": "icepop"}, "correction=icepop without a +"),
    ({TENSOR_PARALLEL: 3}, f"{TENSOR_PARALLEL}=<a divisor of 8>"),
    ({**BYPASS, **NO_WEIGHTS, "data.train_batch_size": 512, MINI_BATCH: 7}, f"{MINI_BATCH}=<a divisor of 512>"),
    # 15 samples of an update on 4 ranks
    ({"trainer.nnodes": 1, GPUS: 4, f"{ROLLOUT}.n": 5, MINI_BATCH: 3}, f"{MINI_BATCH}=<a multiple of 4>"),
]
ON_CPU = [
    ({f"{ACTOR}.strategy": "fsdp"}, f"{ACTOR}.strategy=fsdp2"),
    ({f"{ROLLOUT}.enable_sleep_mode": True}, f"{ROLLOUT}.enable_sleep_mode=false"),
    ({PLATFORM: None}, "hardware=cpu"),
    ({SPECULATION: {"method": "ngram"}}, "remove"),
    ({"flashrl.kv_cache": "int8_per_token_head"}, "flashrl.kv_cache=auto"),
    ({f"{ACTOR}.ulysses_sequence_parallel_size": 2}, f"{ACTOR}.ulysses_sequence_parallel_size=1"),
    ({f"{ACTOR}.use_kl_loss": True}, f"{ACTOR}.use_kl_loss=false"),
    ({"algorithm.use_kl_in_reward": True}, "algorithm.use_kl_in_reward=false"),
]
ALL = [*((*case, "cuda") for case in CASES), *((*case, "cpu") for case in ON_CPU)]


@pytest.mark.parametrize(("settings", "remedy", "hardware"), ALL, ids=[words(settings) for settings, _, _ in ALL])
def test_a_bad_value_is_refused_by_its_key_with_a_remedy_that_works(settings, remedy, hardware):
    cfg = changed(settings, hardware)
    stated, _, suggested = refusal(cfg).partition(" Remedy: ")
    *_, node, name = f".{list(settings)[-1]}".split(".")
    value = words(settings[list(settings)[-1]])
    assert f"{node}.{name}={value}".lstrip(".") in stated or (f"{node}={{" in stated and f'"{name}": {value}' in stated)
    assert " is refused: " in stated and remedy in suggested
    key, equals, value = remedy.partition("=")
    if "." in key and equals and "<" not in value:
        OmegaConf.update(cfg, key, yaml.safe_load(value))
        validate_config(cfg)


def test_every_rule_of_the_table_has_a_case_that_it_refuses():
    held, refusing = set(), set()
    for settings, _, hardware in ALL:
        cfg = changed(settings, hardware)
        for rule in rules(cfg):
            name = (rule.key, re.sub(r"\d+", "n", rule.reason)[:30])
            held.add(name)
            if not rule.test(get(cfg, rule.key)):
                refusing.add(name)
                break
    assert held == refusing


# ---- vLLM's own arguments, which would win over ours ----

OWNED = """
quantization q quantization_config hf_overrides kv_cache_dtype calculate_kv_scales kv_cache_dtype_skip_layers
enable_expert_parallel worker_extension_cls override_generation_config logits_processors speculative_config enable_lora
spec_method spec_model spec_tokens enable_batch_sharded_sampling kv_transfer_config kv_offloading_backend
api_key config ssl ssl_certfile enable_ssl_refresh
dtype load_format logprobs_mode max_model_len enable_sleep_mode
tensor_parallel_size pipeline_parallel_size data_parallel_size
""".split()
BEGINNINGS = {
    "logits_processors": ("logits_processor",),
    "hf_overrides": ("hf_override",),
    "speculative_config": ("speculative_conf", "speculative-conf"),
    "tensor_parallel_size": ("tensor_parallel",),
}
"""vLLM's parser takes the beginning of a name for the whole."""


def test_every_argument_of_vllms_that_would_win_over_ours_is_refused_in_every_spelling():
    assert {*validation._RESERVED} <= {*OWNED}, "a new one needs a line here"
    cfg = changed({})
    for name in OWNED:
        for argument in {name, name.replace("_", "-"), f"no_{name}", *BEGINNINGS.get(name, ())}:
            OmegaConf.update(cfg, ENGINE, {argument: "x"}, merge=False, force_add=True)
            key, (stated, _, remedy) = f"{ENGINE}.{argument}", refusal(cfg).partition(" Remedy: ")
            assert stated.startswith(f"{key}=x is refused: ") and f"remove {key}." in remedy
    OmegaConf.update(cfg, ENGINE, {"quantization": None, "block_size": 32}, merge=False)
    validate_config(cfg)


# ---- what is accepted ----

ACCEPTED = [
    {f"{ROLLOUT}.dtype": "half", MIXED: {"param_dtype": "float16"}},
    {f"{ROLLOUT}.n": 1, "trainer.val_only": True},
    {f"{ACTOR_MODEL}.lora_rank": 8, f"{ACTOR_MODEL}.lora.merge": True},
    {"my_own": {"a": 1}},
    {f"{ROLLOUT}.top_k": 0, f"{ROLLOUT}.top_p": 1},
    {f"{ENGINE}.speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    {f"{ROLLOUT}.val_kwargs.top_p": 0.7, f"{ROLLOUT}.val_kwargs.top_k": 20, f"{ROLLOUT}.val_kwargs.temperature": 0},
    {**NO_WEIGHTS, f"{ROLLOUT}.top_p": 0.9, f"{ROLLOUT}.calculate_log_probs": False},
    {"flashrl.fp32_lm_head": True, MIXED: {"reduce_dtype": "fp32"}},
    {"flashrl.fp32_lm_head": True, MIXED: {"param_dtype": "fp16"}, f"{ROLLOUT}.dtype": "half"},
]


@pytest.mark.parametrize("settings", ACCEPTED, ids=words)
def test_what_is_merely_unusual_is_accepted(settings):
    validate_config(changed(settings))


# ---- what a user writes on the command line ----


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"algorithm.adv_estimator": "grpoo"}, "algorithm.adv_estimator=grpo"),
        ({LOSS_MODE: "vanila"}, f"{LOSS_MODE}=vanilla"),
        ({"trainer.logger": ["console", "wandbb"]}, "trainer.logger=wandb"),
        ({"reward.reward_manager.name": "dappo"}, "reward.reward_manager.name=dapo"),
        ({"algorithm.rollout_correction.rollout_is_treshold": 3}, "rollout_is_threshold"),
        ({f"{ACTOR}.tis_imp_ratio_cap": 1}, f"Remedy: {CORRECTION}.rollout_is_threshold"),
        ({f"{ROLLOUT}.min_p": 1}, "verl knows no such key. Remedy: remove it"),
        ({f"{ROLLOUT}.val_kwargs.tempetature": 1}, "Remedy: temperature"),
        ({"algorithm.filter_groups.max_gen_batches": 1}, "Remedy: max_num_gen_batches"),
        ({f"{ACTOR}.optim.optimizer": "AdamV"}, "torch.optim has no such optimizer. Remedy"),
        ({f"{ACTOR}.loss_agg_mode": "mean"}, "verl refuses the configuration"),
        ({**REJECTION, f"{CORRECTION}.rollout_rs": "token_k5"}, "Invalid rollout_rs option: token_k5"),
        ({**REJECTION, f"{CORRECTION}.rollout_rs_threshold": 0}, "correction=geo_rs"),
        ({**REJECTION, f"{CORRECTION}.rollout_rs_threshold": "2.0_0.5"}, "must be lower <= upper"),
    ],
)
def test_names_that_verl_does_not_know_are_refused_before_ray_starts(settings, remedy):
    cfg = compose(["experiment=quickstart"])
    validate_by_verl(cfg)
    for key, value in settings.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    with pytest.raises(ConfigError, match=re.escape(remedy)):
        validate_by_verl(cfg)


def test_a_configuration_without_flashrl_is_refused():
    message = refusal(OmegaConf.create({"trainer": {"use_v1": True}}))
    assert "flashrl=null" in message and "experiment=base" in message


def test_micro_batches_that_do_not_divide_a_ranks_share_are_refused_before_anything_is_loaded():
    """verl asserts it at the first step."""
    ppo, log_prob = f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"
    cfg = compose(["experiment=quickstart", "trainer.n_gpus_per_node=2", f"{ppo}=192", f"{log_prob}=192"])
    for key in (ppo, log_prob):
        message = refusal(cfg)
        assert message.startswith(f"{key}=192 is refused: 96 sequences a rank ")
        OmegaConf.update(cfg, key, 48)
    validate_config(cfg)
    # 100 prompts x 8 samples are filled up to five mini-batches of 24 prompts: 480 sequences a rank.
    OmegaConf.update(cfg, "data.train_batch_size", 100)
    OmegaConf.update(cfg, log_prob, 240)
    validate_config(cfg)
    OmegaConf.update(cfg, log_prob, 200)
    assert " 480 sequences a rank " in refusal(cfg)


@pytest.mark.parametrize(("heads", "size", "good"), [(14, 4, 2), (28, 8, 4), (9, 2, 1)])
def test_engines_that_cannot_share_the_heads_are_refused(tmp_path, heads, size, good):
    (tmp_path / "config.json").write_text(f'{{"num_attention_heads": {heads}}}')
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    cfg = changed({"trainer.n_gpus_per_node": 8, MODEL: str(tmp_path), key: size})
    assert f"{heads} attention heads" in refusal(cfg) and f"Remedy: {key}={good}" in refusal(cfg)
    OmegaConf.update(cfg, key, good)
    validate_config(cfg)
