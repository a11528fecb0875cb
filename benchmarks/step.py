# SPDX-License-Identifier: Apache-2.0
"""Whole steps of DAPO on the GPUs of this machine, by lever: a random model, long-tailed lengths, constant groups.

    python -m benchmarks.step --model qwen2.5-1.5b --variants stock,bf16,int8 experiment=dapo_qwen2.5_7b_int8

Every variant is a run of the recipe, its first step a warm-up; what the output folder has is not run again. Words are
Hydra overrides, the same for all.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import environment, run, show, words_of, write_json
from benchmarks.random_model import make_model, make_prompts, short_run, train
from benchmarks.step_workload import SETTINGS, response_length
from flashrl_verl.errors import ConfigError
from flashrl_verl.tools.recipe_process import MODULE, compose, quoted

LEVERS = {
    "stock": ("flashrl.sampling.refill=false", "flashrl.sampling.even_mini_batches=false", "flashrl.precision=bf16"),
    "bf16": ("flashrl.precision=bf16",),
    "int8": ("flashrl.precision=int8",),
    "fp8": ("flashrl.precision=fp8",),
    "kv": ("flashrl.kv_cache=int8_per_token_head",),
    "async": ("trainer.v1.trainer_mode=flashrl_colocate_async",),
}
"""Overrides. A variant is one or more, such as `int8+kv`. `stock` is verl's sampling and order of mini-batches in BF16,
under our trainer, server and checks."""

PARTS = {
    "rollout": "timing_s/gen",
    "old log-probs": "timing_s/old_log_prob",
    "update": "timing_s/update_actor",
    "refit": "timing_s/update_weights",
}
COLUMNS = {
    **PARTS,
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


def overrides_of(folder: Path, model: Path, steps: int) -> list[str]:
    """What makes a run of the recipe a benchmark of its steps."""
    loop = folder / "agent_loop.yaml"
    loop.write_text("- name: flashrl_bench_step\n  _target_: benchmarks.step_workload.LengthsAgentLoop\n")
    return [
        *short_run(model, folder, steps),
        "actor_rollout_ref.rollout.agent.default_agent_loop=flashrl_bench_step",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={quoted(str(loop))}",
        "reward.custom_reward_function.path=pkg://benchmarks.step_workload",
        "reward.custom_reward_function.name=compute_score",
        "reward.reward_kwargs.overlong_buffer_cfg.enable=false",
    ]


def run_variant(name: str, words: list[str], folder: Path, steps: int, settings: dict[str, float]) -> dict[str, Any]:
    """Train, and return what was measured.

    Raises:
        FlashRLError: the run ended before its last step.
    """
    rows = train([sys.executable, "-m", MODULE, *words], folder, steps, {SETTINGS: json.dumps(settings)}).values()
    found = [{key: row.get(metric) for key, metric in COLUMNS.items()} for row in rows]
    return {"variant": name, "overrides": variant_overrides(name), "steps": found}


def rows_of(results: list[dict[str, Any]]) -> list[list[str]]:
    """Means of the steps behind the first."""
    table = []
    for one in results:
        of = {
            key: statistics.fmean(values)
            if (values := [s[key] for s in one["steps"][1:] if s.get(key) is not None])
            else None
            for key in COLUMNS
        }
        cells = ["-" if of[key] is None else f"{of[key]:{'.0f' if of[key] > 999 else '.3g'}}" for key in COLUMNS]
        table.append([one["variant"], *cells])
    return table


def step(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="A name (qwen2.5-0.5b, ...), a config.json, or its folder.")] = "tiny",
    layers: Annotated[int | None, typer.Option(min=1, help="Decoder layers; else the model's.")] = None,
    variants: Annotated[str, typer.Option(help=f"Each of {', '.join(LEVERS)}, joined by +.")] = "stock,bf16,int8",
    steps: Annotated[int, typer.Option(min=2, help="Of each variant; the first is not counted.")] = 3,
    median: Annotated[float, typer.Option(min=1, help="Tokens of a response, the median.")] = 1024,
    spread: Annotated[float, typer.Option(min=0, help="Standard deviation of the logarithm of lengths.")] = 0.7,
    constant: Annotated[float, typer.Option(min=0, max=0.9, help="Share of constant groups.")] = 0.4,
    output: Annotated[Path, typer.Option(help="Folder for step.json, model, data, logs.")] = Path("outputs/step"),
) -> None:
    """Time whole steps of DAPO, a run of the recipe for each variant."""
    from flashrl_verl.tools.engines.shapes import load_config

    names = words_of(variants, None, "--variants")
    chosen = {name: variant_overrides(name) for name in names}
    output = output.expanduser().resolve()
    output.mkdir(parents=True, exist_ok=True)
    depth = layers or load_config(model).num_hidden_layers
    folder = output / f"{Path(model).name}-{depth}"
    common = [*overrides_of(output, folder, steps), *context.args]
    cfg = compose([*common, *chosen[names[0]]])
    settings = {"median": median, "spread": spread, "constant": constant}
    file = output / "step.json"
    here = environment()
    asked = {"model": model, "layers": depth, "steps": steps, **settings, "overrides": context.args}
    record = json.loads(file.read_text()) if file.is_file() else {}
    if record and (record["settings"], record["environment"]) != (asked, here):
        raise ConfigError(
            f"{file} has results of other settings or another machine. Name another --output, or remove it"
        )
    results = {one["variant"]: one for one in record.get("results", [])}
    make_model(model, depth, folder)
    make_prompts("flashrl-bench-step", 64 * cfg.data.train_batch_size, output)
    lengths = [
        min(response_length(str(prompt), number, median, spread), cfg.data.max_response_length)
        for prompt in range(256)
        for number in range(16)
    ]
    print(f"lengths: {', '.join(f'{q:.0f}' for q in statistics.quantiles(lengths, n=10))} (deciles)", flush=True)
    for name in names:
        if name in results:
            continue
        print(f"{name}; log: {output / name / 'train.log'}", flush=True)
        results[name] = run_variant(name, [*common, *chosen[name]], output / name, steps, settings)
        write_json(file, {"settings": asked, "environment": here, "results": list(results.values())})
    table = rows_of([results[name] for name in names])
    show(f"{model}, means of {steps - 1} steps", ("variant", *COLUMNS), table)
    print(f"written: {file}")


if __name__ == "__main__":
    run(step, overrides=True)
