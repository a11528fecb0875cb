# SPDX-License-Identifier: Apache-2.0
"""The composed configuration, checked before Ray starts: key and value, the reason, and what to write instead.

A rule stands here only if the mistake would be silent without it, or be found after a model has been loaded. What
Hydra, verl and vLLM refuse at once is left to them. Only ``validate_by_verl`` imports verl or torch.

verl 0.9.1 looks at the rollout's name in these places, where one called flashrl slips past:
    workers/config/rollout.py       pipeline_model_parallel_size > 1 is refused for vllm; here too
    utils/config.py                 the LoRA rank is checked for vllm; here adapters are refused
    workers/rollout/llm_server.py   vllm gets request priorities; here requests are served as they come
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flashrl_verl.attention.limits import REMEDY, why_not_model
from flashrl_verl.correction.settings import CorrectionSettings
from flashrl_verl.errors import ConfigError, listed, refuse, words
from flashrl_verl.input_files import model_config
from flashrl_verl.settings import (
    ACTOR,
    ASYNC,
    CORRECTION,
    MODEL,
    RENAMED,
    ROLLOUT,
    FlashRLConfig,
    KVCache,
    get,
    has_critic,
    leaves,
    positive_integer,
)
from flashrl_verl.upstream.versions import verl_defaults

GROUPS = ("correction", "hardware", "experiment")
"""Folders of ``flashrl_verl/configs``."""
PLATFORM = "ray_kwargs.ray_init.runtime_env.env_vars.VERL_PLATFORM"
ENGINE = f"{ROLLOUT}.engine_kwargs.vllm"
VARLEN = "varlen"
"""Our attention in the trainer (``trainer/varlen_attention.py``)."""

MODEL_NODE = "actor_rollout_ref.model"
ATTENTION = f"{MODEL_NODE}.override_config.attn_implementation"
FLASH = "flash_attention_2"
"""verl's default."""
_LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
_MINI_BATCH = f"{ACTOR}.ppo_mini_batch_size"
_MIXED = f"{ACTOR}.fsdp_config.mixed_precision"
_OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"
_TENSOR_PARALLEL = f"{ROLLOUT}.tensor_model_parallel_size"
_ULYSSES = (f"{ACTOR}.ulysses_sequence_parallel_size", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size")
"""verl's older key and its newer one."""


def validate_config(cfg: DictConfig) -> FlashRLConfig:
    """Check verl's composed PPO configuration, with its ``flashrl`` node, before anything is loaded.

    Raises:
        ConfigError: The first contradiction found: its key and value, the reason, and what to set instead.
    """
    _check_groups(cfg)
    settings = FlashRLConfig.from_mapping(OmegaConf.select(cfg, "flashrl"))
    for rule in rules(cfg):
        value = get(cfg, rule.key)
        if not rule.test(value):
            refuse(rule.key, value, rule.reason, f"{rule.key}={rule.instead}")
    _check_defaults(cfg)
    CorrectionSettings.from_config(get(cfg, CORRECTION))
    _check_engine_arguments(cfg)
    vllms = (f"{ENGINE}.attention_backend", f"{ENGINE}.attention_config.backend")
    ours = settings.kv_cache is not KVCache.AUTO and not any(get(cfg, key) for key in vllms)
    if ours and (reason := why_not_model(model_config(cfg))):
        reason = f"its attention does not take {get(cfg, MODEL)}, which has {reason}"
        refuse("flashrl.kv_cache", settings.kv_cache.value, reason, REMEDY)
    return settings


def validate_by_verl(cfg: DictConfig) -> None:
    """What verl itself says of the configuration, which it would say after Ray has started, or in a worker.

    It imports verl, which takes seconds and settles verl's platform: call ``platforms.activate`` before.

    Raises:
        ConfigError: verl knows no such name, or refuses the configuration; its own words.
    """
    import torch
    from hydra.errors import HydraException
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config as verls
    from verl.utils.tracking import Tracking

    known = {"algorithm.adv_estimator": ADV_ESTIMATOR_REGISTRY, "trainer.logger": Tracking.supported_backend}
    if get(cfg, f"{MODEL_NODE}.external_lib") is None:  # workers import it, and it may register more
        known[_LOSS_MODE] = POLICY_LOSS_REGISTRY
    if get(cfg, "reward.reward_manager.source", "register") == "register":
        known["reward.reward_manager.name"] = REWARD_MANAGER
    for key, names in known.items():
        value = get(cfg, key)
        for name in value if isinstance(value, list) else [value]:
            if name is not None and name not in names:
                near = get_close_matches(str(name), map(str, names)) or map(str, names)
                refuse(key, name, "verl knows no such name", f"{key}={' or '.join(near)}")
    module, optimizer = get(cfg, f"{ACTOR}.optim.optimizer_impl", "torch.optim"), get(cfg, f"{ACTOR}.optim.optimizer")
    with suppress(ImportError):  # verl's own message names the module
        if not hasattr(import_module(module), str(optimizer)):
            refuse(f"{ACTOR}.optim.optimizer", optimizer, f"{module} has no such optimizer", "AdamW, or another of it")
    _refuse_unknown(CORRECTION, get(cfg, CORRECTION, {}), _names(RolloutCorrectionConfig))
    criteria, key = get(cfg, f"{CORRECTION}.rollout_rs"), f"{CORRECTION}.rollout_rs_threshold"
    if criteria is not None:
        try:  # on a token
            compute_rollout_rejection_mask(torch.zeros(1, 1), torch.ones(1, 1), criteria, get(cfg, key))
        except (ValueError, TypeError, ZeroDivisionError) as error:
            reason, remedy = f"with rollout_rs={criteria} verl says: {error}", f"{CORRECTION}.rollout_rs=null"
            refuse(key, get(cfg, key), reason, f"correction=geo_rs, or {remedy}")
    for node in (ACTOR, ROLLOUT, "algorithm"):
        _refuse_unknown(node, get(cfg, node, {}))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Disabled critic")  # as DAPO means it
            without_files = OmegaConf.merge(cfg, {"critic": {"model": None}})  # verl would open the critic's
            verls(without_files, use_reference_policy=need_reference_policy(cfg), use_critic=need_critic(cfg))
    except (AssertionError, ValueError, TypeError, KeyError, OmegaConfBaseException, HydraException) as error:
        raise ConfigError(f"verl refuses the configuration: {' '.join(str(error).split())}") from error


def _names(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _refuse_unknown(node: str, values: dict[str, Any], known: list[str] | None = None) -> None:
    """Keys that are not among those known, or that verl's class of the node, or of one below it, does not have."""
    from hydra.utils import get_class

    if target := values.get("_target_"):
        known = _names(get_class(target))
    for name, value in values.items():
        if isinstance(value, dict):
            _refuse_unknown(f"{node}.{name}", value)
        if known is not None and name not in (*known, "_target_"):
            near = " or ".join(get_close_matches(name, known)) or f"remove it; there are {listed(known, most=30)}"
            refuse(f"{node}.{name}", value, "verl knows no such key", RENAMED.get(name, near))


# ---- the table ----


class Rule(NamedTuple):
    """One key that has to pass one test, else it is refused: ``<key>=<value> is refused: <reason>. Remedy:
    <key>=<instead>.`` An absent key has the value None."""

    key: str
    test: Callable[[Any], bool]
    reason: str
    instead: str


def one_of(*accepted: Any) -> Callable[[Any], bool]:
    """Test for equality with one of the values."""
    return lambda value: value in accepted


def none_of(*refused: Any) -> Callable[[Any], bool]:
    """The opposite of ``one_of``."""
    return lambda value: value not in refused


def within(low: float, high: float) -> Callable[[Any], bool]:
    """Test for a number from ``low`` to ``high``."""
    return lambda value: type(value) in (int, float) and low <= value <= high


ROW_ESTIMATORS = ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized")
"""verl's estimators that use the mask for nothing but where a response's advantage stands."""


def rules(cfg: DictConfig) -> Iterator[Rule]:
    """The rules that hold for this configuration. Later ones compute with what earlier ones have let pass."""
    yield from _rules_of_backends(cfg)
    yield from _rules_of_numbers(cfg)
    yield from _rules_of_weights(cfg)
    yield from _rules_of_correction(cfg)
    yield from _rules_of_batches(cfg)


def _rules_of_backends(cfg: DictConfig) -> Iterator[Rule]:
    """Another trainer, rollout or hardware than meant, and settings that do not reach them."""
    for key, ours in (("trainer.v1.trainer_mode", ("flashrl", ASYNC)), (f"{ROLLOUT}.name", ("flashrl",))):
        reason = "another would run, without FlashRL's correction, receipts and bounds"
        yield Rule(key, one_of(*ours), reason, " or ".join(ours))
    modes, reason = ("auto", "disable", "resume_path"), "verl knows no such mode, and says so when all is loaded"
    yield Rule("trainer.resume_mode", one_of(*modes), reason, " or ".join(modes))
    yield Rule(
        PLATFORM,
        none_of("cpu") if on_gpu(cfg) else one_of("cpu"),
        f"workers take their hardware from it, and trainer.device={get(cfg, 'trainer.device')} is another",
        "cpu with hardware=cpu, null with hardware=cuda; before verl's own main_ppo VERL_PLATFORM=cpu",
    )
    if not on_gpu(cfg):
        for key, accepted in (
            (f"{ACTOR}.strategy", "fsdp2"),
            (f"{ROLLOUT}.enable_sleep_mode", False),
            ("flashrl.kv_cache", "auto"),
            (_ULYSSES[0], 1),
            (f"{ACTOR}.use_kl_loss", False),  # the reference policy's weights are pinned for a GPU
            ("algorithm.use_kl_in_reward", False),
        ):
            yield Rule(key, one_of(accepted), "it needs a GPU, and the run is on a CPU", words(accepted))
    copies = {f"{ROLLOUT}.custom.flashrl": "flashrl", f"{ACTOR}.policy_loss.rollout_correction": CORRECTION}
    for copy, source in copies.items():
        meant = get(cfg, source)
        reason = f"workers read this copy, and it differs from {source}={words(meant)}"
        yield Rule(copy, one_of(meant), reason, f"'${{{source}}}'")
    reason = "it asks the rollout's servers, which answer nobody (docs/clusters.md)"
    yield Rule(f"{ROLLOUT}.prometheus.enable", one_of(None, False), reason, "false")
    yield Rule("trainer.logger", lambda loggers: "rl_insight" not in (loggers or ()), reason, "[console]")
    yield from _rules_of_void_keys(cfg)
    for key in (ENGINE, _MIXED, _OVERLONG):
        yield Rule(key, lambda node: node is None or isinstance(node, dict), "it has keys of its own", "null")


def _rules_of_void_keys(cfg: DictConfig) -> Iterator[Rule]:
    """Settings that nothing reads, or that another one makes void."""
    yield Rule(f"{ROLLOUT}.repetition_penalty", one_of(None, 1.0), "verl's V1 trainer asks for 1.0", "1.0")
    greedy = f"{ROLLOUT}.val_kwargs.temperature"
    if get(cfg, greedy) == 0:
        reason = f"with {greedy}=0 every sample of a prompt is the same"
        yield Rule(f"{ROLLOUT}.val_kwargs.n", one_of(1), reason, f"1, or {greedy}=1.0")
        yield Rule(f"{ROLLOUT}.val_kwargs.do_sample", one_of(None, False), reason, f"false, or {greedy}=1.0")
    for switch, coefficient in (
        (f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef"),
        ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"),
    ):
        if get(cfg, switch):
            reason = f"{switch}=true would run the reference policy and change nothing"
            yield Rule(coefficient, none_of(0), reason, f"0.001, or {switch}=false")
    reason = "FSDP saves at once, and verl then writes no latest_checkpointed_iteration.txt to resume by"
    yield Rule(f"{ACTOR}.checkpoint.async_save", one_of(None, False), reason, "false")
    if get(cfg, "trainer.val_only"):
        yield Rule("trainer.val_before_train", one_of(True), "trainer.val_only=true validates there only", "true")
    if not has_critic(cfg):
        reason = "there is no critic, and for as many steps nothing would be trained"
        yield Rule("trainer.critic_warmup", one_of(None, 0), reason, "0")
    manager, source = (get(cfg, f"reward.reward_manager.{name}") for name in ("name", "source"))
    if source == "register" and manager != "dapo":
        reason = f"reward.reward_manager.name={manager} does not read it"
        yield Rule(f"{_OVERLONG}.enable", one_of(None, False), reason, "false, or reward.reward_manager.name=dapo")
    if (mode := get(cfg, "trainer.resume_mode")) != "resume_path":
        reason = f"trainer.resume_mode={mode} does not read it"
        yield Rule("trainer.resume_from_path", one_of(None), reason, "null, or trainer.resume_mode=resume_path")
    else:
        yield Rule("trainer.resume_from_path", none_of(None), "resume_mode needs it", "<run>/global_step_<n>")


def _rules_of_numbers(cfg: DictConfig) -> Iterator[Rule]:
    """What torch, vLLM and reward workers refuse when models have been loaded, and what is computed with below."""
    counts = ("trainer.nnodes", "trainer.n_gpus_per_node", "data.train_batch_size", _MINI_BATCH, *_ULYSSES)
    of_rollout = ("tensor_model_parallel_size", "n", "max_num_seqs", "prompt_length", "response_length")
    for key in (*counts, *(f"{ROLLOUT}.{name}" for name in of_rollout)):
        yield Rule(key, positive_integer, "it has to be a whole number", "1 or more")
    # null in verl's defaults, and so of no kind there
    key, reason = "trainer.total_training_steps", "it has to be a whole number"
    yield Rule(key, lambda v: v is None or positive_integer(v), reason, "1 or more, or null")
    for key in ("data.seed", "trainer.max_actor_ckpt_to_keep"):
        yield Rule(key, lambda v: v is None or type(v) is int, reason, "1, or null")
    yield Rule(f"{ACTOR}.optim.lr", within(0, 1e9), "a learning rate is a number from 0 on", "1.0e-6")
    reason = "it is a share of the steps"
    yield Rule(f"{ACTOR}.optim.lr_warmup_steps_ratio", lambda v: v is None or within(0, 1)(v), reason, "0.0")
    key, schedules = f"{ACTOR}.optim.lr_scheduler_type", ("constant", "cosine")
    yield Rule(key, one_of(None, *schedules), "verl knows no other", " or ".join(schedules))
    reason = "verl takes its mean over a micro-batch, so that the gradient grows with their number"
    yield Rule(_LOSS_MODE, none_of("geo_mean"), reason, "gspo or vanilla")
    if get(cfg, key := f"{ACTOR}.loss_agg_mode") == "seq-mean-token-sum-norm":
        reason = f"with {key}=seq-mean-token-sum-norm verl divides by the longest response of a micro-batch"
        yield Rule(f"{ACTOR}.loss_scale_factor", none_of(None), reason, "<data.max_response_length>")
    key, parts = f"{ACTOR}.checkpoint.save_contents", {"model", "optimizer", "extra", "hf_model"}
    reason = f"checkpoints hold {', '.join(sorted(parts))}"
    yield Rule(key, lambda names: names is None or {*names} <= parts, reason, "[model,optimizer,extra]")
    yield Rule(f"{ROLLOUT}.gpu_memory_utilization", within(0.01, 1), "it is a share of a GPU's memory", "0.8")
    reason = "vLLM takes 0.01 for less, and the trainer divides its logits by it"
    yield Rule(f"{ROLLOUT}.temperature", within(0.01, 1e9), reason, "1.0")
    in_groups = get(cfg, "algorithm.filter_groups.enable") or get(cfg, "algorithm.adv_estimator") in ROW_ESTIMATORS
    if in_groups and not get(cfg, "trainer.val_only"):
        yield Rule(f"{ROLLOUT}.n", none_of(1), "a group of one is never filtered, and has no baseline", "16")
        reason = "V1 looks for it among what the reward returns"
        yield Rule("algorithm.filter_groups.metric", none_of("seq_reward", "seq_final_reward"), reason, "acc or reward")
    prompt, response = (get(cfg, f"{ROLLOUT}.{name}") for name in ("prompt_length", "response_length"))
    longest = prompt + response
    if get(cfg, f"{ROLLOUT}.max_model_len") is not None:
        reason = f"prompts of {prompt} and responses of {response} tokens would be cut in silence"
        yield Rule(f"{ROLLOUT}.max_model_len", within(longest, math.inf), reason, f"{longest}, or null")
    if get(cfg, f"{_OVERLONG}.enable"):
        reason = f"it is the end of a response's {response} tokens, in which the penalty grows"
        instead = f"1 to {response - 1}, or {_OVERLONG}.enable=false"
        yield Rule(f"{_OVERLONG}.len", within(1, response - 1), reason, instead)


def _rules_of_weights(cfg: DictConfig) -> Iterator[Rule]:
    """Number formats that contradict ours, and weights that would not arrive whole, or not be checked."""
    dtypes, formats = ("bfloat16", "float16", "half"), ("dummy", "auto", "safetensors")
    yield Rule(f"{ROLLOUT}.dtype", one_of(*dtypes), "weights are sent and quantized in it", " or ".join(dtypes))
    if get(cfg, "flashrl.kv_cache") not in (None, "auto"):
        reason = "equalized keys give queries their scale, which leaves float16's range"
        yield Rule(f"{ROLLOUT}.dtype", one_of("bfloat16"), reason, "bfloat16, or flashrl.kv_cache=auto")
    reason = "weights are quantized by vLLM's ordinary loaders, which this one bypasses"
    yield Rule(f"{ROLLOUT}.load_format", one_of(*formats), reason, " or ".join(formats))
    actors, reason = ("fsdp", "fsdp2"), "weight updates have been run with FSDP actors only"
    yield Rule(f"{ACTOR}.strategy", one_of(*actors), reason, "fsdp2")
    reason = "the rollout reads flashrl.precision only"
    yield Rule(f"{ROLLOUT}.quantization", one_of(None), reason, "null")
    yield Rule(f"{ROLLOUT}.qat.enable", one_of(None, False), reason, f"false, by {ACTOR}.fsdp_config.qat.enable=false")
    for name in ("pipeline_model_parallel_size", "data_parallel_size", "expert_parallel_size"):
        reason = f"weight updates and receipts know {_TENSOR_PARALLEL} only"
        yield Rule(f"{ROLLOUT}.{name}", one_of(1), reason, "1")
    drafter, reason = f"{MODEL_NODE}.mtp.enable_rollout", "the drafter's weights are not part of the checked update"
    yield Rule(f"{ROLLOUT}.mtp.enable_rollout", one_of(None, False), reason, f"false, by {drafter}=false")
    reason = "verl replays routes in Megatron's and VeOmni's actors only"
    yield Rule(f"{ROLLOUT}.enable_rollout_routing_replay", one_of(None, False), reason, "false")
    if not get(cfg, merge := f"{MODEL_NODE}.lora.merge"):
        for name in ("lora.rank", "lora_rank"):
            reason = "an adapter would be sent, and only whole weights are quantized"
            yield Rule(f"{MODEL_NODE}.{name}", one_of(None, 0), reason, f"0, or {merge}=True")
    if not get(cfg, rank := f"{MODEL_NODE}.lora_rank"):
        yield Rule(f"{MODEL_NODE}.lora_adapter_path", one_of(None), f"without {rank} verl loads none", "null")
    if not get(cfg, pool := "reward.reward_model.enable_resource_pool"):
        reason = "on the training GPUs it makes verl send weights amid validation, which nobody verifies"
        yield Rule("reward.reward_model.enable", one_of(None, False), reason, f"false, or {pool}=true")
    # verl's Ulysses changes flash attention alone (models/transformers/monkey_patch.py); ours does it itself.
    of_critic = "critic.fsdp.ulysses_sequence_parallel_size"
    critics = "critic.model.override_config.attn_implementation"
    for attention, implementations, keys in (
        (ATTENTION, (FLASH, VARLEN), (*_ULYSSES, "actor_rollout_ref.ref.ulysses_sequence_parallel_size")),
        (critics, (FLASH,), (of_critic,) if has_critic(cfg) else ()),
    ):
        if parallel := [key for key in keys if get(cfg, key, 1) not in (0, 1)]:
            reason = "with sequence parallelism each GPU would attend to its own part of a sequence"
            instead = f"{' or '.join(implementations)}, or {parallel[0]}=1"
            yield Rule(attention, one_of(None, *implementations), reason, instead)
    if get(cfg, "distillation.enabled"):
        for name in get(cfg, "distillation.teacher_models", {}):
            reason = "the teacher's weights would be quantized, which nothing checks"
            yield Rule(f"distillation.teacher_models.{name}.inference.name", none_of("flashrl"), reason, "vllm")
    if get(cfg, f"{MODEL_NODE}.use_remove_padding", True):
        reason = "transformers hands it a packed row's longest length as a tensor, which it does not take"
        yield Rule(ATTENTION, none_of("flash_attention_4"), reason, f"{VARLEN}, which takes FlashAttention 4")
    fp32 = get(cfg, "flashrl.fp32_lm_head")
    if fp32 or get(cfg, f"{ACTOR}.strategy") == "fsdp2":
        reason = "they multiply by lm_head's weight themselves, under FSDP2 by a shard, and never in FP32"
        yield Rule(f"{MODEL_NODE}.use_fused_kernels", one_of(None, False), reason, "false")
    names = {"None": "bfloat16", "bf16": "bfloat16", **dict.fromkeys(("fp16", "16", "half"), "float16")}
    keys = f"{ROLLOUT}.dtype", f"{_MIXED}.param_dtype"
    rollout, trainer = (names.get(dtype := str(get(cfg, key)), dtype) for key in keys)
    if "float16" in (rollout, trainer):  # k3 KL 0.05 after one update: docs/LOG.md
        key, other = (keys[0], trainer) if rollout == "float16" else (keys[1], rollout)
        reason = f"rollout and trainer would have other weights: it is {other} on the other side"
        yield Rule(key, lambda _: trainer == rollout, reason, f"{other}, or both float16 (+{keys[1]}=fp16)")
    elif fp32:
        reason = f"flashrl.fp32_lm_head needs the same operands on both sides, and {keys[0]} is {rollout}"
        yield Rule(keys[1], lambda _: trainer == rollout, reason, f"{rollout}, or flashrl.fp32_lm_head=false")


def _rules_of_correction(cfg: DictConfig) -> Iterator[Rule]:
    """A correction of which something would be ignored, or that is computed from the wrong log-probs."""
    correction = get(cfg, CORRECTION, {})
    weights, rejects, bypass = (correction.get(name) for name in ("rollout_is", "rollout_rs", "bypass_mode"))
    if get(cfg, "trainer.v1.trainer_mode") == ASYNC:
        key, reason = "trainer.v1.sampler.max_off_policy_threshold", "without it trajectories may be of any age"
        yield Rule(key, positive_integer, reason, "8")
        for name in ("rollout_is", "rollout_rs"):
            yield Rule(
                f"{CORRECTION}.{name}",
                lambda value: not value or all(part.strip().startswith("token") for part in str(value).split(",")),
                "it takes a sequence's ratio, and an asynchronous one is of several versions of the policy",
                "null, or correction=tis",
            )
    for name, unused, needed in (
        ("loss_type", "ppo_clip", "bypass_mode"),
        ("rollout_rs_threshold", None, "rollout_rs"),
        ("rollout_is_batch_normalize", False, "rollout_is"),
    ):
        if not correction.get(needed):
            reason = f"without {CORRECTION}.{needed} it has no effect"
            yield Rule(f"{CORRECTION}.{name}", one_of(None, unused), reason, words(unused))
    # V1 puts the rollout's log-probs for the old ones, and leaves the loss that knows of it to the user.
    yield Rule(
        _LOSS_MODE,
        one_of("bypass_mode") if bypass else none_of("bypass_mode"),
        f"loss_mode=bypass_mode and {CORRECTION}.bypass_mode=true need each other",
        "bypass_mode, or correction=bypass" if bypass else "vanilla, or correction=bypass",
    )
    losses = ("ppo_clip", "reinforce")
    yield Rule(f"{CORRECTION}.loss_type", one_of(None, *losses), "verl knows no such loss", " or ".join(losses))
    if bypass and correction.get("loss_type") != "reinforce":
        reason = "in bypass mode PPO's clipped ratio corrects, and weights are for verl's metrics only"
        yield Rule(f"{CORRECTION}.rollout_is", one_of(None), reason, f"null, or {CORRECTION}.loss_type=reinforce")
    elif bypass:
        reason = "with loss_type=reinforce nothing else corrects"
        yield Rule(f"{CORRECTION}.rollout_is", none_of(None), reason, f"token, or {CORRECTION}.loss_type=ppo_clip")
        for name, test, instead in (
            ("rollout_is_batch_normalize", one_of(None, False), "false"),
            ("rollout_is_threshold", lambda bounds: "_" not in str(bounds), "2.0"),
        ):
            reason = "in bypass mode verl divides by the weights of a micro-batch, few or all of them zero"
            yield Rule(f"{CORRECTION}.{name}", test, reason, f"{instead}, or a correction without bypass")
    elif weights or rejects:
        yield Rule(
            "algorithm.adv_estimator",
            one_of(*ROW_ESTIMATORS) if rejects else none_of("optimal_token_baseline", "tir_optimal_token_baseline"),
            "its advantages depend on weights or rejected tokens, which only the actors know",
            " or ".join(ROW_ESTIMATORS),
        )
    # Without a correction they are compared all the same, for the mismatch and its guard.
    if weights or rejects or bypass or get(cfg, f"{ROLLOUT}.calculate_log_probs"):
        for name, test, instead in (
            ("calculate_log_probs", one_of(True), "true"),
            ("logprobs_mode", one_of("processed_logprobs"), "processed_logprobs"),
            ("top_p", one_of(1), "1.0"),
            ("top_k", one_of(-1, 0), "-1"),
        ):
            reason = "ratios are to the sampler's probabilities, of all tokens and after the temperature"
            without = f"correction=none {ROLLOUT}.calculate_log_probs=false"
            yield Rule(f"{ROLLOUT}.{name}", test, reason, f"{instead}, or {without}")


def _rules_of_batches(cfg: DictConfig) -> Iterator[Rule]:
    """GPUs and samples that cannot be shared out. verl asserts most of it after the first rollout."""
    ranks = _ranks(cfg)
    ulysses = max(_ULYSSES, key=lambda key: get(cfg, key))
    for key in (_TENSOR_PARALLEL, ulysses):
        reason = f"{ranks} GPUs cannot be cut into groups of that many"
        yield Rule(key, lambda size: ranks % size == 0, reason, f"<a divisor of {ranks}>")
    heads = model_config(cfg).get("num_attention_heads")
    if isinstance(heads, int):
        reason = f"the model's {heads} attention heads cannot be shared by that many GPUs"
        fits = str(math.gcd(heads, get(cfg, _TENSOR_PARALLEL)))
        yield Rule(_TENSOR_PARALLEL, lambda size: heads % size == 0, reason, fits)
    prompts, mini_batch, samples = (get(cfg, key) for key in ("data.train_batch_size", _MINI_BATCH, f"{ROLLOUT}.n"))
    if get(cfg, f"{CORRECTION}.bypass_mode") or get(cfg, f"{ACTOR}.loss_agg_mode", "").startswith("seq-mean"):
        reason = "verl fills the last one up with empty rows, which seq-mean counts, and bypass mode's loss fails on"
        yield Rule(_MINI_BATCH, lambda size: prompts % size == 0, reason, f"<a divisor of {prompts}>")
    data_parallel = ranks // get(cfg, ulysses)
    longest = get(cfg, f"{ROLLOUT}.prompt_length") + get(cfg, f"{ROLLOUT}.response_length")
    for key, dynamic in (
        (f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ACTOR}.use_dynamic_bsz"),
        (f"{ROLLOUT}.log_prob_max_token_len_per_gpu", f"{ROLLOUT}.log_prob_use_dynamic_bsz"),
    ):
        if get(cfg, dynamic):
            least, size = -(-longest // get(cfg, ulysses)), get(cfg, key)
            reason = f"a longest sequence has {longest} tokens, and the step that samples one would end the run"
            yield Rule(key, lambda size: size is None or size >= least, reason, f"<{least} or more>")  # noqa: B023
    reason = f"times {ROLLOUT}.n={samples} it cannot be shared evenly by {data_parallel} ranks"
    multiple = f"<a multiple of {data_parallel // math.gcd(data_parallel, samples)}>"
    yield Rule(_MINI_BATCH, lambda size: size * samples % data_parallel == 0, reason, multiple)
    whole = math.lcm(data_parallel, mini_batch * samples)  # to a multiple of which verl fills the batch up
    batch = -(-prompts * samples // whole) * whole
    for key, dynamic, sequences in (
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.use_dynamic_bsz", mini_batch * samples),
        (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", f"{ROLLOUT}.log_prob_use_dynamic_bsz", batch),
    ):
        size, share = get(cfg, key), sequences // data_parallel
        if size and not get(cfg, dynamic):
            reason = f"{share} sequences a rank cannot be cut into micro-batches of that many"
            yield Rule(key, one_of(math.gcd(size, share)), reason, f"<a divisor of {share}>, or {dynamic}=true")


def on_gpu(cfg: DictConfig) -> bool:
    """Whether workers run on GPUs."""
    return get(cfg, "trainer.device") != "cpu"


def _ranks(cfg: DictConfig) -> int:
    return get(cfg, "trainer.nnodes") * get(cfg, "trainer.n_gpus_per_node")


def _check_groups(cfg: DictConfig) -> None:
    """A misspelt group with a ``+`` is a key that nothing reads, and the run has the default."""
    for key in map(str, cfg):
        if near := get_close_matches(key, GROUPS, n=1, cutoff=0.83):  # one wrong letter in six
            meant = f"{near[0]}={words(get(cfg, key))}"
            refuse(key, get(cfg, key), "nothing reads it", f"{meant} without a +, or another name for the key")
        if key in ("model", "actor", "rollout", "ref", "worker", "optim"):
            refuse(key, get(cfg, key), "nothing reads it", "the key below actor_rollout_ref, or another name for it")


_VOID = {
    **{
        f"{node}.": f"its namesake below reward.{node}"
        for node in ("custom_reward_function", "reward_model", "sandbox_fusion")
    },
    f"{ACTOR}.grad_clip": f"{ACTOR}.optim.clip_grad",
    f"{ACTOR}.freeze_vision_tower": None,
    "critic.grad_clip": "critic.optim.clip_grad",
    "critic.ulysses_sequence_parallel_size": "critic.fsdp.ulysses_sequence_parallel_size",
    "actor_rollout_ref.nccl_timeout": None,
    f"{ROLLOUT}.do_sample": f"{ROLLOUT}.temperature",
    f"{ROLLOUT}.over_sample_rate": None,
    f"{ROLLOUT}.multi_stage_wake_up": None,
    f"{ROLLOUT}.multi_turn.num_repeat_rollouts": f"{ROLLOUT}.n",
    "algorithm.use_pf_ppo": None,
    "data.return_raw_input_ids": None,
    "algorithm.filter_groups.max_num_gen_batches": "flashrl.max_num_gen_batches",
    "data.reward_fn_key": None,
    "trainer.balance_batch": None,
    "trainer.esi_redundant_time": None,
}
"""Keys that verl 0.9.1's V1 trainer does not read (a dot at the end: all below), and the key to set instead. Found by
searching the modules that a run imports for each key's name."""


def _check_defaults(cfg: DictConfig) -> None:
    """What differs from verl's default where nothing reads it, or in its kind: `flase` is true, and a text fails where
    it is computed with."""
    defaults = verl_defaults()
    _refuse_unknown("trainer", get(cfg, "trainer", {}), [*defaults["trainer"]])
    for key, default in leaves(defaults).items():
        value, is_switch = get(cfg, key), isinstance(default, bool)
        if value not in (None, default) and (void := [name for name in _VOID if key.startswith(name)]):
            instead = f", and set {meant}" if (meant := _VOID[void[0]]) else ""
            refuse(key, value, "verl's V1 trainer does not read it", f"{key}={words(default)}{instead}")
        if type(default) in (bool, int, float) and not key.startswith(f"{CORRECTION}."):
            if isinstance(value, str) or (is_switch and type(value) not in (bool, type(None))):
                kind = "true or false" if is_switch else "a number"
                remedy = f"{key}={words(default)}, verl's default (your experiment's may differ)"
                refuse(key, value, f"it has to be {kind}", remedy)


# ---- vLLM's own arguments ----

_NGRAM = {"method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"}
_TWINS = ("dtype", "load_format", "logprobs_mode", "max_model_len", "enable_sleep_mode")
_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel")
_SCALES = ("kv_cache_dtype", "calculate_kv_scales", "kv_cache_dtype_skip_layers")
_RESERVED = {
    **{name: f"set {ROLLOUT}.{name}, which is checked" for name in _TWINS},
    **dict.fromkeys(_SIZES, f"set {_TENSOR_PARALLEL}, the one that FlashRL knows"),
    **dict.fromkeys(("quantization", "q", "quantization_config", "hf_overrides"), "set flashrl.precision"),
    **dict.fromkeys(_SCALES, "set flashrl.kv_cache, whose scales follow the policy"),
    **dict.fromkeys(("worker_extension_cls", "enable_lora"), "FlashRL could not check the weights that arrive"),
    # The last: vLLM 0.31 then samples past verl's mask of tokens that the tokenizer does not have.
    **dict.fromkeys(
        ("override_generation_config", "logits_processors", "enable_batch_sharded_sampling"),
        "samples would be of another policy",
    ),
    **dict.fromkeys(
        ("speculative_config", "spec_method", "spec_model", "spec_tokens"),
        "drafts have to be n-grams, on GPUs and with flashrl.kv_cache=auto: "
        f"+{ENGINE}.speculative_config={{method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 3}}",
    ),
    **dict.fromkeys(
        ("kv_transfer_config", "kv_offloading_backend"),
        "not every store of keys and values can be emptied, and those of older weights would be read after an update",
    ),
    "api_key": "verl prints it into the log, and the rollout's servers answer nobody",
    "ssl": "verl's server would not use it, and stay unencrypted (docs/clusters.md)",
    "config": "arguments in a further file cannot be checked",
}
"""Arguments that FlashRL sets, or that change which policy samples, to the reason. max_logprobs is not one: only the
sampled token's log-prob is asked for, and every value allows that."""


def _check_engine_arguments(cfg: DictConfig) -> None:
    """verl's server builds {its own arguments, **engine_kwargs}: what stands there wins without a word."""
    for name, value in get(cfg, ENGINE, {}).items():
        if value is None:  # verl drops these before it builds the command line
            continue
        # vLLM takes both spellings, dots into a dict, and "no" before a switch.
        argument = str(name).replace("-", "_").split(".")[0].removeprefix("no_")
        argument = "ssl" if "ssl" in argument.split("_") else argument  # all about certificates
        # Its parser takes beginnings too.
        argument = next((known for known in _RESERVED if known.startswith(argument)), argument)
        # Nothing else of it: rejection_sample_method, for one, changes what is sampled.
        ngram = argument == "speculative_config" and isinstance(value, dict) and value.get("method") == "ngram"
        ngram = ngram and value.keys() <= _NGRAM
        if ngram and on_gpu(cfg) and get(cfg, "flashrl.kv_cache", "auto") == "auto":
            continue
        if argument in _RESERVED:
            reason = f"verl puts engine_kwargs last, so this wins; {_RESERVED[argument]}"
            refuse(f"{ENGINE}.{name}", value, reason, f"remove {ENGINE}.{name}")
