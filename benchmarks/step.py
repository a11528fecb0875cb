# SPDX-License-Identifier: Apache-2.0
"""Whole steps of DAPO on the GPUs of this machine, by lever: a random model, long-tailed lengths, constant groups.

    python -m benchmarks.step --model qwen2.5-1.5b --variants stock,bf16,int8 experiment=dapo_qwen2.5_7b_int8

Every variant is a run of the recipe, its first step a warm-up. Words are Hydra overrides, the same for all.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import STEP_SETTINGS, environment, run, show, words_of, write_json
from benchmarks.random_model import make_model, make_prompts, short_run, train
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.tools.recipe_process import MODULE, compose, quoted

LEVERS = {
    "stock": ("flashrl.sampling.refill=false", "flashrl.sampling.even_mini_batches=false", "flashrl.precision=bf16"),
    "bf16": ("flashrl.precision=bf16",),
    "int8": ("flashrl.precision=int8",),
    "fp8": ("flashrl.precision=fp8",),
    "kv": ("flashrl.kv_cache=int8_per_token_head",),
    "async": ("trainer.v1.trainer_mode=flashrl_colocate_async",),
    "shuffle": ("flashrl.sampling.even_mini_batches=false", "actor_rollout_ref.actor.shuffle=true"),
}
"""Overrides. A variant is one or more, such as `int8+kv`. `stock` is verl's sampling and order of mini-batches in BF16,
under our trainer, server and checks; `shuffle` is verl's random mini-batches, drawn by each rank."""

COLUMNS = {
    "rollout": "timing_s/gen",
    "old log-probs": "timing_s/old_log_prob",
    "update": "timing_s/update_actor",
    "refit": "timing_s/update_weights",
    "step": "timing_s/step",
    "tokens/s": "flashrl/tokens_per_second_gen",
    "response": "response_length/mean",
    "started": "training/filter_groups/started_samples",
    "constant": "training/filter_groups/evicted_samples",
    "thrown away": "training/filter_groups/discarded_surplus_samples",
    "length variation": "flashrl/mini_batch_length_variation",
    "k3 KL": "rollout_corr/k3_kl",
    "GiB": "actor/perf/max_memory_allocated_gb",
}


def variant_overrides(variant: str) -> list[str]:
    """Hydra's words for a variant.

    Raises:
        ConfigError: it has a word that is no lever, or two that set one key.
    """
    words = [word for lever in words_of(variant.replace("+", ","), LEVERS, "--variants") for word in LEVERS[lever]]
    if len({word.partition("=")[0] for word in words}) < len(words):
        raise ConfigError(f"--variants {variant!r} sets a key twice: {' '.join(words)}")
    return words


def means(steps: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Of the steps behind the first, by column; without those that were not logged."""
    of = {key: [step[key] for step in steps[1:] if step.get(key) is not None] for key in COLUMNS}
    return {key: statistics.fmean(values) for key, values in of.items() if values}


def table(record: dict[str, Any]) -> list[list[str]]:
    """Means of the steps behind the first; header first."""
    rows = [["variant", *COLUMNS]]
    for one in record["results"]:
        found = means(one["steps"])
        cells = [f"{found[key]:{'.0f' if found[key] > 999 else '.3g'}}" if key in found else "-" for key in COLUMNS]
        rows.append([one["variant"], *cells])
    return rows


PHASES = "rollout", "old log-probs", "update", "refit"


def bars(record: dict[str, Any], axes: Any) -> None:
    """A bar a variant: seconds of its step by phase, and how many times as fast it is as the first."""
    results = {one["variant"]: means(one["steps"]) for one in record["results"]}
    for of in results.values():
        of["rest"] = max(0.0, of["step"] - sum(of.get(phase, 0.0) for phase in PHASES))
    lefts = [0.0] * len(results)
    for phase in (*PHASES, "rest"):
        widths = [of.get(phase, 0.0) for of in results.values()]
        axes.barh(list(results), widths, left=lefts, label=phase)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    took = [of["step"] for of in results.values()]
    for at, seconds in enumerate(took):
        axes.text(seconds, at, f" {seconds:.0f} s, x {took[0] / seconds:.2f}", va="center")
    axes.set(xlabel="seconds of a step", xlim=(0, 1.4 * max(took)), ylim=(len(took) + 0.3, -0.6))
    axes.legend(loc="lower center", ncols=3, frameon=False)


def plot(record: dict[str, Any], path: Path) -> None:
    """``bars`` as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.6 + 0.5 * len(record["results"])), layout="constrained", dpi=110)
    bars(record, figure.subplots())
    figure.savefig(path)


def step(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="A name (qwen2.5-0.5b, ...), or a folder with a config.json.")] = "tiny",
    variants: Annotated[str, typer.Option(help=f"Each of {', '.join(LEVERS)}, joined by +.")] = "stock,bf16,int8",
    steps: Annotated[int, typer.Option(min=2, help="Of each variant; the first is not counted.")] = 3,
    median: Annotated[float, typer.Option(min=1, help="Tokens of a response, the median.")] = 1024,
    spread: Annotated[float, typer.Option(min=0, help="Standard deviation of the logarithm of lengths.")] = 0.7,
    warm_up: Annotated[float, typer.Option(min=0.01, max=1, help="The first step's share of these lengths.")] = 1.0,
    constant: Annotated[float, typer.Option(min=0, max=0.9, help="Share of constant groups.")] = 0.4,
    output: Annotated[Path, typer.Option(help="Folder for step.json, model, data, logs.")] = Path("outputs/step"),
) -> None:
    """Time whole steps of DAPO, a run of the recipe for each variant. Exit code 1: one has failed."""
    names = words_of(variants, None, "--variants")
    chosen = {name: variant_overrides(name) for name in names}
    output = output.expanduser().resolve()
    output.mkdir(parents=True, exist_ok=True)
    folder, loop = output / Path(model).name, output / "agent_loop.yaml"
    loop.write_text("- name: flashrl_bench_step\n  _target_: benchmarks.step_workload.LengthsAgentLoop\n")
    common = [
        *short_run(folder, output, steps),
        "actor_rollout_ref.rollout.agent.default_agent_loop=flashrl_bench_step",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={quoted(str(loop))}",
        "reward.custom_reward_function.path=pkg://benchmarks.step_workload",
        "reward.custom_reward_function.name=compute_score",
        "reward.reward_kwargs.overlong_buffer_cfg.enable=false",
        "flashrl.kv_cache=auto",  # an experiment may have the lever `kv` on
        *context.args,
    ]
    cfg = compose([*common, *chosen[names[0]]])
    settings = {"median": median, "spread": spread, "warm_up": warm_up, "constant": constant}
    asked = {"model": model, "steps": steps, **settings, "overrides": context.args}
    record = {"settings": asked, "environment": environment(), "results": []}
    make_model(model, None, folder)
    make_prompts("flashrl-bench-step", 64 * cfg.data.train_batch_size, output)
    for name in names:
        print(f"{name}; log: {output / name / 'train.log'}", flush=True)
        command = [sys.executable, "-m", MODULE, *common, *chosen[name]]
        try:
            logged = train(command, output / name, steps, {STEP_SETTINGS: json.dumps(settings)}).values()
        except FlashRLError as error:  # of one run, which must not end the others
            print(f"{name}: {error}", flush=True)
            continue
        found = [{key: row.get(metric) for key, metric in COLUMNS.items()} for row in logged]
        record["results"].append({"variant": name, "overrides": chosen[name], "steps": found})
        write_json(output / "step.json", record)
        with suppress(ImportError):  # matplotlib may not be there
            plot(record, output / "step.png")
    header, *rows = table(record)
    if rows:
        show(f"{model}, means of {steps - 1} steps", header, rows)
        print(f"written: {output / 'step.json'}")
    raise typer.Exit(int(len(rows) < len(names)))


if __name__ == "__main__":
    run(step, overrides=True)
