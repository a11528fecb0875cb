# SPDX-License-Identifier: Apache-2.0
"""The console script `flashrl`. Commands import what they need when they are called: `flashrl --help` must be
quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashrl_verl.errors import ConfigError, FlashRLError

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    help="FlashRL for verl: 8-bit rollouts on vLLM for RL post-training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def quickstart(
    context: typer.Context,
    output: Annotated[Path, typer.Option(help="Directory of the assets, log, metrics and report.")] = Path(
        "outputs/quickstart"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Seed of the model, the data and their order.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")] = False,
) -> None:
    """Train a toy model end to end: warm-up, DAPO with INT8 rollouts, report. Minutes on two CPU cores.

    Words after the options are Hydra overrides for the training, for instance flashrl.precision=bf16
    trainer.total_training_steps=10.
    """
    from flashrl_verl.quickstart import QuickstartConfig, run_quickstart

    for word in context.args:
        if word.startswith("-") or not ("=" in word or word.startswith("~")):
            raise ConfigError(f"{word!r} is neither an option (flashrl quickstart --help) nor an override key=value.")
    config = QuickstartConfig(output=output.resolve(), seed=seed, resume=resume, overrides=tuple(context.args))
    raise typer.Exit(run_quickstart(config, _console()))


@app.command()
def report(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Run directories, or metrics.jsonl files.")],
) -> None:
    """Print a table of each run, and write report.md and curves.png beside its metrics."""
    from flashrl_verl import report as reports

    console = _console()
    for path in paths:
        result = reports.load(path)
        written = reports.write(result)
        console.print(result.table())
        console.print("report: " + ", ".join(map(str, written)), highlight=False, soft_wrap=True)


@app.command()
def version() -> None:
    """Print this package's version, and whether those of verl, vLLM and torch have been tested with it."""
    from flashrl_verl import __version__
    from flashrl_verl.compat import check_versions

    typer.echo(f"flashrl-verl {__version__}")
    for finding in check_versions():
        typer.echo(str(finding))


def _console() -> Console:
    from rich.console import Console

    # Where the output goes to a file, rich assumes 80 columns, which breaks the table's lines.
    return Console() if sys.stdout.isatty() else Console(width=120)


def main() -> None:
    """Run the command line; an error that is meant for users is one message, not a traceback."""
    try:
        app()
    except FlashRLError as error:
        typer.secho(f"{type(error).__name__}: {error}", fg="red", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
