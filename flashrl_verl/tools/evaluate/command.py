# SPDX-License-Identifier: Apache-2.0
"""The command `flashrl eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashrl_verl.errors import ConfigError
from flashrl_verl.settings import Precision
from flashrl_verl.tools.console import new_console
from flashrl_verl.tools.process_tree import Stopped, stoppable


def evaluate(
    context: typer.Context,
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A run, its global_step_<N>, or a Hugging Face folder.")
    ],
    precision: Annotated[
        str, typer.Option(help="bf16, int8, fp8, or several separated by commas; compared with the first.")
    ] = "bf16",
    step: Annotated[int | None, typer.Option(help="Of a run's checkpoints; else the last.")] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Responses to each prompt.")] = 8,
    temperature: Annotated[float, typer.Option(min=0, help="Of the sampling; 0 is greedy, with --n 1.")] = 1.0,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the results; else outputs/eval/<name>.", show_default=False)
    ] = None,
) -> None:
    """Evaluate a checkpoint with verl's validation: mean@n and pass@k by precision, with 95 % intervals.

    Words after the options are Hydra overrides, for instance data.val_files=aime.parquet trainer.n_gpus_per_node=4.
    They change the configuration that the checkpoint holds; for a Hugging Face folder, the recipe's defaults (add
    experiment=<the run's>). Rerun to resume: a precision that is done is not generated again.
    """
    from flashrl_verl.tools.evaluate.evaluate import EvalConfig, run
    from flashrl_verl.tools.export.checkpoint import find

    for word in context.args:
        if word.startswith("-") or "=" not in word:
            raise ConfigError(f"{word!r} is neither an option (flashrl eval --help) nor an override key=value")
    found = find(checkpoint, step)
    config = EvalConfig(
        checkpoint=found,
        precisions=_precisions(precision),
        n=n,
        temperature=temperature,
        output=(output or Path("outputs/eval") / found.name).expanduser().resolve(),
        overrides=tuple(context.args),
    )
    try:
        with stoppable():
            typer.echo(run(config, new_console()))
    except Stopped as stopped:
        typer.echo("stopped; rerun to resume")
        raise typer.Exit(stopped.exit_code) from None
    typer.echo(f"written: {config.output}/eval.json, eval.md, and responses.jsonl by precision")


def _precisions(words: str) -> tuple[Precision, ...]:
    try:
        chosen = tuple(Precision(word.strip()) for word in words.split(","))
    except ValueError:
        chosen = ()
    if not chosen or len(set(chosen)) < len(chosen):
        raise ConfigError(f"--precision {words}: name {', '.join(p.value for p in Precision)}, each once, with commas")
    return chosen
