# SPDX-License-Identifier: Apache-2.0
"""The command `flashrl plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashrl_verl.errors import ConfigError
from flashrl_verl.tools.plan.gpus import GPUS, find
from flashrl_verl.trainer.atomic_write import write_whole

if TYPE_CHECKING:
    from flashrl_verl.tools.plan.planner import Plan

_FROM_RUN = "else the run's, else "


def plan(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE...]", help="A run's Hydra overrides, such as experiment=dapo_qwen2.5_32b_int8."
        ),
    ] = None,
    gpu: Annotated[str, typer.Option(help=f"{', '.join(GPUS)}.")] = "h100",
    model: Annotated[
        str | None,
        typer.Option(help=f"Name of a shape (qwen2.5-32b, ...), a config.json, or its folder; {_FROM_RUN}qwen2.5-32b."),
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help=f"GPUs of all rollout engines; {_FROM_RUN}8.")] = None,
    tensor_parallel: Annotated[int | None, typer.Option(min=1, help=f"GPUs of one engine; {_FROM_RUN}1.")] = None,
    sequences: Annotated[
        int | None,
        typer.Option(min=1, help=f"Responses of one step, of all engines together; {_FROM_RUN}1024 for each."),
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
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help=f"Sequences decoded together; {_FROM_RUN}1024.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help=f"Tokens of a prefill; {_FROM_RUN}8192.")
    ] = None,
    gpu_memory_gib: Annotated[
        float | None, typer.Option(min=1, help="GiB of a GPU, instead of the data sheet's.")
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw a step of RL by part here, as .png or .svg.")
    ] = None,
    as_json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the plan here too.")] = None,
) -> None:
    """Say what each precision needs and gains, before GPUs are rented: memory, sequences that fit, speed over BF16,
    advice.

    Nothing is loaded and no GPU is needed. Options win over the run that the overrides describe.
    """
    from rich.console import Console

    from flashrl_verl.tools.plan.request import DEFAULTS, of_run, plan_of
    from flashrl_verl.tools.plan.table import render
    from flashrl_verl.tools.report.figure import require_picture

    if figure is not None:
        require_picture("--figure", figure)
    options = {
        "model": model,
        "gpus": gpus,
        "tensor_parallel": tensor_parallel,
        "sequences": sequences,
        "prompt": prompt_length,
        "response": response_length,
        "gpu_memory_utilization": gpu_memory_utilization,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
    }
    run = of_run(overrides, with_model=model is None) if overrides else {}
    run |= {name: value for name, value in options.items() if value is not None}
    made = plan_of(DEFAULTS | run, find(gpu), gpu_memory_gib)
    # Where the output goes to a file rich assumes 80 columns; the table and its sentences keep to them.
    Console(highlight=False).print(render(made))
    _keep(made, as_json, figure)


def _keep(made: Plan, as_json: Path | None, figure: Path | None) -> None:
    """Write what was asked for.

    Raises:
        ConfigError: a path cannot be written.
    """
    from flashrl_verl.tools.plan.figure import draw

    def write(path: Path) -> None:
        write_whole(path, (json.dumps(made.as_json(), indent=1) + "\n").encode())

    for option, path, make in (("--json", as_json, write), ("--figure", figure, lambda path: draw(made, path))):
        if path is None:
            continue
        try:
            path.expanduser().parent.mkdir(parents=True, exist_ok=True)
            make(path.expanduser())
        except OSError as error:
            raise ConfigError(f"{option} {path} cannot be written: {error.strerror or error}") from error
