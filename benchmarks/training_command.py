# SPDX-License-Identifier: Apache-2.0
"""The command `flashrl bench training`."""

from __future__ import annotations

import datetime
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashrl_verl.errors import ConfigError
from flashrl_verl.tools.console import new_console
from flashrl_verl.trainer.atomic_write import write_whole

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.training import Pass, TrainingConfig

FILE = "training.json"


def training(
    model: Annotated[str, typer.Option(help="A name (qwen2.5-32b, ...), a config.json, or its folder.")] = "tiny",
    layers: Annotated[str, typer.Option(help="Depths of the two models that are timed, separated by a comma.")] = "1,2",
    tokens: Annotated[int, typer.Option(min=2, help="Of one sequence, which is one micro-batch.")] = 8192,
    repeats: Annotated[int, typer.Option(min=1, help="After one that is not measured.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and tokens.")] = 0,
    hardware: Annotated[str | None, typer.Option(help="cuda or cpu; cuda where there is a GPU.")] = None,
    output: Annotated[Path, typer.Option(help=f"Folder for {FILE}.")] = Path("outputs/bench_training"),
) -> None:
    """Time old log-probs and policy updates of a model's shape on one GPU, or on the CPU, as `flashrl plan` counts
    them."""
    from benchmarks import training as bench
    from flashrl_verl.tools.engines.visible_gpus import hardware_of
    from flashrl_verl.tools.run_directory import check_output

    check_output(output)
    config = bench.TrainingConfig(
        model=model,
        layers=_depths(layers),
        tokens=tokens,
        repeats=repeats,
        device=hardware_of(hardware),
        seed=seed,
    )
    console = new_console()
    found = bench.measure(config, lambda text: console.print(text, markup=False, highlight=False))
    path = output.expanduser() / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(record(config, found), indent=1) + "\n").encode())
    console.print(_table(config, found, device_of(config)))
    console.print(f"written: {path}", highlight=False, soft_wrap=True)


def record(config: TrainingConfig, found: list[Pass]) -> dict[str, object]:
    """Everything, as JSON takes it."""
    from flashrl_verl.tools.software import software

    environment = software() | {"device": device_of(config), "date": datetime.date.today().isoformat()}
    return {"settings": asdict(config), "environment": environment, "passes": [asdict(one) for one in found]}


def device_of(config: TrainingConfig) -> str:
    """Name of what was timed."""
    import torch

    return torch.cuda.get_device_name() if config.device == "cuda" else "CPU"


def _depths(words: str) -> tuple[int, int]:
    parts = [word.strip() for word in words.split(",")]
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--layers {words!r} is not two numbers, such as 2,6")
    few, many = map(int, parts)
    return few, many


def _table(config: TrainingConfig, found: list[Pass], device: str) -> Table:
    from rich.table import Table

    table = Table(title=f"{config.model} on {device}, one sequence of {config.tokens} tokens", title_justify="left")
    for name in ("pass", "layer ms", "head ms", "whole model ms", "tokens/s", "of the data sheet's BF16 (range)"):
        table.add_column(name, justify="left" if name == "pass" else "right")
    for one in found:
        between = "noise" if one.share_range is None else "{:.0%}-{:.0%}".format(*one.share_range)
        share = "-" if one.share is None else f"{one.share:.0%} ({between})"
        cells = (f"{seconds * 1e3:.2f}" for seconds in (one.layer_s, one.head_s, one.whole_s))
        table.add_row(one.name, *cells, f"{config.tokens / one.whole_s:.0f}", share)
    return table
