# SPDX-License-Identifier: Apache-2.0
"""What is sampled, checked: the correction holds only for the policy whose log-probs the engine records."""

from omegaconf import DictConfig

from flashrl_verl.correction_settings import CorrectionSettings, LossType
from flashrl_verl.rules import ACTOR, CORRECTION, ROLLOUT, Rule, apply, get, one_of, refuse, words

ENGINE = f"{ROLLOUT}.engine_kwargs.vllm"


def check_correction(cfg: DictConfig) -> None:
    """Refuse a correction that cannot work, and sampling from anything but the whole policy.

    Args:
        cfg: verl's composed configuration.

    Raises:
        ConfigError: The correction contradicts itself or the sampler.
    """
    settings = CorrectionSettings.from_config(get(cfg, CORRECTION, {}))
    _check_without_effect(cfg, settings)
    if settings.bypass:
        _check_bypass(cfg, settings)
    elif get(cfg, f"{ACTOR}.policy_loss.loss_mode") == "bypass_mode":
        refuse(
            f"{ACTOR}.policy_loss.loss_mode",
            "bypass_mode",
            f"this loss takes old log-probs for the rollout's, which they are only with {CORRECTION}.bypass_mode=true",
            f"{ACTOR}.policy_loss.loss_mode=vanilla, or correction=bypass",
        )
    else:
        _check_estimator(cfg, settings)
    apply(cfg, _TRAINING_ROLLOUT)
    # correction=metrics_only is the one that keeps a threshold without weights (correction=none has neither): its KL is a
    # statement about quantization only when the sampler's policy is otherwise the trainer's.
    corrects = settings.level or settings.rejections or settings.bypass
    if corrects or get(cfg, f"{CORRECTION}.rollout_is_threshold") is not None:
        apply(cfg, _SAMPLED_POLICY)


def _check_without_effect(cfg: DictConfig, settings: CorrectionSettings) -> None:
    """Refuse what would be ignored: whoever sets it expects something of it."""
    without_effect = (
        ("loss_type", "ppo_clip", settings.bypass, "bypass_mode", "correction=bypass"),
        ("rollout_rs_threshold", None, settings.rejections, "rollout_rs", "correction=geo_rs"),
        ("rollout_is_batch_normalize", False, settings.level, "rollout_is", "correction=tis"),
    )
    for name, default, used, needs, preset in without_effect:
        value = get(cfg, f"{CORRECTION}.{name}", default)
        if value != default and not used:
            reason = f"without {CORRECTION}.{needs} it has no effect"
            refuse(f"{CORRECTION}.{name}", value, reason, f"{CORRECTION}.{name}={words(default)}, or {preset} with it")


def _check_bypass(cfg: DictConfig, settings: CorrectionSettings) -> None:
    """V1 takes the rollout's log-probs for the old ones, but leaves the loss that knows of it to the user."""
    mode = get(cfg, f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    if mode != "bypass_mode":
        refuse(
            f"{CORRECTION}.bypass_mode",
            True,
            f"{ACTOR}.policy_loss.loss_mode={mode} takes old log-probs for the trainer's, and neither weights nor rejects",
            f"correction=bypass, which sets {ACTOR}.policy_loss.loss_mode=bypass_mode and takes the weights away",
        )
    prompts, mini_batch = (get(cfg, key) for key in ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"))
    if isinstance(prompts, int) and isinstance(mini_batch, int) and mini_batch > 0 and prompts % mini_batch:
        refuse(
            f"{ACTOR}.ppo_mini_batch_size",
            mini_batch,
            f"it does not divide data.train_batch_size={prompts}: verl fills up with rows without a token, where its loss of "
            "bypass mode fails",
            f"{ACTOR}.ppo_mini_batch_size that divides data.train_batch_size, or a preset without bypass (correction=tis)",
        )
    level, loss = get(cfg, f"{CORRECTION}.rollout_is"), f"{CORRECTION}.loss_type"
    if settings.bypass is LossType.PPO_CLIP and settings.level:
        refuse(
            f"{CORRECTION}.rollout_is",
            level,
            "in bypass mode PPO's clipped ratio corrects, and verl computes these weights for its metrics only",
            f"correction=bypass, {CORRECTION}.rollout_is=null, or {loss}=reinforce",
        )
    if settings.bypass is LossType.REINFORCE and not settings.level:
        refuse(
            loss,
            "reinforce",
            f"this loss has neither ratio nor clip: without {CORRECTION}.rollout_is nothing corrects",
            f"{CORRECTION}.rollout_is=token with {CORRECTION}.rollout_is_threshold=2.0, or {loss}=ppo_clip",
        )
    if settings.batch_normalize:
        refuse(
            f"{CORRECTION}.rollout_is_batch_normalize",
            True,
            "in bypass mode verl divides by the mean of a micro-batch, so that the gradient would depend on its size",
            f"{CORRECTION}.rollout_is_batch_normalize=false, or a preset without bypass (correction=tis)",
        )
    if settings.lower is not None:
        refuse(
            f"{CORRECTION}.rollout_is_threshold",
            settings.threshold,
            "in bypass mode verl divides by zero when every weight of a micro-batch falls outside these bounds",
            f"{CORRECTION}.rollout_is_threshold=2.0, or a preset without bypass (correction=icepop)",
        )


def _check_estimator(cfg: DictConfig, settings: CorrectionSettings) -> None:
    """The driver computes advantages before the actors know weights and rejections; verl's driver knows them."""
    key = "algorithm.adv_estimator"
    estimator = get(cfg, key, "gae")
    if settings.level and estimator in _WEIGHTED_ESTIMATORS:
        refuse(key, estimator, "its baseline is made of the importance weights, which only the actors compute", f"{key}=grpo")
    if settings.rejections and estimator not in _ROW_ESTIMATORS:
        refuse(
            key,
            estimator,
            f"its advantages depend on which tokens {CORRECTION}.rollout_rs rejects, which only the actors know",
            f"{key}=grpo (or {', '.join(_ROW_ESTIMATORS[1:])}), or {CORRECTION}.rollout_rs=null",
        )


_WEIGHTED_ESTIMATORS = ("optimal_token_baseline", "tir_optimal_token_baseline")
_ROW_ESTIMATORS = ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized")
"""verl's estimators that use the mask for nothing but where a response's advantage stands."""

_TRAINING_ROLLOUT = (
    Rule(
        f"{ROLLOUT}.temperature",
        lambda value: isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"),
        "greedy samples of a prompt are all the same, so every group is constant and has no advantage, and the trainer divides "
        "its logits by the temperature",
        f"{ROLLOUT}.temperature=1.0; validation has its own, {ROLLOUT}.val_kwargs.temperature",
        1.0,
    ),
)

_RATIO = "correction and mismatch metrics divide the trainer's probability by the sampler's"
_SAMPLED_POLICY = (
    Rule(
        f"{ROLLOUT}.calculate_log_probs",
        one_of(True),
        f"{_RATIO}, and without the sampler's log-probs there is nothing to divide by",
        f"{ROLLOUT}.calculate_log_probs=true, or correction=none",
        False,
    ),
    Rule(
        f"{ROLLOUT}.logprobs_mode",
        one_of("processed_logprobs"),
        f"{_RATIO}; raw log-probs leave out the temperature and are not those of the policy that sampled",
        f"{ROLLOUT}.logprobs_mode=processed_logprobs",
        "processed_logprobs",
    ),
    Rule(
        f"{ROLLOUT}.top_p",
        one_of(1, 1.0),
        f"{_RATIO}, and a nucleus renormalizes only the sampler's",
        f"{ROLLOUT}.top_p=1.0, or correction=none",
        1.0,
    ),
    Rule(
        f"{ROLLOUT}.top_k",
        one_of(-1, 0),
        f"{_RATIO}, and top-k renormalizes only the sampler's",
        f"{ROLLOUT}.top_k=-1 (off), or correction=none",
        -1,
    ),
    Rule(
        # Not a field of verl's RolloutConfig; a user who adds it means it.
        f"{ROLLOUT}.min_p",
        one_of(0, 0.0, None),
        f"{_RATIO}, and min-p renormalizes only the sampler's",
        f"remove {ROLLOUT}.min_p, or correction=none",
    ),
    Rule(
        # V1's agent loop sends 1.0 whatever this key says: a user who sets it gets no penalty and no warning.
        f"{ROLLOUT}.repetition_penalty",
        one_of(1, 1.0),
        f"{_RATIO}, and a repetition penalty changes only the sampler's",
        f"{ROLLOUT}.repetition_penalty=1.0",
        1.0,
    ),
)


# verl's server builds {its own arguments, **engine_kwargs}: what stands in engine_kwargs wins without a word.
# Arguments that have a key of their own in the rollout's configuration may be repeated, not contradicted.
_TWINS = {
    "dtype": "dtype",
    "load_format": "load_format",
    "logprobs_mode": "logprobs_mode",
    "scheduling_policy": "scheduling_policy",
    "enable_sleep_mode": "enable_sleep_mode",
    "tensor_parallel_size": "tensor_model_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    "data_parallel_size": "data_parallel_size",
}
# Arguments that FlashRL sets, or that change which policy samples: name -> (reason, what to use instead).
# max_logprobs is not one: only the sampled token's log-prob is asked for, and every value allows that.
_OWNED = {
    "quantization": ("it replaces FlashRL's quantization", "flashrl.precision=int8, fp8, fp8_block or bf16"),
    "q": (
        "it is vLLM's short name for quantization and replaces FlashRL's",
        "flashrl.precision=int8, fp8, fp8_block or bf16",
    ),
    "quantization_config": ("it replaces FlashRL's quantization", "flashrl.precision=int8, fp8, fp8_block or bf16"),
    "hf_overrides": (
        "FlashRL's settings travel in hf_overrides.quantization_config, and vLLM takes only one hf_overrides",
        "flashrl.precision for the precision, config.json of the model for anything else",
    ),
    "kv_cache_dtype": ("nothing would make its scales follow the policy", "flashrl.kv_cache=auto, fp8 or int8_per_token_head"),
    "calculate_kv_scales": ("its scales are those of the first batch, whatever the policy becomes", "flashrl.kv_cache=fp8"),
    "kv_cache_dtype_skip_layers": ("flashrl.kv_cache would be half true", "flashrl.kv_cache for all layers"),
    "enable_expert_parallel": ("neither the loader nor the receipts of FlashRL know which experts a rank would hold", None),
    "worker_extension_cls": ("FlashRL's own extension receives and checks the weights", None),
    "override_generation_config": (
        "verl fills it from the rollout's own keys",
        f"{ROLLOUT}.temperature, top_p and top_k",
    ),
    "logits_processors": (
        "they change the policy that samples, not the trainer's, and the ratio is wrong",
        None,
    ),
    "speculative_config": ("the drafter's weights are not part of the checked weight update", None),
    "enable_lora": ("adapters are not quantized", "actor_rollout_ref.model.lora.merge=True"),
    "api_key": ("verl prints it into the run's log, and a server of FlashRL's has a random key of its own", None),
    "config": ("the arguments in a further file cannot be checked", f"{ENGINE}.<argument>"),
}


def check_engine_arguments(cfg: DictConfig) -> None:
    """Refuse engine_kwargs that contradict FlashRL or the rollout's own keys.

    Args:
        cfg: verl's composed configuration.

    Raises:
        ConfigError: An argument is FlashRL's to set, or differs from the key it repeats.
    """
    for name, value in get(cfg, ENGINE, {}).items():
        if value is None:  # verl drops these before it builds the command line
            continue
        key = f"{ENGINE}.{name}"
        argument = str(name).replace("-", "_").split(".")[0]  # vLLM takes both spellings, and dots into a dict
        if argument in _OWNED:
            reason, instead = _OWNED[argument]
            use = f", and use {instead}" if instead else ""
            refuse(key, value, f"verl puts engine_kwargs last, so this wins; {reason}", f"remove {key}{use}")
        if "ssl" in argument.split("_"):  # all of vLLM's arguments about certificates
            use = f"remove {key}; flashrl.server_address=loopback keeps HTTP on its machine (docs/security.md)"
            refuse(key, value, "verl starts vLLM's server without it, so that its HTTP would not be encrypted", use)
        twin = f"{ROLLOUT}.{_TWINS[argument]}" if argument in _TWINS else None
        if twin and value != get(cfg, twin, value):
            refuse(
                key,
                value,
                f"verl puts engine_kwargs last, so {twin}={words(get(cfg, twin))} would be ignored",
                f"remove {key} and set {twin}",
            )
