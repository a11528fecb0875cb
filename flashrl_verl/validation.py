# SPDX-License-Identifier: Apache-2.0
"""The composed configuration, checked before anything is loaded: value, reason and the Hydra key to change.

verl 0.9.1 tests the rollout's name for these; one called flashrl slips past, so they are tested again here:
    workers/config/rollout.py       pipeline_model_parallel_size > 1 is refused for vllm
    workers/config/rollout.py, workers/rollout/replica.py       disaggregation is for sglang and vllm
    workers/rollout/llm_server.py   request priorities go to vllm only; any other name loses them silently
    checkpoint_engine/base.py       delta_sharded is for sglang and vllm (here: naive only)
    utils/config.py                 the LoRA rank is checked for vllm only
Another engine's name is tested in experimental/reward_loop (the reward model's) and in
workers/config/distillation.py (the teacher's); tests for sglang and trtllm do not concern us.
"""

from omegaconf import DictConfig, OmegaConf

from flashrl_verl.config import FlashRLConfig, KVCache
from flashrl_verl.errors import ConfigError
from flashrl_verl.rules import ACTOR, CORRECTION, ROLLOUT, Rule, apply, get, one_of, positive_integer, refuse, words
from flashrl_verl.unknown_keys import check_groups
from flashrl_verl.validation_head import check_head
from flashrl_verl.validation_model import check_model
from flashrl_verl.validation_sampling import check_correction, check_engine_arguments
from flashrl_verl.validation_servers import check_servers

PLATFORM = "ray_kwargs.ray_init.runtime_env.env_vars.VERL_PLATFORM"


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
    check_groups(cfg)
    settings = FlashRLConfig.from_mapping(node)
    apply(cfg, _BACKEND)
    _check_copies(cfg)
    _check_lora(cfg)
    check_correction(cfg)
    check_engine_arguments(cfg)
    if settings.fp32_lm_head:
        check_head(cfg)
    _check_hardware(cfg, settings)
    check_servers(cfg, settings)
    check_model(cfg, settings)
    _check_micro_batches(cfg)
    return settings


_BACKEND = (
    Rule(
        "trainer.use_v1",
        one_of(True),
        "FlashRL's trainer builds on verl's V1 trainer; V0 is deprecated and would run without it",
        "trainer.use_v1=true",
    ),
    Rule(
        "trainer.v1.trainer_mode",
        one_of("flashrl"),
        "there is a flashrl node, but another trainer would run, without its correction, receipts and bounds",
        "trainer.v1.trainer_mode=flashrl, or leave FlashRL's experiment out",
    ),
    Rule(
        f"{ROLLOUT}.name",
        one_of("flashrl"),
        "there is a flashrl node, but another backend would sample, with unchecked weight updates",
        f"{ROLLOUT}.name=flashrl, or leave FlashRL's experiment out",
    ),
    Rule(
        "actor_rollout_ref.hybrid_engine",
        one_of(True),
        "the synchronous trainer samples on the training GPUs",
        "actor_rollout_ref.hybrid_engine=true",
        True,
    ),
    Rule(
        f"{ROLLOUT}.dtype",
        one_of("bfloat16", "float16"),
        "weights are sent in this type and quantized from it, and vLLM's INT8 kernels write no other",
        f"{ROLLOUT}.dtype=bfloat16 or float16",
        "bfloat16",
    ),
    Rule(
        f"{ROLLOUT}.load_format",
        one_of("dummy", "auto", "safetensors"),
        "codes are made by vLLM's ordinary weight loaders, which this format goes round",
        f"{ROLLOUT}.load_format=dummy (weights arrive with the first update), auto or safetensors",
        "dummy",
    ),
    Rule(
        f"{ROLLOUT}.quantization",
        one_of(None),
        "verl's own quantization would replace FlashRL's",
        f"{ROLLOUT}.quantization=null and flashrl.precision=int8",
    ),
    Rule(
        f"{ROLLOUT}.quantization_config_file",
        one_of(None),
        "verl's own quantization would replace FlashRL's",
        f"{ROLLOUT}.quantization_config_file=null",
    ),
    Rule(
        "reward.reward_model",
        lambda node: not (node or {}).get("enable") or bool(node.get("enable_resource_pool")),
        "a reward model on the training GPUs makes verl send weights in the middle of validation, which nobody verifies",
        "reward.reward_model.enable_resource_pool=true (GPUs of its own), or reward.reward_model.enable=false",
        {},
    ),
    Rule(
        f"{ROLLOUT}.qat.enable",
        one_of(False, None),
        "quantization-aware training brings its own quantization of the rollout",
        f"{ACTOR}.fsdp_config.qat.enable=false and {ROLLOUT}.qat.enable=false",
    ),
    Rule(
        f"{ROLLOUT}.pipeline_model_parallel_size",
        one_of(1),
        "verl's vLLM rollout has no pipeline parallelism",
        f"{ROLLOUT}.pipeline_model_parallel_size=1 and a larger {ROLLOUT}.tensor_model_parallel_size",
        1,
    ),
    Rule(
        f"{ACTOR}.strategy",
        one_of("fsdp", "fsdp2"),
        "refits, receipts and the check for NaN before a checkpoint have been run with FSDP actors only",
        f"{ACTOR}.strategy=fsdp2",
    ),
    Rule(
        f"{ROLLOUT}.data_parallel_size",
        one_of(1),
        "vLLM's collective calls reach one data-parallel shard of an engine, so the receipts of the others could not be read",
        f"{ROLLOUT}.data_parallel_size=1; more replicas come by themselves from more GPUs",
        1,
    ),
    Rule(
        f"{ROLLOUT}.expert_parallel_size",
        one_of(1),
        "a rank would hold some experts only, and neither the loader nor the receipts of FlashRL know which",
        f"{ROLLOUT}.expert_parallel_size=1 and {ROLLOUT}.tensor_model_parallel_size, which cuts every expert",
        1,
    ),
    Rule(
        f"{ROLLOUT}.disaggregation.enabled",
        one_of(False),
        "separate prefill and decode replicas are built from verl's own server class, without FlashRL",
        f"{ROLLOUT}.disaggregation.enabled=false",
        False,
    ),
    Rule(
        f"{ROLLOUT}.scheduling_policy",
        one_of("fcfs", None),
        "verl hands request priorities only to a rollout named vllm, so they would be dropped",
        f"{ROLLOUT}.scheduling_policy=fcfs",
        "fcfs",
    ),
    Rule(
        f"{ROLLOUT}.mtp.enable_rollout",
        one_of(False, None),
        "the drafter's weights are not part of the checked weight update",
        "actor_rollout_ref.model.mtp.enable_rollout=false",
    ),
    Rule(
        f"{ROLLOUT}.checkpoint_engine.backend",
        one_of("naive", None),
        "other engines send weights past FlashRL's sender, which casts, times out and asks for a receipt",
        f"{ROLLOUT}.checkpoint_engine.backend=naive",
        "naive",
    ),
)


def _check_copies(cfg: DictConfig) -> None:
    """Workers see only actor_rollout_ref: what they read there has to be what the user wrote elsewhere."""
    copies = (
        (f"{ROLLOUT}.custom.flashrl", "flashrl"),
        (f"{ACTOR}.policy_loss.rollout_correction", CORRECTION),
    )
    for copy, source in copies:
        if get(cfg, copy) != get(cfg, source):
            refuse(
                copy,
                get(cfg, copy),
                f"workers read this copy, and it differs from {source}={words(get(cfg, source))}",
                f"set {source}.* only, and leave {copy}='${{{source}}}'",
            )


def _check_lora(cfg: DictConfig) -> None:
    model = "actor_rollout_ref.model"
    for key in (f"{model}.lora.rank", f"{model}.lora_rank"):
        rank = get(cfg, key, 0)
        if rank > 0 and not get(cfg, f"{model}.lora.merge", False):
            refuse(
                key,
                rank,
                "the adapter would be sent beside the base weights, and only whole weights are quantized",
                f"{model}.lora.merge=True (merged before each update), or {key}=0",
            )


def _check_micro_batches(cfg: DictConfig) -> None:
    """verl cuts a rank's share of the batch into micro-batches and asserts, at the first step, that nothing is left."""
    ranks = get(cfg, "trainer.nnodes") * get(cfg, "trainer.n_gpus_per_node")
    # verl's older key and its newer one.
    keys = (f"{ACTOR}.ulysses_sequence_parallel_size", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size")
    data_parallel = max(1, ranks // max(get(cfg, key, 1) or 1 for key in keys))
    samples = get(cfg, f"{ROLLOUT}.n", 1)
    for key, dynamic, prompts in (
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_mini_batch_size"),
        (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", f"{ROLLOUT}.log_prob_use_dynamic_bsz", "data.train_batch_size"),
    ):
        size, batch = get(cfg, key), get(cfg, prompts, 0)
        share, rest = divmod(batch * samples, data_parallel)
        if size and not get(cfg, dynamic, False) and (rest or share % size):
            refuse(
                key,
                size,
                f"{prompts}={batch} prompts x {samples} samples on {data_parallel} ranks are "
                f"{batch * samples / data_parallel:g} sequences a rank, which cannot be cut into micro-batches of that many",
                f"{key} that divides them, or {dynamic}=true",
            )


def _check_hardware(cfg: DictConfig, settings: FlashRLConfig) -> None:
    device, platform = get(cfg, "trainer.device"), get(cfg, PLATFORM)
    if device not in ("cuda", "cpu"):
        refuse(
            "trainer.device",
            device,
            "FlashRL's kernels exist for these two only",
            "hardware=cuda or hardware=cpu",
        )
    if device == "cpu" and platform != "cpu":
        refuse(
            "trainer.device",
            device,
            f"half of hardware=cpu is missing: {PLATFORM}={words(platform)}, so verl's workers would look for a GPU",
            "hardware=cpu",
        )
    if device != "cpu" and platform == "cpu":
        refuse(
            PLATFORM,
            platform,
            f"the workers would run on the CPU, but trainer.device={device}. verl writes the driver's platform there, "
            "and python -m verl.trainer.main_ppo picks it before it has read hardware=cpu",
            "VERL_PLATFORM=cpu in the environment of the command, with hardware=cpu; for GPUs, hardware=cuda without "
            f"{PLATFORM}",
        )
    apply(cfg, _SIZE)
    if device == "cpu":
        apply(cfg, _ON_CPU)
        if settings.kv_cache not in (KVCache.AUTO, KVCache.FP8):
            refuse(
                "flashrl.kv_cache",
                settings.kv_cache.value,
                "vLLM's attention on a CPU has no scale for each token and head",
                "flashrl.kv_cache=auto or fp8",
            )


_SIZE = (
    Rule("trainer.nnodes", positive_integer, "it is the number of nodes that train and sample", "trainer.nnodes=1 or more"),
    Rule(
        "trainer.n_gpus_per_node",
        positive_integer,
        "it is the number of worker processes on each node, on the CPU too",
        "trainer.n_gpus_per_node=1 or more",
    ),
)

_ON_CPU = (
    Rule(
        f"{ACTOR}.strategy",
        one_of("fsdp2"),
        "on the CPU the actor has to be FSDP2: FSDP1 refuses CPU parameters",
        f"{ACTOR}.strategy=fsdp2",
    ),
    Rule(
        f"{ROLLOUT}.enable_sleep_mode",
        one_of(False),
        "vLLM's sleep mode needs CUDA's allocator",
        f"{ROLLOUT}.enable_sleep_mode=false (hardware=cpu sets it)",
        True,
    ),
)
