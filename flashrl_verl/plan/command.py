# SPDX-License-Identifier: Apache-2.0
"""The command `flashrl plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashrl_verl.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

_FROM_RUN = "else the run's, else "


def plan(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE...]", help="A run's Hydra overrides, such as experiment=dapo_qwen2.5_32b_int8."),
    ] = None,
    gpu: Annotated[str, typer.Option(help="a100-40gb, a100-80gb, a6000, l40s, h100-pcie, h100 or h200.")] = "h100",
    model: Annotated[
        str | None,
        typer.Option(help=f"Name of a shape (qwen2.5-32b, ...), a config.json, or its folder; {_FROM_RUN}qwen2.5-32b."),
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help=f"GPUs of all rollout engines; {_FROM_RUN}8.")] = None,
    tensor_parallel: Annotated[int | None, typer.Option(min=1, help=f"GPUs of one engine; {_FROM_RUN}1.")] = None,
    sequences: Annotated[
        int | None, typer.Option(min=1, help=f"Responses of one step, of all engines together; {_FROM_RUN}1024 for each.")
    ] = None,
    prompt_length: Annotated[
        int | None, typer.Option(min=1, help=f"Tokens; {_FROM_RUN}512. Of a run: half the maximum.")
    ] = None,
    response_length: Annotated[
        int | None, typer.Option(min=1, help=f"Tokens, the mean; {_FROM_RUN}2048. Of a run: half the maximum.")
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(min=0.01, max=1.0, help=f"vLLM's share; {_FROM_RUN}0.9.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help=f"Sequences decoded together; {_FROM_RUN}1024.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, help=f"Tokens of a prefill; {_FROM_RUN}8192.")] = None,
    gpu_memory_gib: Annotated[float | None, typer.Option(min=1, help="GiB of a GPU, instead of the data sheet's.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the plan here too.")] = None,
) -> None:
    """Say what each precision needs and gains, before GPUs are rented: memory, sequences that fit, speed over BF16, advice.

    Nothing is loaded and no GPU is needed. Options win over the run that the overrides describe.
    """
    from dataclasses import replace

    from rich.console import Console

    from flashrl_verl.bench.shapes import load_config
    from flashrl_verl.plan import gpus as kinds
    from flashrl_verl.plan.memory import Engine
    from flashrl_verl.plan.planner import make_plan
    from flashrl_verl.plan.schedule import Work
    from flashrl_verl.plan.shape import shape_of
    from flashrl_verl.plan.table import render

    run = _of_run(overrides) if overrides else {}

    def chosen(option: Any, key: str, default: Any) -> Any:
        return option if option is not None else run.get(key, default)

    kind = kinds.find(gpu)
    if gpu_memory_gib is not None:
        kind = replace(kind, memory_gib=gpu_memory_gib)
    engine = Engine(
        tensor_parallel=chosen(tensor_parallel, "tensor_parallel", 1),
        gpu_memory_utilization=chosen(gpu_memory_utilization, "gpu_memory_utilization", 0.9),
        max_num_seqs=chosen(max_num_seqs, "max_num_seqs", 1024),
        max_num_batched_tokens=chosen(max_num_batched_tokens, "max_num_batched_tokens", 8192),
    )
    count = chosen(gpus, "gpus", 8)
    engines = max(1, count // engine.tensor_parallel)
    all_sequences = chosen(sequences, "sequences", 1024 * engines)
    work = Work(
        sequences=-(-all_sequences // engines),
        prompt=chosen(prompt_length, "prompt", 512),
        response=chosen(response_length, "response", 2048),
    )
    name = chosen(model, "model", "qwen2.5-32b")
    made = make_plan(name, shape_of(load_config(name)), kind, count, engine, work)
    Console(highlight=False).print(render(made))
    if as_json is not None:
        as_json.parent.mkdir(parents=True, exist_ok=True)
        as_json.write_text(json.dumps(made.as_json(), indent=1) + "\n")


def _of_run(overrides: list[str]) -> dict[str, Any]:
    """What a run's configuration says of its rollout."""
    from omegaconf import OmegaConf

    from flashrl_verl.quickstart import compose

    cfg = compose(overrides)
    rollout = cfg.actor_rollout_ref.rollout

    def get(key: str) -> Any:
        return OmegaConf.select(cfg, key)

    return {
        "model": _shape_name(cfg),
        "gpus": get("trainer.nnodes") * get("trainer.n_gpus_per_node"),
        "tensor_parallel": rollout.tensor_model_parallel_size,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "sequences": get("data.train_batch_size") * rollout.n,
        "prompt": max(1, get("data.max_prompt_length") // 2),
        "response": max(1, get("data.max_response_length") // 2),
    }


def _shape_name(cfg: DictConfig) -> str:
    """The run's model where it lies on this disk, or the shape of the hub's model of that name.

    Raises:
        ConfigError: neither is known here.
    """
    from flashrl_verl.bench.shapes import SHAPES

    path = str(cfg.actor_rollout_ref.model.path)
    if (Path(path).expanduser() / "config.json").is_file():
        return str(Path(path).expanduser())
    name = path.rstrip("/").rpartition("/")[2].lower()
    if name in SHAPES:
        return name
    raise ConfigError(
        f"actor_rollout_ref.model.path={path} is no folder here, and no shape of that name is known ({', '.join(SHAPES)}). "
        "Name one, or a config.json, in --model"
    )
