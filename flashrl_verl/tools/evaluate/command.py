# SPDX-License-Identifier: Apache-2.0
"""The command `flashrl eval`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashrl_verl.errors import ConfigError
from flashrl_verl.tools.console import new_console
from flashrl_verl.tools.export.command import IGNORE, KEEP_FIRST, KEEP_LAST, quiet, say, say_kv_cache, say_layers

if TYPE_CHECKING:
    from rich.console import Console

    from flashrl_verl.settings import Precision
    from flashrl_verl.tools.evaluate.evaluate import EvalConfig


def evaluate(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="<trainer.default_local_dir>/global_step_N, or a Hugging Face folder."
        ),
    ],
    data: Annotated[list[Path], typer.Option(help="Problems: a parquet file in verl's format; may be repeated.")],
    precision: Annotated[
        str, typer.Option(help="bf16, int8, fp8, or several separated by commas; compared with the first.")
    ] = "bf16",
    n: Annotated[int, typer.Option("--n", min=1, help="Responses to each problem.")] = 8,
    temperature: Annotated[float, typer.Option(help="Of the sampling; 0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Probability mass to sample from.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest response, in tokens.")] = 4096,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling and of the intervals.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many problems.")] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs of an engine.")] = 1,
    reward_function: Annotated[
        str | None,
        typer.Option(metavar="PATH:NAME", help="As reward.custom_reward_function; else verl's by data source."),
    ] = None,
    threshold: Annotated[float, typer.Option(help="Least value (acc, else score) of a correct response.")] = 1.0,
    ignore: Annotated[list[str] | None, IGNORE] = None,
    keep_first_layers: Annotated[int | None, KEEP_FIRST] = None,
    keep_last_layers: Annotated[int | None, KEEP_LAST] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for eval.json and the responses; else outputs/eval/<run>-<checkpoint>.", show_default=False
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what another evaluation left in --output.")] = False,
) -> None:
    """Evaluate a checkpoint apart from training: mean@n and pass@k by precision, with 95 % intervals.

    BF16 is vLLM without quantization; the 8-bit ones are the rollout's engines. Engines run one after another. A
    precision that is finished is not generated again.
    """
    from flashrl_verl.tools.engines.arms import precisions_of
    from flashrl_verl.tools.evaluate.evaluate import EvalConfig

    console = new_console()
    precisions = precisions_of(precision)
    with quiet():
        name, layers = _layers(console, checkpoint, precisions, (ignore or [], keep_first_layers, keep_last_layers))
    config = EvalConfig(
        checkpoint=checkpoint,
        data=tuple(path.expanduser() for path in data),
        precisions=precisions,
        samples=n,
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        seed=seed,
        limit=limit,
        tensor_parallel_size=tensor_parallel_size,
        reward=reward_function,
        threshold=threshold,
        layers=layers,
        output=(output or Path("outputs/eval") / name).expanduser(),
        force=force,
    )
    _run(config, console)


def _layers(
    console: Console, checkpoint: Path, precisions: Sequence[Precision], said: tuple[list[str], int | None, int | None]
) -> tuple[str, dict[str, Any]]:
    """The checkpoint's name, and the layers that its 8-bit engines keep in BF16."""
    from flashrl_verl.settings import Precision
    from flashrl_verl.tools.export.chosen import layers_of
    from flashrl_verl.tools.export.source import open_checkpoint

    given = said != ([], None, None)
    eight = any(one is not Precision.BF16 for one in precisions)
    if given and not eight:
        raise ConfigError("--ignore and the kept layers have no effect with --precision bf16: leave them out")
    opened = open_checkpoint(checkpoint)
    layers = layers_of(opened.settings, *said)
    if eight:
        say_layers(console, layers, said, opened.settings)
    say_kv_cache(console, opened.settings, "", "engines have BF16 ones")
    return opened.name, layers


def _run(config: EvalConfig, console: Console) -> None:
    from flashrl_verl.tools.bar import Bar
    from flashrl_verl.tools.evaluate.evaluate import run
    from flashrl_verl.tools.process_tree import Stopped, stoppable
    from flashrl_verl.tools.run_directory import check_output

    check_output(config.output)
    try:
        with stoppable(), quiet(), Bar(console, "done") as bar:
            report = run(config, bar)
    except Stopped as stopped:
        say(console, f"stopped; the same command goes on behind the responses that are in {config.output}")
        raise typer.Exit(stopped.exit_code) from None
    written = report.write(config.output)
    console.print(report.table())
    for note in report.notes():
        say(console, note)
    say(console, f"written: {written}, and responses.jsonl beside it by precision")
