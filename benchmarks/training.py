# SPDX-License-Identifier: Apache-2.0
"""How long old log-probs and policy updates take in verl's own FSDP worker on one GPU, a layer and the head each.

    python -m benchmarks.training experiment=dapo_qwen2.5_32b_int8 --model qwen2.5-32b --layers 2,4

A layer's seconds are the difference between a model of more layers and one of fewer, the head's are what is left; a
whole model is as many layers and a head. It is what a rank does between verl's call and its answer, in one mini-batch:
micro-batches, log-probs, entropy, loss, the optimizer's step. Nothing is communicated or offloaded. Words are Hydra
overrides, which is how settings are compared: one command for each.
"""

from __future__ import annotations

import gc
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import PretrainedConfig

from benchmarks.common import environment, in_own_process, run, show, write_json
from benchmarks.random_model import make_model
from benchmarks.refit import timed
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.tools.plan.shape import shape_of
from flashrl_verl.tools.recipe_process import compose, quoted
from flashrl_verl.validation import settle_packages

PASSES = {"old log-probs": 1, "policy update": 4}
"""How many forward passes' operations each takes. An update is a forward pass, its repetition (gradient checkpointing),
and a backward pass of two."""

PEAK = {"A100": 312e12, "H100 80GB HBM3": 989e12, "H200": 989e12}
"""BF16 FLOP/s of NVIDIA's data sheets, dense, by a part of the device's name."""


def one_rank(words: list[str], folder: Path) -> list[str]:
    """The run's overrides, for one rank and the model in `folder`."""
    return [
        *words,
        f"actor_rollout_ref.model.path={quoted(str(folder))}",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        # A run moves a rank's share to the host and back; one rank would move the whole model.
        "actor_rollout_ref.actor.fsdp_config.param_offload=false",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=false",
    ]


def time_passes(
    words: dict[int, list[str]], folder: str, lengths: list[int], sequences: int, repeats: int
) -> dict[str, Any]:
    """Of a process of its own: seconds of both passes, after one of each that is not counted, and GiB at most.

    Args:
        words: Hydra's, of one rank, by the model's depth.
        folder: takes the process groups' files.
        lengths: tokens of each sequence, a quarter of them prompt.
        sequences: of one mini-batch.
        repeats: how often each pass is timed.

    Returns:
        ``seconds`` by length, pass and depth; ``gib`` by depth (None on a CPU).
    """
    seconds: dict[int, dict[str, dict[int, list[float]]]] = {n: {name: {} for name in PASSES} for n in lengths}
    gib: dict[int, float | None] = {}
    for depth, of_depth in words.items():
        config = compose(of_depth)
        settle_packages(config)
        here = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        os.environ.update(here, DIST_INIT_METHOD=f"file://{folder}/process-group-{os.getpid()}-{depth}")
        if config.trainer.device == "cpu":
            os.environ["VERL_PLATFORM"] = "cpu"
        import flashrl_verl.plugins.verl  # noqa: F401 - the CPU platform, before verl picks one
        from flashrl_verl.trainer.worker import FlashRLWorker

        worker = FlashRLWorker(config.actor_rollout_ref, role="actor")
        worker.init_model()
        for length in lengths:
            work = passes_of(worker, config, length, sequences)
            for name, one in zip(PASSES, work, strict=True):
                seconds[length][name][depth] = [timed(one) for _ in range(1 + repeats)][1:]
        gib[depth] = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
        torch.distributed.destroy_process_group()
        del worker, work, one
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    return {"seconds": seconds, "gib": gib}


def passes_of(worker: Any, config: Any, length: int, sequences: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Old log-probs and the update of one mini-batch of random tokens, as verl's driver asks for them
    (trainer/ppo/v1/trainer_base.py, ``_compute_old_log_prob`` and ``_update_actor``)."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    prompt, random = length // 4, torch.Generator().manual_seed(0)
    vocabulary = worker.actor.engine.module.config.vocab_size

    def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    ids = [torch.randint(3, vocabulary, (length,), generator=random) for _ in range(sequences)]
    ones = [torch.ones(length - prompt, dtype=torch.int64) for _ in ids]
    # Log-probs near those of random logits, so that no ratio is cut off.
    near = [torch.full((length - prompt,), -torch.tensor(float(vocabulary)).log().item()) for _ in ids]
    columns = {
        "prompts": jagged([row[:prompt] for row in ids]),
        "responses": jagged([row[prompt:] for row in ids]),
        "input_ids": jagged(ids),
        "position_ids": jagged([torch.arange(length) for _ in ids]),
        "response_mask": jagged(ones),
        "loss_mask": jagged(ones),
        "old_log_probs": jagged(near),
        "rollout_log_probs": jagged(near),
        "advantages": jagged([torch.randn(1, generator=random) * row for row in ones]),
    }

    def batch(**more: Any) -> TensorDict:
        data = TensorDict(columns, batch_size=sequences)
        tu.assign_non_tensor(data, temperature=config.actor_rollout_ref.rollout.temperature, **more)
        return data

    actor = config.actor_rollout_ref.actor
    settings = dict(
        calculate_entropy=actor.calculate_entropy or actor.entropy_coeff != 0,
        distillation_use_topk=False,
        distillation_only=False,
        global_batch_size=sequences,
        mini_batch_size=sequences,
        epochs=1,
        seed=1,
        dataloader_kwargs={"shuffle": False},
    )
    return (
        lambda: worker.compute_log_prob(batch(calculate_entropy=True, compute_loss=False)),
        lambda: worker.update_actor(batch(**settings)),
    )


def forward_operations(config: PretrainedConfig, tokens: int, length: int) -> float:
    """Floating-point operations of a forward pass: two for each weight that a token passes, and causal attention, two
    products of two over half of the length.

    Args:
        config: the model's.
        tokens: in all.
        length: of each sequence.
    """
    shape, layers = shape_of(config), config.num_hidden_layers
    idle = 3 * config.hidden_size * shape.width * layers * max(0, shape.experts - shape.gates)
    weights = shape.projections - idle + config.vocab_size * config.hidden_size
    return tokens * (2 * weights + 2 * layers * config.num_attention_heads * shape.head_dim * length)


def by_part(name: str, seconds: dict[int, list[float]], layers: int) -> dict[str, Any]:
    """A layer, the head, and a whole model of so many layers.

    Raises:
        FlashRLError: the times are too noisy to tell a layer from the head.
    """
    (few, low), (many, high) = ((depth, statistics.median(found)) for depth, found in sorted(seconds.items()))
    layer = (high - low) / (many - few)
    head = low - few * layer
    if min(layer, head) <= 0:
        raise FlashRLError(
            f"{name}: {low:.4f} s with {few} layers and {high:.4f} s with {many} are too noisy to tell a layer from "
            "the head. Remedy: --layers further apart, more --lengths or --repeats"
        )
    whole = head + layers * layer
    return {"name": name, "seconds": seconds, "layer_s": layer, "head_s": head, "whole_s": whole}


def training(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="A name (qwen2.5-32b, ...), a config.json, or its folder.")] = "tiny",
    layers: Annotated[str, typer.Option(help="Depths of the two models that are timed.")] = "1,2",
    lengths: Annotated[str, typer.Option(help="Tokens of each sequence, a quarter of them prompt.")] = "8192",
    sequences: Annotated[int, typer.Option(min=1, help="Of one mini-batch.")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="After one that is not measured.")] = 3,
    output: Annotated[Path, typer.Option(help="Folder for training.json, models and the log.")] = Path(
        "outputs/training"
    ),
) -> None:
    """Time old log-probs and policy updates of a model's shape on one GPU, or on the CPU (hardware=cpu)."""
    from flashrl_verl.tools.engines.shapes import load_config

    depths, tokens = (
        [int(word) if word.strip().isdecimal() else 0 for word in text.split(",")] for text in (layers, lengths)
    )
    if len(depths) != 2 or not 0 < depths[0] < depths[1]:
        raise ConfigError(f"--layers {layers!r} is not two numbers, the second greater, such as 2,6")
    if min(tokens) < 8:
        raise ConfigError(f"--lengths {lengths!r} is not numbers from 8 on, such as 8192,22528")
    words = context.args or ["experiment=smoke"]
    compose(words)
    whole, output = load_config(model), output.expanduser().resolve()
    log, by_depth = output / "training.log", {}
    for depth in depths:
        folder = output / f"{Path(model).name}-{depth}"
        make_model(model, depth, folder)
        by_depth[depth] = one_rank(words, folder)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    print(f"{model} with {layers} layers; log: {log}", flush=True)
    found = in_own_process(time_passes, by_depth, str(output), tokens, sequences, repeats, log=log)
    here = environment()
    peak = next((flops for name, flops in PEAK.items() if name in here["device"]), None)
    passes = []
    for length in tokens:
        forward = forward_operations(whole, length * sequences, length)
        for name, times in PASSES.items():
            one = by_part(name, found["seconds"][length][name], whole.num_hidden_layers)
            share = times * forward / one["whole_s"] / peak if peak else None
            passes.append({"length": length, "tokens": length * sequences} | one | {"share": share})
    settings = {"overrides": words, "model": model, "layers": depths, "sequences": sequences, "repeats": repeats}
    record = {"settings": settings, "environment": here, "gib_allocated": found["gib"], "passes": passes}
    write_json(output / "training.json", record)
    rows = [
        [
            one["name"],
            str(one["length"]),
            *(f"{1e3 * one[part]:.2f}" for part in ("layer_s", "head_s", "whole_s")),
            "-" if one["share"] is None else f"{one['share']:.0%}",
        ]
        for one in passes
    ]
    header = ("pass", "length", "layer ms", "head ms", "whole model ms", "of the data sheet's BF16")
    show(f"{model} on {here['device']}, {sequences} sequences", header, rows)
    print(f"written: {output / 'training.json'}")


if __name__ == "__main__":
    run(training, overrides=True)
