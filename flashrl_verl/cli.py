# SPDX-License-Identifier: Apache-2.0
"""The console script `flashrl`. Commands import what they need when they are called: `flashrl --help` must be
quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from flashrl_verl.errors import ConfigError, FlashRLError, environment_needed
from flashrl_verl.tools.check import check
from flashrl_verl.tools.console import new_console
from flashrl_verl.tools.data import data
from flashrl_verl.tools.evaluate import evaluate
from flashrl_verl.tools.export.command import export
from flashrl_verl.tools.plan.command import plan

app = typer.Typer(
    help="FlashRL for verl: 8-bit rollouts on vLLM for RL post-training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def quickstart(
    context: typer.Context,
    output: Annotated[Path, typer.Option(help="Directory of the assets, log, metrics, checkpoints and report.")] = Path(
        "outputs/quickstart"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Seed of the model, the data and their order.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the training; else the experiment's 28.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the last checkpoint of the run in --output.")
    ] = False,
) -> None:
    """Train a toy model end to end: warm-up, DAPO with INT8 rollouts, report. Minutes on two CPU cores.

    Words after the options are Hydra overrides for the training, for instance flashrl.precision=bf16.
    """
    from flashrl_verl.quickstart.run import QuickstartConfig, run_quickstart

    for word in context.args:
        if word.startswith("-") or not ("=" in word or word.startswith("~")):
            raise ConfigError(f"{word!r} is neither an option (flashrl quickstart --help) nor an override key=value.")
    config = QuickstartConfig(
        output=output.expanduser().resolve(), seed=seed, steps=steps, resume=resume, overrides=tuple(context.args)
    )
    raise typer.Exit(run_quickstart(config, new_console()))


@app.command()
def report(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_OR_JSONL...", help="Runs' folders, metrics files, or folders of these."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for the picture; else beside the metrics of one run, outputs/report for several."),
    ] = None,
) -> None:
    """Compare runs, finished or not: a table with a row a run, and five plots in report.png."""
    from flashrl_verl.tools import report as reports

    runs = reports.load(*paths)
    console = new_console()
    console.print(reports.table(runs))
    beside = paths[0] if paths[0].is_dir() else paths[0].parent
    folder = output.expanduser() if output else beside if len(paths) == 1 else Path("outputs/report")
    console.print(f"plots: {reports.draw(runs, folder)}", highlight=False, soft_wrap=True)


app.command()(data)
app.command()(plan)
app.command()(check)
app.command()(export)
app.command("eval")(evaluate)


@app.command()
def version() -> None:
    """Print this package's version, and whether those of verl, vLLM and torch have been tested with it."""
    from flashrl_verl import __version__
    from flashrl_verl.upstream.versions import check_versions

    typer.echo(f"flashrl-verl {__version__}")
    for finding in check_versions():
        typer.echo(str(finding))


def run(application: typer.Typer) -> None:
    """Run a command line; an error that is meant for users is one message, not a traceback."""
    try:
        with environment_needed():
            application()
    except (FlashRLError, OSError) as error:  # no such file, no space, no rights, ...
        typer.secho(f"{type(error).__name__}: {error}", fg="red", err=True)
        sys.exit(1)


def main() -> None:
    """Run `flashrl`."""
    run(app)


if __name__ == "__main__":
    main()
