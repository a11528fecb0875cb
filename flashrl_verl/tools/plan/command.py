# SPDX-License-Identifier: Apache-2.0
"""The command `flashrl plan`: what is to be planned, from a run's configuration and options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashrl_verl.errors import ConfigError
from flashrl_verl.settings import ASYNC
from flashrl_verl.tools.plan.gpus import GPU, GPUS, find

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from flashrl_verl.tools.plan.planner import Plan

DEFAULTS: dict[str, Any] = {
    "model": "qwen2.5-32b",
    "gpus": 8,
    "tensor_parallel": 1,
    "sequences": None,
    "samples": 1,
    "prompt": 512,
    "response": 2048,
    "limit": None,
    "spread": 0.7,
    "constant": 0.0,
    "refill": True,
    "even_mini_batches": True,
    "liger": False,
    "asynchronous": False,
    "gpu_memory_utilization": 0.9,
    "max_num_seqs": 1024,
    "max_num_batched_tokens": 8192,
    "not_planned": (),
}
"""Without a run and without options. sequences: None is 1024 for each engine. samples: responses to a prompt that share
it through prefix caching."""

CONSTANT = 0.4
"""Share of constant groups that is assumed of a run with dynamic sampling."""

_MOST_SEQUENCES = 65_536

_NOT_PLANNED = {
    "flashrl.ignore": [],
    "flashrl.keep_first_layers": 0,
    "flashrl.keep_last_layers": 0,
    "flashrl.bf16_replica_fraction": 0.0,
    "flashrl.fp32_lm_head": False,
    "algorithm.rollout_correction.bypass_mode": False,
    "algorithm.use_kl_in_reward": False,
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.actor.ppo_epochs": 1,
    "actor_rollout_ref.actor.fsdp_config.param_offload": False,
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": False,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.rollout.enforce_eager": False,
    "actor_rollout_ref.rollout.engine_kwargs.vllm": {},
}
"""Keys that change memory or time and are not in the arithmetic, with the values that it assumes."""


def plan(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE...]", help="A run's Hydra overrides, such as experiment=dapo_qwen2.5_32b_int8."
        ),
    ] = None,
    gpu: Annotated[str, typer.Option(help=f"{', '.join(GPUS)}.")] = "h100",
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs in all; else the run's, else 8.")] = None,
    model: Annotated[
        str | None, typer.Option(help="qwen2.5-32b, ..., or a folder with a config.json; else the run's.")
    ] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(min=1, help="GPUs of one engine; else the run's, else 1.")
    ] = None,
    sequences: Annotated[
        int | None, typer.Option(min=1, help="Responses of one step; else the run's, else 1024 for each engine.")
    ] = None,
    prompt_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens, the mean; else half the run's maximum, else 512.")
    ] = None,
    response_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens, the mean; else half the run's maximum, else 2048.")
    ] = None,
    length_spread: Annotated[
        float | None,
        typer.Option(min=0, max=3, help="Standard deviation of the logarithm of responses' lengths; else 0.7."),
    ] = None,
    constant_groups: Annotated[
        float | None,
        typer.Option(min=0, max=0.95, help="Share of groups that dynamic sampling replaces; else 0.4 where it is on."),
    ] = None,
    gpu_memory_gib: Annotated[
        float | None, typer.Option(min=1, max=10_000, help="GiB of a GPU, instead of the data sheet's.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Memory, decode steps, other layouts, assumptions.")
    ] = False,
) -> None:
    """Compute memory and seconds of a training step in each precision, and say which to take. No GPU is needed.

    Options win over the run that the overrides describe. How good it is: docs/results/throughput.md.
    """
    from rich.console import Console

    from flashrl_verl.tools.plan.table import render

    options = {
        "model": model,
        "gpus": gpus,
        "tensor_parallel": tensor_parallel,
        "sequences": sequences,
        "prompt": prompt_length,
        "response": response_length,
        "spread": length_spread,
        "constant": constant_groups,
    }
    run = of_run(overrides, with_model=model is None) if overrides else {}
    run |= {name: value for name, value in options.items() if value is not None}
    kind = find(gpu)
    made = plan_of(DEFAULTS | run, kind if gpu_memory_gib is None else replace(kind, memory_gib=gpu_memory_gib))
    Console(highlight=False, markup=False).print(render(made, explain))


def plan_of(values: dict[str, Any], gpu: GPU) -> Plan:
    """Plan what ``values`` say, as ``DEFAULTS``.

    Raises:
        ConfigError: the model is not known, or nothing fits.
    """
    from flashrl_verl.tools.engines.shapes import load_config
    from flashrl_verl.tools.plan.memory import Engine
    from flashrl_verl.tools.plan.planner import make_plan
    from flashrl_verl.tools.plan.schedule import Work
    from flashrl_verl.tools.plan.shape import shape_of
    from flashrl_verl.tools.plan.whole_step import Levers

    names = ("tensor_parallel", "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens")
    engine = Engine(**{name: values[name] for name in names})
    engines = max(1, values["gpus"] // engine.tensor_parallel)
    sequences = 1024 if values["sequences"] is None else -(-values["sequences"] // engines)
    if sequences > _MOST_SEQUENCES:
        raise ConfigError(
            f"{sequences} responses an engine are not planned, {_MOST_SEQUENCES} at most. Set --sequences"
        )
    limit, response = values["limit"], values["response"]
    work = Work(
        sequences=sequences,
        prompt=values["prompt"],
        response=response,
        spread=values["spread"],
        limit=limit if limit is not None and limit > response else None,
    )
    names = ("constant", "refill", "even_mini_batches", "liger", "asynchronous")
    levers = Levers(**{name: values[name] for name in names})
    shape = shape_of(load_config(values["model"]))
    return make_plan(
        values["model"], shape, gpu, values["gpus"], engine, work, values["not_planned"], values["samples"], levers
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
    rollout = cfg.actor_rollout_ref.rollout
    values = {key: OmegaConf.select(cfg, key) for key in _NOT_PLANNED}
    changed = [key for key, harmless in _NOT_PLANNED.items() if values[key] not in (harmless, None)]
    return {
        **({"model": _shape_name(cfg)} if with_model else {}),
        "gpus": cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node,
        "tensor_parallel": rollout.tensor_model_parallel_size,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "sequences": cfg.data.train_batch_size * rollout.n,
        "samples": rollout.n if rollout.enable_prefix_caching else 1,
        "prompt": max(1, cfg.data.max_prompt_length // 2),
        "response": max(1, cfg.data.max_response_length // 2),
        "limit": cfg.data.max_response_length,
        "constant": CONSTANT if cfg.algorithm.filter_groups.enable else 0.0,
        "refill": cfg.flashrl.sampling.refill,
        "even_mini_batches": cfg.flashrl.sampling.even_mini_batches,
        "liger": cfg.actor_rollout_ref.model.use_liger,
        "asynchronous": cfg.trainer.v1.trainer_mode == ASYNC,
        "not_planned": tuple(f"{key}={values[key]}" for key in changed),
    }


def _shape_name(cfg: DictConfig) -> str:
    """The run's model where it lies on this disk, or the shape of the hub's model of that name."""
    from flashrl_verl.tools.engines.shapes import SHAPES

    path = str(cfg.actor_rollout_ref.model.path)
    if (Path(path).expanduser() / "config.json").is_file():
        return str(Path(path).expanduser())
    name = path.rstrip("/").rpartition("/")[2].lower().removesuffix("-instruct").removesuffix("-base")
    if name in SHAPES:
        return name
    raise ConfigError(
        f"actor_rollout_ref.model.path={path} is no folder here, and no shape of that name is known "
        f"({', '.join(SHAPES)}). Name one, or a config.json, in --model"
    )
