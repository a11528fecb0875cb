# SPDX-License-Identifier: Apache-2.0
"""The command `flashrl bench rollout`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashrl_verl.errors import ConfigError
from flashrl_verl.tools.console import new_console

if TYPE_CHECKING:
    from benchmarks.rollout import RolloutConfig
    from flashrl_verl.tools.plan.schedule import Work

DEFAULT_WORK = "128x256+512"


def rollout(
    model: Annotated[str, typer.Option(help="A name (qwen2.5-32b, ...), a config.json, or its folder.")] = "tiny",
    arm: Annotated[
        str,
        typer.Option(
            help="Arms separated by commas: a precision, or precision:kv_cache: int8:int8_per_token_head, ..."
        ),
    ] = "bf16,int8",
    work: Annotated[
        str, typer.Option(help="Works separated by commas: sequences x prompt + response tokens, such as 28x8192+192.")
    ] = DEFAULT_WORK,
    rounds: Annotated[int, typer.Option(min=1, help="How often every arm's engine is started, in turns.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Rollouts of each work with one engine.")] = 3,
    gpu_memory_utilization: Annotated[float, typer.Option(min=0.01, max=1.0, help="vLLM's share of the GPU.")] = 0.9,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs of the engine.")] = 1,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences decoded together.")] = 1024,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prefill.")] = 8192,
    layers: Annotated[int | None, typer.Option(min=1, help="Decoder layers instead of the model's.")] = None,
    parallel: Annotated[
        int,
        typer.Option(min=1, help="Engines at a time, each on GPUs of its own; with 1, arms take turns on the same."),
    ] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, prompts and sampling.")] = 0,
    profile: Annotated[
        bool, typer.Option(help="Record which kernels a decode step consists of, in one more rollout.")
    ] = True,
    output: Annotated[
        Path, typer.Option(help="Folder for rollout.jsonl, rollout.json, rollout.png, steps.png and the engines' logs.")
    ] = Path("outputs/bench_rollout"),
) -> None:
    """Time generation by precision, with random weights of a model's shape, and see how many tokens the KV cache holds.

    The same command goes on after a stop; more arms and more rounds may be added to what is there.
    """
    from benchmarks.rollout import RolloutConfig
    from flashrl_verl.tools.engines.arms import arms_of
    from flashrl_verl.tools.run_directory import check_output

    check_output(output)
    config = RolloutConfig(
        model=model,
        arms=arms_of(arm, "--arm"),
        works=tuple(map(_work, _words(work))),
        rounds=rounds,
        repeats=repeats,
        gpu_memory_utilization=gpu_memory_utilization,
        tensor_parallel=tensor_parallel,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        layers=layers,
        seed=seed,
        output=output.expanduser().resolve(),
        parallel=parallel,
        profile=profile,
    )
    _measure(config)


def _measure(config: RolloutConfig) -> None:
    """Run, print the tables, write the files."""
    from benchmarks import rollout as bench
    from benchmarks import rollout_report, rollout_steps, rollout_steps_figure
    from flashrl_verl.tools.process_tree import Stopped

    console = new_console()
    try:
        with console.status("starting") as status:

            def progress(text: str) -> None:
                status.update(text)
                if not console.is_terminal:
                    console.print(text, markup=False, highlight=False)

            report = bench.run(config, progress)
    except Stopped as stopped:
        console.print("stopped; the same command goes on behind the engines that are measured", highlight=False)
        raise typer.Exit(stopped.exit_code) from None
    written = [*rollout_report.write(config, report), *rollout_steps_figure.write(config, report)]
    console.print(rollout_report.memory_table(config, report))
    console.print(rollout_report.speed_table(config, report))
    if steps := rollout_steps.table(config, report):
        console.print(steps)
    for line in (*rollout_steps.notes(config, report), *rollout_report.notes(config, report)):
        console.print(line, markup=False, highlight=False, style="dim", soft_wrap=True)
    console.print("written: " + ", ".join(map(str, written)), highlight=False, soft_wrap=True)


def _words(text: str) -> list[str]:
    return [word for word in map(str.strip, text.split(",")) if word]


def _work(word: str) -> Work:
    from flashrl_verl.tools.plan.schedule import Work

    found = re.fullmatch(r"(\d+)x(\d+)\+(\d+)", word)
    sequences, prompt, response = map(int, found.groups()) if found else (0, 0, 0)
    if min(sequences, prompt) < 1 or response < 2:
        raise ConfigError(
            f"--work {word!r} is not sequences x prompt + response tokens (2 or more), such as {DEFAULT_WORK}"
        )
    return Work(sequences=sequences, prompt=prompt, response=response)
