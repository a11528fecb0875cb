# SPDX-License-Identifier: Apache-2.0
"""The command `flashrl plan`: what is asked, from a run's configuration and options, and two tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table

from flashrl_verl.errors import ConfigError
from flashrl_verl.settings import KVCache, Precision
from flashrl_verl.tools.plan.measured import rows_for

if TYPE_CHECKING:
    from flashrl_verl.tools.plan.memory import Memory

DEFAULTS: dict[str, Any] = {"model": "qwen2.5-32b", "gpus": 8, "tensor_parallel": 1, "prompt": 512, "response": 2048}
"""Without a run and without options."""

NOT_COUNTED = (
    "Not counted: the trainer (its memory of a GPU, and of a host where it is offloaded); layers in BF16, "
    "engine_kwargs.vllm, and CUDA graphs for more than 512 sequences, for which vLLM sets up to 5 GiB more aside."
)
CAVEAT = (
    "On H200s with the memory in the table. Random weights; INT8 mostly without rotation, which costs up to 2 % of a "
    "decode step and less than 1 % of a rollout. Of sequences above 8,384 tokens one rollout of 14B was measured "
    "(docs/results/throughput.md). BF16 that hardly fits (2 times and more) may do better in engines of more GPUs."
)


def plan(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE...]", help="A run's overrides, as experiment=dapo_qwen2.5_32b_int8."),
    ] = None,
    gpu: Annotated[str, typer.Option(help="a100-80gb, h100, h200, ...")] = "h100",
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs in all; else the run's, or 8.")] = None,
    model: Annotated[str | None, typer.Option(help="A name, or a folder with a config.json; else the run's.")] = None,
    tensor_parallel: Annotated[int | None, typer.Option(min=1, help="GPUs of an engine; else the run's, or 1.")] = None,
    prompt_length: Annotated[int | None, typer.Option(min=1, help="Tokens at most; else the run's, or 512.")] = None,
    response_length: Annotated[int | None, typer.Option(min=1, help="Tokens at most; else the run's, or 2048.")] = None,
    gpu_memory_gib: Annotated[float | None, typer.Option(min=1, help="GiB of a GPU, instead of the known.")] = None,
) -> None:
    """Say what an engine holds in each precision, and how much faster such rollouts were. No GPU is needed.

    Options win over the run that the overrides describe.
    """
    options = {"model": model, "gpus": gpus, "tensor_parallel": tensor_parallel}
    options |= {"prompt": prompt_length, "response": response_length}
    asked = DEFAULTS | (_of_run(overrides) if overrides else {})
    asked |= {name: value for name, value in options.items() if value is not None}
    variants = _variants(asked, gpu.lower(), gpu_memory_gib)
    Console(highlight=False, markup=False).print(_fits(variants, asked), "", _speed_ups(variants[0], asked), sep="\n")


def _of_run(overrides: list[str]) -> dict[str, Any]:
    """What a run's configuration says of its rollout, as ``DEFAULTS``."""
    from flashrl_verl.tools.recipe_process import compose
    from flashrl_verl.validation import validate_config

    cfg = compose(overrides)
    settings = validate_config(cfg)
    rollout = cfg.actor_rollout_ref.rollout
    return {
        "model": str(cfg.actor_rollout_ref.model.path),
        "gpus": cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node,
        "tensor_parallel": rollout.tensor_model_parallel_size,
        "prompt": cfg.data.max_prompt_length,
        "response": cfg.data.max_response_length,
        "formats": (settings.precision, settings.kv_cache),
        **{name: rollout[name] for name in ("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens")},
    }


def _variants(asked: dict[str, Any], gpu: str, gpu_memory_gib: float | None) -> list[Memory]:
    """A GPU in every precision with either KV cache, BF16 first. The model is a folder, a name, or the hub's name."""
    from flashrl_verl.tools.engines.shapes import SHAPES, load_config
    from flashrl_verl.tools.plan.memory import GPUS, Engine, Memory
    from flashrl_verl.tools.plan.shape import shape_of

    if gpu not in GPUS:
        raise ConfigError(f"--gpu {gpu} is not one of {', '.join(GPUS)}. Name a similar one, and --gpu-memory-gib")
    path = Path(asked["model"]).expanduser()
    name = path.name.lower().removesuffix("-instruct").removesuffix("-base")
    shape = shape_of(load_config(name if name in SHAPES and not path.exists() else str(path)))
    size, length = asked["tensor_parallel"], asked["prompt"] + asked["response"]
    if not shape.divides(size):
        raise ConfigError(
            f"--tensor-parallel {size} does not divide the model's {shape.config.num_attention_heads} attention heads, "
            f"{shape.kv_heads} KV heads and {shape.width} rows of an MLP, as vLLM asks; these do: "
            f"{', '.join(str(size) for size in range(1, 65) if shape.divides(size))}"
        )
    if asked["gpus"] % size:
        raise ConfigError(f"--gpus {asked['gpus']} is no multiple of --tensor-parallel {size}")
    gib = (gpu_memory_gib or GPUS[gpu]) * asked.get("gpu_memory_utilization", 0.9)
    names = "tensor_parallel", "max_num_seqs", "max_num_batched_tokens"
    engine = Engine(gpu=gpu, gib=gib, **{name: asked[name] for name in names if name in asked})
    precisions = Precision.BF16, Precision.INT8, Precision.FP8
    variants = [Memory(shape, engine, precision, kv_cache) for kv_cache in KVCache for precision in precisions]
    if all(one.refused(length) for one in variants):
        raise ConfigError(
            f"{asked['model']} fits in no precision. {'; '.join(f'{one}: {one.refused(length)}' for one in variants)}. "
            "Take a larger --tensor-parallel, GPUs with more memory, or shorter responses"
        )
    return variants


def _fits(variants: list[Memory], asked: dict[str, Any]) -> Group:
    """Memory of a GPU, and what its engine's KV cache holds, by variant."""
    engine, length = variants[0].engine, asked["prompt"] + asked["response"]
    title = (
        f"{asked['model']} on {asked['gpus']} x {engine.gpu}, TP {engine.tensor_parallel}: {engine.gib:.1f} GiB of a "
        f"GPU for its engine, whole sequences of {asked['prompt']} + {asked['response']} tokens"
    )
    columns = (
        "weights\nGiB/GPU",
        "KV bytes\n/token/GPU",
        "KV\ntokens",
        "sequences\nat a time",
        "of all\nengines",
        "fits",
    )
    table = Table("variant", *columns, title=title, title_justify="left", box=SIMPLE_HEAD, padding=0)
    notes = []
    for one in variants:
        reason, held = one.refused(length), one.tokens // length
        of_all = held * (asked["gpus"] // engine.tensor_parallel)
        cells = f"{one.weights / 2**30:.1f}", f"{one.kv_per_token:.0f}", f"{one.tokens}", f"{held}", f"{of_all}"
        name = f"{one}{' *' * ((one.precision, one.kv_cache) == asked.get('formats'))}"
        table.add_row(name, *(["-"] * len(cells) if reason else cells), "no" if reason else "yes")
        if reason:
            notes.append(f"{one} does not fit: {reason}.")
    if "formats" in asked:
        notes.append("* the run as it is.")
    if "max_num_seqs" in asked:
        notes.append(f"The run's engines take at most max_num_seqs={engine.max_num_seqs} at a time.")
    return Group(table, *notes, NOT_COUNTED)


def _speed_ups(base: Memory, asked: dict[str, Any]) -> Group | str:
    """What was measured of such rollouts; ``base`` is the variant in BF16."""
    if base.shape.experts:
        return "Speed-ups: no mixture of experts has been measured."
    if base.refused(asked["prompt"] + asked["response"]):
        return "Speed-ups are over BF16, which does not fit here; with a larger --tensor-parallel it may."
    rows = rows_for(base.shape.parameters / 1e9, base.engine.tensor_parallel, base.engine.gib)
    if not rows:
        return "Speed-ups: no model of about this size was measured in such engines."
    title = "The rollout's tokens/s over BF16's, measured on H200s (docs/results/throughput.md)"
    columns = "sequences x\n(prompt -> response)", "GPUs\nx GiB", "int8", "fp8", "int8 +\nINT8 KV", "nearest\nmeasured"
    table = Table(*columns, title=title, title_justify="left", box=SIMPLE_HEAD, padding=0)
    for row in rows:
        cells = ("-" if one is None else f"{one:.2f}" for one in row.speed_ups)
        table.add_row(row.workload, f"{row.gpus} x {row.gib or 'any'}", *cells, row.model)
    tail = ["tail: lengths have a long tail."] if any("tail" in row.workload for row in rows) else []
    return Group(table, *tail, CAVEAT)
