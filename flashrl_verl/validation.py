# SPDX-License-Identifier: Apache-2.0
"""The composed configuration, checked before anything is loaded: value, reason and the Hydra key to change.

``RULES`` is the table: a key, what it has to be, why, and what to write instead. The functions below it are for what
needs two values at once. Neither torch nor vLLM nor verl is imported, but by ``validate_by_verl``.

verl 0.9.1 tests the rollout's name for some of these; one called flashrl slips past, so they are tested again here:
    workers/config/rollout.py       pipeline_model_parallel_size > 1 is refused for vllm
    workers/rollout/llm_server.py   request priorities go to vllm only; any other name loses them silently
    utils/config.py                 the LoRA rank is checked for vllm only
"""

import dataclasses
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flashrl_verl.attention import require_shaped_caches
from flashrl_verl.attention.limits import REMEDY, why_not_model
from flashrl_verl.correction.settings import CorrectionSettings
from flashrl_verl.errors import ConfigError, refuse, words
from flashrl_verl.rollout.replicas import bf16_replicas
from flashrl_verl.settings import (
    ACTOR,
    ASYNC,
    CORRECTION,
    DATA,
    MODEL,
    ROLLOUT,
    FlashRLConfig,
    KVCache,
    get,
    positive_integer,
)

PLATFORM = "ray_kwargs.ray_init.runtime_env.env_vars.VERL_PLATFORM"
ENGINE = f"{ROLLOUT}.engine_kwargs.vllm"
GROUPS = ("precision", "correction", "hardware", "experiment")
"""Folders of ``flashrl_verl/configs``."""


def validate_config(cfg: DictConfig) -> FlashRLConfig:
    """Check the whole composed configuration, verl's keys included, before anything is loaded.

    Args:
        cfg: verl's composed PPO configuration with a ``flashrl`` node.

    Returns:
        The settings of FlashRL.

    Raises:
        ConfigError: The first contradiction found: its key and value, the reason, and what to set instead.
    """
    node = OmegaConf.select(cfg, "flashrl")
    if node is None:
        raise ConfigError(
            "flashrl is missing: the configuration has no FlashRL settings. Remedy: choose an experiment, "
            "such as +experiment=base with hydra.searchpath=[pkg://flashrl_verl.configs]."
        )
    _check_groups(cfg)
    settings = FlashRLConfig.from_mapping(node)
    for rule in RULES:
        value = get(cfg, rule.key, rule.default)
        if rule.when(cfg) and not _passes(rule, value):
            refuse(rule.key, value, rule.reason, rule.remedy)
    CorrectionSettings.from_config(get(cfg, CORRECTION, {}))
    _check_copies(cfg)
    _check_engine_arguments(cfg)
    _check_lengths(cfg)
    _check_batches(cfg)
    _check_head(cfg, settings)
    _check_replicas(cfg, settings)
    _check_attention(cfg)
    return settings


def validate_by_verl(cfg: DictConfig) -> None:
    """What verl itself says of the configuration, which it would say after Ray has started, or in a worker.

    It imports verl, which takes seconds and settles verl's platform: call ``platforms.activate`` before.

    Raises:
        ConfigError: verl knows no such name, or refuses the configuration; its own words.
    """
    from hydra.errors import HydraException
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config as verls
    from verl.utils.tracking import Tracking

    known = {"algorithm.adv_estimator": ADV_ESTIMATOR_REGISTRY, "trainer.logger": Tracking.supported_backend}
    if get(cfg, "actor_rollout_ref.model.external_lib") is None:  # workers import it, and it may register more
        known[_LOSS_MODE] = POLICY_LOSS_REGISTRY
    if get(cfg, "reward.reward_manager.source", "register") == "register":
        known["reward.reward_manager.name"] = REWARD_MANAGER
    fields = {field.name for field in dataclasses.fields(RolloutCorrectionConfig)}
    for key in get(cfg, CORRECTION) or ():
        if key not in fields | {"_target_"}:
            reason = f"verl knows no such key, only {', '.join(sorted(fields))}"
            refuse(f"{CORRECTION}.{key}", get(cfg, f"{CORRECTION}.{key}"), reason, "one of them")
    for key, names in known.items():
        value = get(cfg, key)
        for name in value if isinstance(value, list) else [value]:
            if name is not None and name not in names:
                near = get_close_matches(str(name), map(str, names)) or map(str, names)
                refuse(key, name, "verl knows no such name", f"{key}={' or '.join(near)}")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Disabled critic")  # as DAPO means it
            verls(config=cfg, use_reference_policy=need_reference_policy(cfg), use_critic=need_critic(cfg))
    except (AssertionError, ValueError, TypeError, KeyError, OmegaConfBaseException, HydraException) as error:
        raise ConfigError(f"verl refuses the configuration: {' '.join(str(error).split())}") from error


# ---- the table ----


class Rule(NamedTuple):
    """One key that has to pass one test."""

    key: str
    test: Callable[[Any], bool]
    reason: str
    """Why a value that fails is refused; the end of a sentence that starts with the key and the value."""
    remedy: str
    """What to write instead, as Hydra overrides."""
    default: Any = None
    """What verl takes when the key is absent or null."""
    when: Callable[[DictConfig], bool] = lambda cfg: True
    """Of the configuration: whether the rule holds there."""


def _passes(rule: Rule, value: Any) -> bool:
    try:
        return rule.test(value)
    except (TypeError, AttributeError):  # a text where a number belongs, a number where a node does
        return False


def _node(value: Any) -> bool:
    return isinstance(value, dict)


def one_of(*accepted: Any) -> Callable[[Any], bool]:
    """Test for equality with one of the values; True is not 1 here, although Python says so."""
    return lambda value: any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in accepted)


def none_of(*refused: Any) -> Callable[[Any], bool]:
    """The opposite of ``one_of``."""
    return lambda value: value not in refused


def _on_cpu(cfg: DictConfig) -> bool:
    return get(cfg, "trainer.device") == "cpu"


def _asynchronous(cfg: DictConfig) -> bool:
    return get(cfg, "trainer.v1.trainer_mode") == ASYNC


def _on_gpu(cfg: DictConfig) -> bool:
    return not _on_cpu(cfg)


def _weights(cfg: DictConfig) -> bool:
    return get(cfg, f"{CORRECTION}.rollout_is") is not None


def _rejects(cfg: DictConfig) -> bool:
    return get(cfg, f"{CORRECTION}.rollout_rs") is not None


def _bypass(cfg: DictConfig) -> bool:
    return bool(get(cfg, f"{CORRECTION}.bypass_mode"))


def _decoupled(cfg: DictConfig) -> bool:
    return not _bypass(cfg)


def _reinforce(cfg: DictConfig) -> bool:
    return _bypass(cfg) and get(cfg, f"{CORRECTION}.loss_type") == "reinforce"


def _measures(cfg: DictConfig) -> bool:
    """Whether the run compares log-probs of trainer and rollout. ``correction=metrics_only`` is known by its threshold
    without weights; ``correction=none`` has neither."""
    return _weights(cfg) or _rejects(cfg) or _bypass(cfg) or get(cfg, f"{CORRECTION}.rollout_is_threshold") is not None


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _positive_number(value: Any) -> bool:
    return _number(value) and value > 0


WEIGHTED_ESTIMATORS = ("optimal_token_baseline", "tir_optimal_token_baseline")
ROW_ESTIMATORS = ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized")
"""verl's estimators that use the mask for nothing but where a response's advantage stands."""

_ULYSSES = (f"{ACTOR}.ulysses_sequence_parallel_size", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size")
"""verl's older key and its newer one."""
_ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
_CRITIC_ATTENTION = "critic.model.override_config.attn_implementation"
_PACKED = "actor_rollout_ref.model.use_remove_padding"
_FLASH = "flash_attention_2"
"""verl's default."""
_LIGER = "actor_rollout_ref.model.use_liger"
VARLEN = "varlen"
"""Ours, of ``trainer/varlen_attention.py``."""
_MAX_MODEL_LEN = (f"{ROLLOUT}.max_model_len", f"{ENGINE}.max_model_len")
_OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"
_LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
_MERGE = "actor_rollout_ref.model.lora.merge"
_RATIO = "correction and mismatch metrics divide the trainer's probability by the sampler's"
_NO_KEY = "it reads /metrics of the rollout's servers, which ask for a key that verl does not give it"

RULES = (
    Rule(CORRECTION, _node, "verl reads its keys", "correction=none"),
    *(
        Rule(key, _node, "it is a node with keys of its own", f"remove {key}", default={})
        for key in (ENGINE, f"{ACTOR}.fsdp_config.mixed_precision", _OVERLONG)
    ),
    # Another trainer or backend than ours.
    Rule(
        "trainer.v1.trainer_mode",
        one_of("flashrl", ASYNC),
        "there is a flashrl node, but another trainer would run, without its correction, receipts and bounds",
        f"trainer.v1.trainer_mode=flashrl, or {ASYNC}; or leave FlashRL's experiment out",
    ),
    # Trajectories of several versions of the policy.
    Rule(
        f"{CORRECTION}.rollout_is",
        one_of(None, "token"),
        "an asynchronous trajectory is of several versions of the policy, whose ratios over a sequence are far from 1",
        "correction=tis",
        when=_asynchronous,
    ),
    Rule(
        f"{CORRECTION}.rollout_rs",
        lambda value: not value or all(name.strip().startswith("token_") for name in str(value).split(",")),
        "it rejects whole sequences by ratios, and those of an asynchronous trajectory are of several versions",
        "correction=tis",
        when=_asynchronous,
    ),
    Rule(
        "trainer.v1.sampler.max_off_policy_threshold",
        positive_integer,
        "without it trajectories may be of any age",
        "trainer.v1.sampler.max_off_policy_threshold=8",
        when=_asynchronous,
    ),
    Rule(
        f"{ROLLOUT}.name",
        one_of("flashrl"),
        "there is a flashrl node, but another backend would sample, with unchecked weight updates",
        f"{ROLLOUT}.name=flashrl, or leave FlashRL's experiment out",
    ),
    Rule(
        "trainer.resume_mode",
        one_of("auto", "disable", "resume_path"),
        "verl knows no such mode",
        "trainer.resume_mode=auto, disable or resume_path",
        default="auto",
    ),
    # Hardware.
    Rule(
        "trainer.device",
        one_of("cuda", "cpu"),
        "FlashRL's kernels exist for these two only",
        "hardware=cuda or hardware=cpu",
    ),
    Rule(
        PLATFORM,
        one_of("cpu"),
        "trainer.device=cpu is half of hardware=cpu: verl's workers would look for a GPU",
        "hardware=cpu",
        when=_on_cpu,
    ),
    Rule(
        PLATFORM,
        none_of("cpu"),
        "the workers would run on the CPU, but trainer.device is another. verl writes the driver's platform there, and "
        "python -m verl.trainer.main_ppo picks it before it has read hardware=cpu",
        "VERL_PLATFORM=cpu in the environment of the command, with hardware=cpu; for GPUs, hardware=cuda without "
        f"{PLATFORM}",
        when=_on_gpu,
    ),
    Rule(
        "trainer.nnodes",
        positive_integer,
        "it is the number of nodes that train and sample",
        "trainer.nnodes=1 or more",
    ),
    Rule(
        "trainer.n_gpus_per_node",
        positive_integer,
        "it is the number of worker processes on each node, on the CPU too",
        "trainer.n_gpus_per_node=1 or more",
    ),
    *(
        Rule(
            key,
            positive_integer,
            f"it is the number of {what}",
            f"{key}={sensible}, or another whole number",
            default=1,
        )
        for key, what, sensible in (
            (f"{ROLLOUT}.tensor_model_parallel_size", "GPUs of an engine", 1),
            (f"{ROLLOUT}.n", "responses to each prompt", 16),
            (f"{ROLLOUT}.max_num_seqs", "sequences that an engine decodes together", 256),
            ("data.train_batch_size", "prompts of a step", 512),
            (f"{ACTOR}.ppo_mini_batch_size", "prompts of an optimizer step", 32),
            *((key, "GPUs that share a sequence", 1) for key in _ULYSSES),
            (f"{ROLLOUT}.prompt_length", "tokens of the longest prompt", 512),
            (f"{ROLLOUT}.response_length", "tokens of the longest response", 512),
            *((key, "tokens of the longest sequence", "null") for key in _MAX_MODEL_LEN),
        )
    ),
    Rule(
        f"{ACTOR}.optim.lr",
        lambda rate: _number(rate) and rate >= 0,
        "it is the learning rate",
        f"{ACTOR}.optim.lr=1.0e-6, or another number from 0 on",
        default=1e-6,
    ),
    Rule(
        f"{ROLLOUT}.gpu_memory_utilization",
        lambda share: _number(share) and 0 < share <= 1,
        "it is the engine's share of a GPU's memory",
        f"{ROLLOUT}.gpu_memory_utilization=0.8, or another number from 0 to 1",
        default=0.5,
    ),
    # Groups that say nothing.
    Rule(
        f"{ROLLOUT}.n",
        none_of(1),
        "groups of one response are never filtered, and GRPO has no baseline for them: advantages would be raw scores",
        f"{ROLLOUT}.n=16, or algorithm.filter_groups.enable=false with an estimator that needs no group",
        default=1,
        when=lambda cfg: bool(get(cfg, "algorithm.filter_groups.enable")),
    ),
    Rule(
        "trainer.v1.sampler.custom_sampler.path",
        one_of(None),
        "a sampler of your own and flashrl.sampling.refill would both choose the batch",
        "flashrl.sampling.refill=false",
        when=lambda cfg: (
            bool(get(cfg, "flashrl.sampling.refill", True) and get(cfg, "algorithm.filter_groups.enable"))
            and not _asynchronous(cfg)
        ),
    ),
    Rule(
        f"{ACTOR}.strategy",
        one_of("fsdp2"),
        "on the CPU the actor has to be FSDP2: FSDP1 refuses CPU parameters",
        f"{ACTOR}.strategy=fsdp2",
        when=_on_cpu,
    ),
    Rule(
        f"{ROLLOUT}.enable_sleep_mode",
        one_of(False),
        "vLLM's sleep mode needs CUDA's allocator",
        f"{ROLLOUT}.enable_sleep_mode=false (hardware=cpu sets it)",
        default=True,
        when=_on_cpu,
    ),
    Rule(
        "flashrl.kv_cache",
        one_of("auto"),
        "its attention is for GPUs",
        "flashrl.kv_cache=auto",
        default="auto",
        when=_on_cpu,
    ),
    # Number formats that contradict ours.
    Rule(
        f"{ROLLOUT}.dtype",
        one_of("bfloat16", "float16"),
        "weights are sent in this type and quantized from it, and vLLM's INT8 kernels write no other",
        f"{ROLLOUT}.dtype=bfloat16 or float16",
        default="bfloat16",
    ),
    Rule(
        f"{ROLLOUT}.load_format",
        one_of("dummy", "auto", "safetensors"),
        "codes are made by vLLM's ordinary weight loaders, which this format bypasses",
        f"{ROLLOUT}.load_format=dummy (weights arrive with the first update), auto or safetensors",
        default="dummy",
    ),
    Rule(
        f"{ROLLOUT}.quantization",
        one_of(None),
        "FlashRL's rollout does not read it",
        f"{ROLLOUT}.quantization=null and flashrl.precision=int8",
    ),
    Rule(
        f"{ROLLOUT}.qat.enable",
        one_of(False, None),
        "quantization-aware training brings its own quantization of the rollout",
        f"{ACTOR}.fsdp_config.qat.enable=false and {ROLLOUT}.qat.enable=false",
    ),
    # verl's Ulysses changes flash attention alone (models/transformers/monkey_patch.py); ours does it itself.
    Rule(
        _ATTENTION,
        one_of(_FLASH, VARLEN),
        "with sequence parallelism each GPU would attend to its own part of a sequence, in silence",
        f"{_ATTENTION}={_FLASH} or {VARLEN}, or {_ULYSSES[0]}=1",
        default=_FLASH,
        when=lambda cfg: max(get(cfg, key, 1) for key in _ULYSSES) > 1,
    ),
    Rule(
        _ATTENTION,
        none_of("flash_attention_4"),
        "transformers hands it a packed row's longest length as a tensor, which it does not take",
        f"{_ATTENTION}={VARLEN}, which takes FlashAttention 4 where flash-attn-4 is installed",
        when=lambda cfg: get(cfg, _PACKED, True),
    ),
    Rule(
        "actor_rollout_ref.model.use_fused_kernels",
        one_of(False),
        "they multiply by lm_head's weight themselves and round the logits to BF16, although "
        "flashrl.fp32_lm_head=true, and the rollout alone in FP32 would be further from the trainer than both in BF16",
        "actor_rollout_ref.model.use_fused_kernels=false, or flashrl.fp32_lm_head=false",
        default=False,
        when=lambda cfg: bool(get(cfg, "flashrl.fp32_lm_head")),
    ),
    Rule(
        "actor_rollout_ref.model.use_fused_kernels",
        one_of(False),
        "they multiply by lm_head's weight themselves, which under FSDP2 is a shard there, in FP32",
        f"actor_rollout_ref.model.use_fused_kernels=false, or {ACTOR}.strategy=fsdp",
        default=False,
        when=lambda cfg: get(cfg, f"{ACTOR}.strategy") == "fsdp2",
    ),
    # Weights that would not arrive whole, or not be checked.
    Rule(
        "reward.reward_model",
        lambda node: not node.get("enable") or bool(node.get("enable_resource_pool")),
        "a reward model on the training GPUs makes verl send weights amid validation, which nobody verifies",
        "reward.reward_model.enable_resource_pool=true (GPUs of its own), or reward.reward_model.enable=false",
        default={},
    ),
    *(
        Rule(
            key,
            lambda rank: rank <= 0,
            "the adapter would be sent beside the base weights, and only whole weights are quantized",
            f"{_MERGE}=True (merged before each update), or {key}=0",
            default=0,
            when=lambda cfg: not get(cfg, _MERGE),
        )
        for key in ("actor_rollout_ref.model.lora.rank", "actor_rollout_ref.model.lora_rank")
    ),
    Rule(
        f"{ACTOR}.strategy",
        one_of("fsdp", "fsdp2"),
        "refits, receipts and the check for NaN before a checkpoint have been run with FSDP actors only",
        f"{ACTOR}.strategy=fsdp2",
    ),
    Rule(
        f"{ROLLOUT}.pipeline_model_parallel_size",
        one_of(1),
        "verl's vLLM rollout has no pipeline parallelism",
        f"{ROLLOUT}.pipeline_model_parallel_size=1 and a larger {ROLLOUT}.tensor_model_parallel_size",
        default=1,
    ),
    Rule(
        f"{ROLLOUT}.data_parallel_size",
        one_of(1),
        "vLLM's collective calls reach one data-parallel shard of an engine, so the receipts of the others could not "
        "be read",
        f"{ROLLOUT}.data_parallel_size=1; more replicas come by themselves from more GPUs",
        default=1,
    ),
    Rule(
        f"{ROLLOUT}.expert_parallel_size",
        one_of(1),
        "a rank would hold some experts only, and neither the loader nor the receipts of FlashRL know which",
        f"{ROLLOUT}.expert_parallel_size=1 and {ROLLOUT}.tensor_model_parallel_size, which cuts every expert",
        default=1,
    ),
    Rule(
        f"{ROLLOUT}.scheduling_policy",
        one_of("fcfs"),
        "verl hands request priorities only to a rollout named vllm, so they would be dropped",
        f"{ROLLOUT}.scheduling_policy=fcfs",
        default="fcfs",
    ),
    Rule(
        f"{ROLLOUT}.mtp.enable_rollout",
        one_of(False),
        "the drafter's weights are not part of the checked weight update",
        "actor_rollout_ref.model.mtp.enable_rollout=false",
        default=False,
    ),
    # Monitors that would ask the servers without their key.
    Rule(
        f"{ROLLOUT}.prometheus.enable",
        one_of(False),
        _NO_KEY,
        f"{ROLLOUT}.prometheus.enable=false, and a scrape job of your own with the key (docs/clusters.md)",
        default=False,
    ),
    Rule(
        "trainer.logger",
        lambda loggers: "rl_insight" not in ([loggers] if isinstance(loggers, str) else loggers),
        _NO_KEY,
        "trainer.logger without rl_insight",
        default=[],
    ),
    # A correction of which something would be ignored: whoever sets it expects something of it.
    Rule(
        f"{CORRECTION}.loss_type",
        one_of("ppo_clip"),
        f"without {CORRECTION}.bypass_mode it has no effect",
        f"{CORRECTION}.loss_type=ppo_clip, or correction=bypass with it",
        default="ppo_clip",
        when=_decoupled,
    ),
    Rule(
        f"{CORRECTION}.rollout_rs_threshold",
        one_of(None),
        f"without {CORRECTION}.rollout_rs it has no effect",
        f"{CORRECTION}.rollout_rs_threshold=null, or correction=geo_rs with it",
        when=lambda cfg: not _rejects(cfg),
    ),
    Rule(
        f"{CORRECTION}.rollout_is_batch_normalize",
        one_of(False),
        f"without {CORRECTION}.rollout_is it has no effect",
        f"{CORRECTION}.rollout_is_batch_normalize=false, or correction=tis with it",
        default=False,
        when=lambda cfg: not _weights(cfg),
    ),
    # Bypass mode: V1 takes the rollout's log-probs for the old ones, but leaves the loss that knows of it to the user.
    Rule(
        _LOSS_MODE,
        one_of("bypass_mode"),
        f"with {CORRECTION}.bypass_mode=true this loss takes old log-probs for the trainer's, and neither weights nor "
        "rejects",
        f"correction=bypass, which sets {_LOSS_MODE}=bypass_mode and takes the weights away",
        default="vanilla",
        when=_bypass,
    ),
    Rule(
        _LOSS_MODE,
        none_of("bypass_mode"),
        f"this loss takes old log-probs for the rollout's, which they are only with {CORRECTION}.bypass_mode=true",
        f"{_LOSS_MODE}=vanilla, or correction=bypass",
        when=_decoupled,
    ),
    Rule(
        f"{CORRECTION}.rollout_is",
        one_of(None),
        "in bypass mode PPO's clipped ratio corrects, and verl computes these weights for its metrics only",
        f"correction=bypass, {CORRECTION}.rollout_is=null, or {CORRECTION}.loss_type=reinforce",
        when=lambda cfg: _bypass(cfg) and not _reinforce(cfg),
    ),
    Rule(
        f"{CORRECTION}.loss_type",
        none_of("reinforce"),
        f"this loss has neither ratio nor clip: without {CORRECTION}.rollout_is nothing corrects",
        f"{CORRECTION}.rollout_is=token with {CORRECTION}.rollout_is_threshold=2.0, or {CORRECTION}.loss_type=ppo_clip",
        when=lambda cfg: _reinforce(cfg) and not _weights(cfg),
    ),
    Rule(
        f"{CORRECTION}.rollout_is_batch_normalize",
        one_of(False),
        "in bypass mode verl divides by the mean of a micro-batch, so that the gradient would depend on its size",
        f"{CORRECTION}.rollout_is_batch_normalize=false, or a preset without bypass (correction=tis)",
        default=False,
        when=_bypass,
    ),
    Rule(
        f"{CORRECTION}.rollout_is_threshold",
        lambda threshold: "_" not in str(threshold),
        "in bypass mode verl divides by zero when every weight of a micro-batch falls outside these bounds",
        f"{CORRECTION}.rollout_is_threshold=2.0, or a preset without bypass (correction=icepop)",
        when=_reinforce,
    ),
    # The driver computes advantages before the actors know weights and rejections; verl's driver knows them.
    Rule(
        "algorithm.adv_estimator",
        none_of(*WEIGHTED_ESTIMATORS),
        "its baseline is made of the importance weights, which only the actors compute",
        "algorithm.adv_estimator=grpo",
        when=lambda cfg: _decoupled(cfg) and _weights(cfg),
    ),
    Rule(
        "algorithm.adv_estimator",
        one_of(*ROW_ESTIMATORS),
        f"its advantages depend on which tokens {CORRECTION}.rollout_rs rejects, which only the actors know",
        f"algorithm.adv_estimator=grpo (or {', '.join(ROW_ESTIMATORS[1:])}), or {CORRECTION}.rollout_rs=null",
        default="gae",
        when=lambda cfg: _decoupled(cfg) and _rejects(cfg),
    ),
    # What is sampled: the correction holds only for the policy whose log-probs the engine records.
    Rule(
        f"{ROLLOUT}.temperature",
        _positive_number,
        "greedy samples of a prompt are all the same, so every group is constant and has no advantage, and the trainer "
        "divides its logits by the temperature",
        f"{ROLLOUT}.temperature=1.0; validation has its own, {ROLLOUT}.val_kwargs.temperature",
        default=1.0,
    ),
    Rule(
        f"{ROLLOUT}.calculate_log_probs",
        one_of(True),
        f"{_RATIO}, and without the sampler's log-probs there is nothing to divide by",
        f"{ROLLOUT}.calculate_log_probs=true, or correction=none",
        default=False,
        when=_measures,
    ),
    Rule(
        f"{ROLLOUT}.logprobs_mode",
        one_of("processed_logprobs"),
        f"{_RATIO}; raw log-probs leave out the temperature and are not those of the policy that sampled",
        f"{ROLLOUT}.logprobs_mode=processed_logprobs",
        default="processed_logprobs",
        when=_measures,
    ),
    Rule(
        f"{ROLLOUT}.top_p",
        one_of(1, 1.0),
        f"{_RATIO}, and a nucleus renormalizes only the sampler's",
        f"{ROLLOUT}.top_p=1.0, or correction=none",
        default=1.0,
        when=_measures,
    ),
    Rule(
        f"{ROLLOUT}.top_k",
        one_of(-1, 0),
        f"{_RATIO}, and top-k renormalizes only the sampler's",
        f"{ROLLOUT}.top_k=-1 (off), or correction=none",
        default=-1,
        when=_measures,
    ),
)


# ---- vLLM's own arguments ----

# verl's server builds {its own arguments, **engine_kwargs}: what stands in engine_kwargs wins without a word.
_ALIASES = {
    "dtype": "dtype",
    "load_format": "load_format",
    "logprobs_mode": "logprobs_mode",
    "scheduling_policy": "scheduling_policy",
    "enable_sleep_mode": "enable_sleep_mode",
    "tensor_parallel_size": "tensor_model_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    "data_parallel_size": "data_parallel_size",
}
"""Arguments that have a key of their own in the rollout's configuration: they may be repeated, not contradicted."""

_DEFAULTS = {rule.key: rule.default for rule in RULES if rule.default is not None}
"""What verl takes for keys that its YAML does not have."""

_PRECISION = "flashrl.precision=int8, fp8 or bf16"
_KV_CACHE = "flashrl.kv_cache=auto or int8_per_token_head"
_NGRAM = {"method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"}
_RESERVED = {
    "quantization": ("it replaces FlashRL's quantization", _PRECISION),
    "q": ("it is vLLM's short name for quantization and replaces FlashRL's", _PRECISION),
    "quantization_config": ("it replaces FlashRL's quantization", _PRECISION),
    "hf_overrides": (
        "FlashRL's settings travel in hf_overrides.quantization_config, and vLLM takes only one hf_overrides",
        "flashrl.precision for the precision, config.json of the model for anything else",
    ),
    "kv_cache_dtype": ("nothing would make its scales follow the policy", _KV_CACHE),
    "calculate_kv_scales": ("its scales are those of the first batch, whatever the policy becomes", _KV_CACHE),
    "kv_cache_dtype_skip_layers": ("only some layers would have flashrl.kv_cache", "flashrl.kv_cache for all layers"),
    "enable_expert_parallel": (
        "neither the loader nor the receipts of FlashRL know which experts a rank would hold",
        None,
    ),
    "worker_extension_cls": ("FlashRL's own extension receives and checks the weights", None),
    "override_generation_config": (
        "verl fills it from the rollout's own keys",
        f"{ROLLOUT}.temperature, top_p and top_k",
    ),
    "logits_processors": ("they change the policy that samples, not the trainer's, and the ratio is wrong", None),
    **dict.fromkeys(
        ("speculative_config", "spec_method", "spec_model", "spec_tokens"),
        (
            "it has to be n-gram speculation, on GPUs and with flashrl.kv_cache=auto: a drafter's weights would not be "
            "part of the checked update, on a CPU vLLM leaves the temperatures of drafted tokens empty, and the INT8 "
            "KV cache's attention has none",
            f"+{ENGINE}.speculative_config={{method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 3}}",
        ),
    ),
    "enable_lora": ("adapters are not quantized", f"{_MERGE}=True"),
    "api_key": ("verl prints it into the run's log, and a server of FlashRL's has a random key of its own", None),
    "config": ("the arguments in a further file cannot be checked", f"{ENGINE}.<argument>"),
}
"""Arguments that FlashRL sets, or that change which policy samples, to the reason and what to use instead. max_logprobs
is not one: only the sampled token's log-prob is asked for, and every value allows that."""


def _check_engine_arguments(cfg: DictConfig) -> None:
    for name, value in get(cfg, ENGINE, {}).items():
        if value is None:  # verl drops these before it builds the command line
            continue
        key = f"{ENGINE}.{name}"
        argument = str(name).replace("-", "_").split(".")[0]  # vLLM takes both spellings, and dots into a dict
        # Its parser takes beginnings too.
        argument = next((known for known in (*_RESERVED, *_ALIASES) if known.startswith(argument)), argument)
        # Nothing else of it: rejection_sample_method, for one, changes what is sampled.
        ngram = argument == "speculative_config" and isinstance(value, dict) and value.get("method") == "ngram"
        ngram = ngram and value.keys() <= _NGRAM
        if ngram and _on_gpu(cfg) and get(cfg, "flashrl.kv_cache", "auto") == "auto":
            continue
        if argument in _RESERVED:
            reason, instead = _RESERVED[argument]
            use = f", and use {instead}" if instead else ""
            refuse(key, value, f"verl puts engine_kwargs last, so this wins; {reason}", f"remove {key}{use}")
        if "ssl" in argument.split("_"):  # all of vLLM's arguments about certificates
            use = f"remove {key}; flashrl.server_address=loopback keeps HTTP on its machine (docs/clusters.md)"
            refuse(key, value, "verl starts vLLM's server without it, so that its HTTP would not be encrypted", use)
        twin = f"{ROLLOUT}.{_ALIASES[argument]}" if argument in _ALIASES else None
        if twin and value != (meant := get(cfg, twin, _DEFAULTS.get(twin, value))):
            reason = f"verl puts engine_kwargs last, so {twin}={words(meant)} would be ignored"
            refuse(key, value, reason, f"remove {key} and set {twin}")


# ---- two keys at once ----


def _check_groups(cfg: DictConfig) -> None:
    """What a ``+`` makes of a misspelt group (``+corection=icepop``): a key that nothing reads, and a run with the
    default."""
    for key in map(str, cfg):
        if found := get_close_matches(key, GROUPS, n=1, cutoff=0.83):  # one wrong letter in six
            value = words(get(cfg, key))
            refuse(
                key, get(cfg, key), "nothing reads it", f"{found[0]}={value} without a +, or another name for the key"
            )


def _check_copies(cfg: DictConfig) -> None:
    """Workers see only actor_rollout_ref: what they read there has to be what the user wrote elsewhere."""
    copies = {f"{ROLLOUT}.custom.flashrl": "flashrl", f"{ACTOR}.policy_loss.rollout_correction": CORRECTION}
    for copy, source in copies.items():
        if get(cfg, copy) != get(cfg, source):
            reason = f"workers read this copy, and it differs from {source}={words(get(cfg, source))}"
            refuse(copy, get(cfg, copy), reason, f"set {source}.* only, and leave {copy}='${{{source}}}'")


def _check_lengths(cfg: DictConfig) -> None:
    """vLLM cuts a response at its longest sequence without a word, and DAPO's reward workers die where responses are
    shorter than the overlong buffer."""
    prompt, response = (get(cfg, f"{ROLLOUT}.{key}", 512) for key in ("prompt_length", "response_length"))
    for key in _MAX_MODEL_LEN:
        longest = get(cfg, key)
        if longest is not None and longest < prompt + response:
            refuse(
                key,
                longest,
                f"prompts of {prompt} and responses of {response} tokens do not fit, and responses would be cut in "
                "silence",
                f"{key}={prompt + response}, null, or a smaller data.max_response_length",
            )
    length = get(cfg, f"{_OVERLONG}.len", 0)
    if get(cfg, f"{_OVERLONG}.enable") and not (_number(length) and 0 < length < response):
        refuse(
            f"{_OVERLONG}.len",
            length,
            f"it is the end of the data.max_response_length={response} tokens of a response, in which the penalty "
            "grows",
            f"{_OVERLONG}.len={max(1, response // 5)}, or {_OVERLONG}.enable=false",
        )


def _check_batches(cfg: DictConfig) -> None:
    """verl cuts a rank's share of the batch into micro-batches and asserts, at the first step, that nothing is left; in
    bypass mode its loss fails on the rows without a token with which it fills a mini-batch up."""
    prompts, mini_batch = (get(cfg, key, 0) for key in ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"))
    if _bypass(cfg) and positive_integer(mini_batch) and prompts % mini_batch:
        refuse(
            f"{ACTOR}.ppo_mini_batch_size",
            mini_batch,
            f"it does not divide data.train_batch_size={prompts}: verl fills up with rows without a token, where its "
            "loss of bypass mode fails",
            f"{ACTOR}.ppo_mini_batch_size that divides data.train_batch_size, or a preset without bypass "
            "(correction=tis)",
        )
    ranks = get(cfg, "trainer.nnodes") * get(cfg, "trainer.n_gpus_per_node")
    key = max(_ULYSSES, key=lambda key: get(cfg, key, 1))
    if ranks % (ulysses := get(cfg, key, 1)):
        use = "one that divides trainer.nnodes x trainer.n_gpus_per_node"
        refuse(key, ulysses, f"{ranks} GPUs cannot be cut into groups of {ulysses} that share sequences", use)
    data_parallel = ranks // ulysses
    samples = get(cfg, f"{ROLLOUT}.n", 1)
    whole = prompts * samples
    if positive_integer(mini_batch):  # verl fills the batch up, so that mini-batches are whole
        whole += -whole % math.lcm(data_parallel, mini_batch * samples)
    if positive_integer(mini_batch) and mini_batch * samples % data_parallel:
        refuse(
            f"{ACTOR}.ppo_mini_batch_size",
            mini_batch,
            f"its {mini_batch * samples} samples ({ROLLOUT}.n={samples} of each prompt) cannot be shared evenly by "
            f"{data_parallel} ranks, which verl asserts after the first rollout",
            f"{ACTOR}.ppo_mini_batch_size that is a multiple of {data_parallel // math.gcd(data_parallel, samples)}",
        )
    for key, dynamic, source, sequences in (
        (
            f"{ACTOR}.ppo_micro_batch_size_per_gpu",
            f"{ACTOR}.use_dynamic_bsz",
            f"{ACTOR}.ppo_mini_batch_size={mini_batch}",
            mini_batch * samples,
        ),
        (
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
            f"{ROLLOUT}.log_prob_use_dynamic_bsz",
            f"data.train_batch_size={prompts}",
            whole,
        ),
    ):
        size = get(cfg, key)
        if size and not get(cfg, dynamic, False) and (sequences / data_parallel) % size:
            refuse(
                key,
                size,
                f"{source} prompts x {samples} samples on {data_parallel} ranks are {sequences / data_parallel:g} "
                "sequences a rank, which cannot be cut into micro-batches of that many",
                f"{key} that divides them, or {dynamic}=true",
            )


_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "16": "float16", "fp32": "float32", "32": "float32"}
"""verl's other names for them (``PrecisionType``)."""


def _check_head(cfg: DictConfig, settings: FlashRLConfig) -> None:
    """Logits that are to be the same on both sides need the same operands."""
    key = f"{ACTOR}.fsdp_config.mixed_precision"
    written = ((get(cfg, key) or {}).get("param_dtype", "bf16"), get(cfg, f"{ROLLOUT}.dtype", "bfloat16"))
    trainer, rollout = (_DTYPES.get(str(name), str(name)) for name in written)
    if settings.fp32_lm_head and trainer != rollout:
        other = f", or {ROLLOUT}.dtype={trainer}" if trainer != "float32" else ""
        refuse(
            f"{key}.param_dtype",
            trainer,
            f"the trainer would round lm_head's weight and input differently from {ROLLOUT}.dtype={rollout}, and for "
            "flashrl.fp32_lm_head=true both sides need the same",
            f"{key}.param_dtype={rollout}, flashrl.fp32_lm_head=false{other}",
        )


def _check_replicas(cfg: DictConfig, settings: FlashRLConfig) -> None:
    """Engines are whole, and a mixture of precisions takes as many of them as there are precisions."""
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    ranks, size = get(cfg, "trainer.nnodes") * get(cfg, "trainer.n_gpus_per_node"), get(cfg, key, 1)
    if ranks % size:
        refuse(
            key,
            size,
            f"{ranks} GPUs cannot be cut into engines of {size}",
            f"{key} that divides trainer.nnodes x trainer.n_gpus_per_node",
        )
    heads = _model_config(cfg).get("num_attention_heads")
    if isinstance(heads, int) and heads % size:
        reason = f"the model's {heads} attention heads cannot be shared by {size} GPUs"
        refuse(key, size, reason, f"{key}={math.gcd(heads, size)}")
    if settings.bf16_replica_fraction:
        bf16_replicas(settings, ranks // size)


def _model_config(cfg: DictConfig) -> dict[str, Any]:
    """The model's config.json. Empty where the model is on another machine or on the hub, and where the file is missing
    or damaged, which have messages of their own."""
    try:
        model = json.loads((Path(get(cfg, MODEL, "")) / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return model if isinstance(model, dict) else {}


def _check_attention(cfg: DictConfig) -> None:
    """Our attention does not take every model's heads. A model that cannot be read here is left to the engine."""
    if not _has_our_attention(cfg):
        return
    model = _model_config(cfg)
    if model and (reason := why_not_model(model)):
        kv_cache = get(cfg, "flashrl.kv_cache")
        raise ConfigError(
            f"flashrl.kv_cache={kv_cache}: its attention does not take {get(cfg, MODEL)}, which has {reason}. {REMEDY}"
        )


def _has_our_attention(cfg: DictConfig) -> bool:
    others = (f"{ENGINE}.attention_backend", f"{ENGINE}.attention_config.backend")
    ours = get(cfg, "flashrl.kv_cache") == KVCache.INT8_PER_TOKEN_HEAD.value
    return ours and not any(get(cfg, key) for key in others)


def settle_packages(cfg: DictConfig) -> None:
    """What this environment has and lacks, which workers would find out a minute after Ray has started; a dry run may
    be made elsewhere. Where verl's default wants flash-attn and it is not there, ours is taken, and said.

    Args:
        cfg: changed in place.

    Raises:
        ConfigError: the run asks for what is not there.
    """
    if _has_our_attention(cfg):
        require_shaped_caches()
    if get(cfg, _LIGER) and find_spec("liger_kernel") is None:
        refuse(_LIGER, True, "liger-kernel is not installed in this environment", f"pip install it, or {_LIGER}=false")
    asked = get(cfg, _ATTENTION)
    if not _on_gpu(cfg) or asked not in (None, _FLASH) or installed("flash-attn"):
        return
    if asked:
        refuse(
            _ATTENTION,
            asked,
            "flash-attn is not installed in this environment",
            f"leave it out, which takes {VARLEN}, or pip install flash-attn --no-build-isolation",
        )
    if not get(cfg, _PACKED, True):
        refuse(_PACKED, False, f"flash-attn is not installed, and {VARLEN} packs", f"+{_ATTENTION}=sdpa")
    critic = get(cfg, "critic.enable")
    if critic is None:
        critic = get(cfg, "algorithm.adv_estimator") == "gae"
    if critic and get(cfg, _CRITIC_ATTENTION, _FLASH) == _FLASH:
        refuse(_CRITIC_ATTENTION, _FLASH, "flash-attn is not installed", f"+{_CRITIC_ATTENTION}=sdpa")
    OmegaConf.update(cfg, _ATTENTION, VARLEN, force_add=True)
    newer = "FlashAttention 4 from Hopper on, else " if installed("flash-attn-4") else ""
    print(f"flash-attn is not installed: {_ATTENTION}={VARLEN}, {newer}PyTorch's own FlashAttention 2", file=sys.stderr)


def installed(distribution: str) -> bool:
    """Whether a distribution is; flash-attn and flash-attn-4 share the module ``flash_attn``."""
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False


# ---- local paths: not part of ``validate_config``, for a dry run need not happen where the run will ----


_CODE = ("reward.custom_reward_function.path", "custom_reward_function.path", "data.custom_cls.path")
"""Files of Python that verl imports when its workers start."""


def missing_paths(
    cfg: DictConfig, *, root: Path | None = None, made_later: Path | None = None
) -> list[tuple[str, str]]:
    """Local paths that a run would read and that are not there.

    Args:
        cfg: The composed configuration.
        root: Where relative paths start; the working directory when it is None.
        made_later: A directory whose contents need not exist yet.

    Returns:
        Pairs of Hydra key and path as it is written; data first. Addresses (``hdfs://``, ``pkg://``) and names of the
        model hub are not local, and a dataset class of the user's own reads what it likes.
    """
    root = root or Path.cwd()
    return [
        (key, text)
        for key, text in _local_paths(cfg, root)
        if not (root / text).exists() and not (made_later and (root / text).is_relative_to(made_later))
    ]


def describe_missing(missing: list[tuple[str, str]]) -> str:
    """What is missing, in words: ``key=path, key=path not found on this machine``."""
    return ", ".join(f"{key}={text}" for key, text in missing) + " not found on this machine"


def check_paths(cfg: DictConfig, *, root: Path | None = None, made_later: Path | None = None) -> None:
    """Refuse a configuration whose local paths are not there; arguments as in ``missing_paths``.

    Raises:
        ConfigError: one message with every key and path.
    """
    missing = missing_paths(cfg, root=root, made_later=made_later)
    if not missing:
        return
    if get(cfg, "quickstart.assets") is not None:
        remedy = (
            "quickstart.assets=<folder>/assets of an earlier `flashrl quickstart --output <folder>`, which makes them "
            "(bash scripts/quickstart.sh), or paths of your own"
        )
    else:
        tilde = (
            f"; write your home folder out in {MODEL}, ~ is not expanded there"
            if get(cfg, MODEL, "").startswith("~")
            else ""
        )
        makes = (
            "; or make the data: `flashrl data --help` lists what it can"
            if any(key in DATA for key, _ in missing)
            else ""
        )
        remedy = f"set these keys to paths that exist on every node{tilde}{makes}"
    raise ConfigError(f"{describe_missing(missing)} (relative paths start at {root or Path.cwd()}). Remedy: {remedy}.")


def _local_paths(cfg: DictConfig, root: Path) -> Iterator[tuple[str, str]]:
    if get(cfg, "data.custom_cls.path") is None:
        for key in DATA:
            value = get(cfg, key, [])
            for text in [value] if isinstance(value, str) else value:
                if "://" not in text:
                    yield key, os.path.expanduser(text)  # as Hugging Face datasets does
    for key in _CODE:
        if "://" not in (text := get(cfg, key, "://")):
            yield key, text
    model = get(cfg, MODEL, "")
    folder = Path(model).parent
    looks_like_a_path = (  # a name of the model hub is ``name`` or ``owner/name``
        model.startswith(("/", "./", "../", "~"))
        or len(Path(model).parts) > 2
        or (folder != Path(".") and (root / folder).is_dir())
    )
    if "://" not in model and looks_like_a_path:
        yield MODEL, model  # transformers takes ~ for a folder's name
