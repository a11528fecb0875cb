# SPDX-License-Identifier: Apache-2.0
"""What is to be planned: defaults, a run's configuration, and what its rollout comes to for one engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashrl_verl.errors import ConfigError
from flashrl_verl.tools.engines.shapes import SHAPES, load_config
from flashrl_verl.tools.plan.gpus import GPU
from flashrl_verl.tools.plan.memory import Engine
from flashrl_verl.tools.plan.planner import Plan, make_plan
from flashrl_verl.tools.plan.schedule import Work
from flashrl_verl.tools.plan.shape import shape_of

if TYPE_CHECKING:
    from omegaconf import DictConfig

DEFAULTS: dict[str, Any] = {
    "model": "qwen2.5-32b",
    "gpus": 8,
    "tensor_parallel": 1,
    "sequences": None,
    "samples": 1,
    "prompt": 512,
    "response": 2048,
    "gpu_memory_utilization": 0.9,
    "max_num_seqs": 1024,
    "max_num_batched_tokens": 8192,
    "not_planned": (),
}
"""Without a run and without options; sequences None is 1024 for each engine. Samples: responses to a prompt, where
prefix caching is on."""

_NOT_PLANNED = {
    "flashrl.ignore": [],
    "flashrl.keep_first_layers": 0,
    "flashrl.keep_last_layers": 0,
    "flashrl.bf16_replica_fraction": 0.0,
    "flashrl.fp32_lm_head": False,
    "algorithm.rollout_correction.bypass_mode": False,
    "algorithm.use_kl_in_reward": False,
    "algorithm.filter_groups.enable": False,
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.actor.ppo_epochs": 1,
    "actor_rollout_ref.actor.fsdp_config.param_offload": False,
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": False,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.rollout.enforce_eager": False,
    "actor_rollout_ref.rollout.engine_kwargs.vllm": {},
}
"""Keys that change memory, speed or what a step consists of and are not in the arithmetic, with the values that it
has."""


def plan_of(values: dict[str, Any], gpu: GPU, gpu_memory_gib: float | None = None) -> Plan:
    """Plan what ``values`` say.

    Args:
        values: as ``DEFAULTS``.
        gpu: kind of the GPUs.
        gpu_memory_gib: of each, instead of the data sheet's.

    Raises:
        ConfigError: the model is not known, or nothing fits.
    """
    if gpu_memory_gib is not None:
        gpu = replace(gpu, memory_gib=gpu_memory_gib)
    names = ("tensor_parallel", "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens")
    engine = Engine(**{name: values[name] for name in names})
    engines = max(1, values["gpus"] // engine.tensor_parallel)
    sequences = 1024 if values["sequences"] is None else -(-values["sequences"] // engines)
    work = Work(sequences=sequences, prompt=values["prompt"], response=values["response"])
    shape = shape_of(load_config(values["model"]))
    return make_plan(
        values["model"], shape, gpu, values["gpus"], engine, work, values["not_planned"], values["samples"]
    )


def of_run(overrides: list[str], *, with_model: bool = True) -> dict[str, Any]:
    """What a run's configuration says of its rollout, as ``DEFAULTS``.

    Args:
        overrides: Hydra's.
        with_model: whether the model is wanted too; an option may name another.

    Raises:
        ConfigError: Hydra refuses the overrides, the configuration contradicts itself, or the model is not known here.
    """
    from omegaconf import OmegaConf

    from flashrl_verl.tools.recipe_process import compose
    from flashrl_verl.validation import validate_config

    cfg = compose(overrides)
    validate_config(cfg)

    def get(key: str) -> Any:
        value = OmegaConf.select(cfg, key)
        return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value

    rollout = cfg.actor_rollout_ref.rollout
    changed = [key for key, harmless in _NOT_PLANNED.items() if get(key) not in (harmless, None)]
    return {
        **({"model": _shape_name(cfg)} if with_model else {}),
        "gpus": get("trainer.nnodes") * get("trainer.n_gpus_per_node"),
        "tensor_parallel": rollout.tensor_model_parallel_size,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "sequences": get("data.train_batch_size") * rollout.n,
        "samples": rollout.n if rollout.enable_prefix_caching else 1,
        "prompt": max(1, get("data.max_prompt_length") // 2),
        "response": max(1, get("data.max_response_length") // 2),
        "not_planned": tuple(f"{key}={get(key)}" for key in changed),
    }


def _shape_name(cfg: DictConfig) -> str:
    """The run's model where it lies on this disk, or the shape of the hub's model of that name."""
    path = str(cfg.actor_rollout_ref.model.path)
    if (Path(path).expanduser() / "config.json").is_file():
        return str(Path(path).expanduser())
    name = path.rstrip("/").rpartition("/")[2].lower()
    for ending in ("-instruct", "-base"):  # of one shape with the model they were made from, or of
        name = name.removesuffix(ending)
    if name in SHAPES:
        return name
    raise ConfigError(
        f"actor_rollout_ref.model.path={path} is no folder here, and no shape of that name is known "
        f"({', '.join(SHAPES)}). Name one, or a config.json, in --model"
    )
