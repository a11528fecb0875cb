# SPDX-License-Identifier: Apache-2.0
"""What ``try_launch.sh`` runs: it makes a model and data for an experiment, and starts the experiment's own script."""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.random_model import make_model, make_prompts, short_run, train
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.tools import recipe_process
from flashrl_verl.tools.engines.shapes import SHAPES
from flashrl_verl.validation import validate_config

PROMPTS_PER_GPU = 8

SHOWN = {
    "step": "timing_s/step",
    "generation": "timing_s/gen",
    "old log-probs": "timing_s/old_log_prob",
    "update": "timing_s/update_actor",
    "refit": "timing_s/update_weights",
    "k3 KL": "rollout_corr/k3_kl",
    "correlation": "training/rollout_actor_probs_pearson_corr",
    "GiB allocated": "actor/perf/max_memory_allocated_gb",
    "GiB reserved": "actor/perf/max_memory_reserved_gb",
    "response": "response_length/mean",
}
"""Of every step: what it is called here, and by verl."""


def shape_of(model: str) -> str:
    """Name in ``SHAPES`` of a Hugging Face repository such as Qwen/Qwen2.5-7B-Instruct."""
    name = model.rpartition("/")[2].lower()
    found = [shape for shape in SHAPES if name.startswith(shape)]
    if not found:
        raise ConfigError(f"no shape of {model} is known here. Known: {', '.join(SHAPES)}")
    return found[0]


def scaled(experiment: str, output: Path, layers: int, response: int, steps: int, user: list[str]) -> list[str]:
    """What is changed of an experiment, as Hydra's words.

    Args:
        experiment: its name.
        output: folder of model and data.
        layers: decoder layers.
        response: tokens.
        steps: training steps.
        user: the user's own words.
    """
    cfg = recipe_process.compose([f"experiment={experiment}", *user])
    gpus = torch.cuda.device_count() or 1
    actor, rollout = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout
    parallel = math.gcd(gpus, rollout.tensor_model_parallel_size)
    ulysses = math.gcd(gpus, actor.ulysses_sequence_parallel_size)
    batch = min(cfg.data.train_batch_size, PROMPTS_PER_GPU * gpus)
    buffer = cfg.reward.reward_kwargs.overlong_buffer_cfg
    words = [
        *short_run(output / f"model-{layers}", output, steps),
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={gpus}",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={parallel}",
        f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={ulysses}",
        f"data.train_batch_size={batch}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={max(1, batch // 2)}",
        f"data.max_response_length={response}",
        "algorithm.filter_groups.enable=false",
    ]
    if buffer.enable and buffer.len >= response:
        words.append(f"reward.reward_kwargs.overlong_buffer_cfg.len={response // 4}")
    longest = cfg.data.max_prompt_length + response
    if actor.ppo_max_token_len_per_gpu * ulysses < longest:  # the whole of a sequence has to fit one group of ranks
        words.append(f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={math.ceil(longest / ulysses)}")
    return [*words, *user]


def main() -> None:
    """Run it.

    Raises:
        FlashRLError: it ended before its last step.
    """
    parser = argparse.ArgumentParser(usage="bash scripts/try_launch.sh EXPERIMENT [options] [hydra.key=value ...]")
    parser.add_argument("experiment")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--response", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    args, user = parser.parse_known_args()
    script = recipe_process.ROOT / "recipe" / "flashrl" / f"run_{args.experiment}.sh"
    if not script.is_file():
        known = sorted(path.stem.removeprefix("run_") for path in script.parent.glob("run_*.sh"))
        raise ConfigError(f"{script} is not there. Experiments: {', '.join(known)}")
    output = (args.output or Path("outputs/try") / args.experiment).expanduser().resolve()
    console, began = Console(), time.monotonic()

    cfg = recipe_process.compose([f"experiment={args.experiment}"])
    model, response = cfg.actor_rollout_ref.model.path, min(args.response, cfg.data.max_response_length)
    words = scaled(args.experiment, output, args.layers, response, args.steps, user)
    head = f"{script.name}, {args.layers} layers of {model}, on {torch.cuda.device_count() or 'no'} GPUs:"
    console.print(head, *words, sep="\n  ", markup=False, highlight=False, soft_wrap=True)
    if args.dry_run:
        console.print("model and data of these paths are made when it runs", markup=False, highlight=False)
        sys.stdout.flush()
        sys.exit(subprocess.run(["bash", str(script), *words, "--dry-run"], check=False).returncode)
    small = recipe_process.compose([f"experiment={args.experiment}", *words])
    validate_config(small)  # before the model is made, which takes up to a minute
    if small.trainer.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("this machine has no GPU that PyTorch sees. Remedy: another machine, or --dry-run")
    output.mkdir(parents=True, exist_ok=True)
    make_model(shape_of(model), args.layers, output / f"model-{args.layers}")
    make_prompts("openai/gsm8k" if args.experiment.startswith("gsm8k") else "math_dapo", 256, output)
    console.print(f"[{time.monotonic() - began:.0f} s] model and data made", markup=False, highlight=False)

    for step, row in train(["bash", str(script), *words], output, args.steps).items():
        figures = [f"{name} {row[key]:.4g}" for name, key in SHOWN.items() if key in row]
        console.print(f"step {step}: {', '.join(figures)}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"log and metrics: {output}", markup=False, highlight=False)


if __name__ == "__main__":
    try:
        main()
    except FlashRLError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
