# SPDX-License-Identifier: Apache-2.0
"""The console script `flashrl`. Commands import what they need when they are called: `flashrl --help` must be
quick."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashrl_verl.bench.learning_archive import learning_pack, learning_unpack
from flashrl_verl.bench.learning_command import learning
from flashrl_verl.bench.learning_figure import learning_figure
from flashrl_verl.bench.mismatch_command import mismatch
from flashrl_verl.bench.rollout_command import rollout
from flashrl_verl.bench.rollout_figure import rollout_figure
from flashrl_verl.bench.training_command import training
from flashrl_verl.check.command import check
from flashrl_verl.console import new_console
from flashrl_verl.data.command import data
from flashrl_verl.environment import environment_needed
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.evaluate.command import evaluate
from flashrl_verl.export.command import export
from flashrl_verl.plan.command import plan

if TYPE_CHECKING:
    from flashrl_verl.config import Precision

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
    config = QuickstartConfig(output=output.expanduser().resolve(), seed=seed, resume=resume, overrides=tuple(context.args))
    raise typer.Exit(run_quickstart(config, new_console()))


@app.command()
def report(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN_OR_JSONL...", help="Run directories, or metrics .jsonl files.")],
    name: Annotated[
        list[str] | None,
        typer.Option(help="Name of a run, once for each in their order; else from what it recorded."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for report.html, report.md, overview.png and pictures/ (several runs: outputs/report)."),
    ] = None,
    smooth: Annotated[int, typer.Option(min=1, help="Draw means of so many last logged values.")] = 1,
    group: Annotated[bool, typer.Option("--group", help="Draw runs of one name (seeds) as mean and range.")] = False,
) -> None:
    """Compare runs in one HTML page and in Markdown.

    One run without --output: its table, and report.md and curves.png beside its metrics, as the quickstart makes them.
    """
    console = new_console()
    if len(paths) == 1 and output is None and not (name or group or smooth > 1):
        from flashrl_verl import report as reports

        result = reports.load(paths[0])
        console.print(result.table())
        written = reports.write(result)
    else:
        from flashrl_verl.report import comparison
        from flashrl_verl.run_directory import check_output

        folder = output or Path("outputs/report")
        check_output(folder)
        result = comparison.compare(paths, name or (), smooth, group)
        console.print(result.table())
        for note in filter(None, [*result.notes, result.absent_line()]):
            console.print(note, markup=False, highlight=False, style="dim", soft_wrap=True)
        written = comparison.write(result, folder)
    console.print("report: " + ", ".join(map(str, written)), highlight=False, soft_wrap=True)


app.command()(data)
app.command()(plan)
app.command()(check)
app.command()(export)
app.command("eval")(evaluate)


bench = typer.Typer(
    help="Benchmarks of learning, the rollout, the weight update, the correction and log-probs; nothing is downloaded.",
    no_args_is_help=True,
)
app.add_typer(bench, name="bench")
bench.command()(rollout)
bench.command()(rollout_figure)
bench.command()(mismatch)
bench.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(learning)
bench.command()(training)
bench.command()(learning_pack)
bench.command()(learning_unpack)
bench.command()(learning_figure)


@bench.command("refit")
def bench_refit(
    model: Annotated[
        str, typer.Option(help="A name (qwen2.5-14b, qwen2.5-32b, qwen3-30b-a3b, tiny, ...), a config.json, or its folder.")
    ] = "tiny",
    precision: Annotated[
        str, typer.Option(help="FlashRL's precisions to measure, separated by commas; fp8_block too.")
    ] = "int8,fp8,bf16",
    source: Annotated[str, typer.Option(help="Dtype of the weights that arrive: bf16 or fp32 (FSDP's masters).")] = "bf16",
    repeats: Annotated[int, typer.Option(min=1, help="Measured updates of each kind.")] = 5,
    layers: Annotated[int | None, typer.Option(min=1, help="Decoder layers instead of the model's.")] = None,
    upstream: Annotated[bool, typer.Option(help="Also measure vLLM's BF16 loading and its layerwise FP8 reload (GPU).")] = True,
    output: Annotated[Path, typer.Option(help="Folder for refit.json and refit.png.")] = Path("outputs/bench_refit"),
) -> None:
    """Time the weight update of a model's shape, by precision, beside the bandwidth of a copy."""
    import torch

    from flashrl_verl.bench import refit, refit_report
    from flashrl_verl.run_directory import check_output

    sources = {"bf16": torch.bfloat16, "fp32": torch.float32}
    if source not in sources:
        raise ConfigError(f"--source {source!r} is not one of {', '.join(sources)}")
    precisions = list(precisions_of(precision))
    check_output(output)
    # vLLM and verl talk on standard output while models are built; what goes wrong raises.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    warnings.simplefilter("ignore")
    console = new_console()
    with console.status("starting") as status:
        report = refit.run(
            model,
            precisions,
            output,
            source=sources[source],
            repeats=repeats,
            layers=layers,
            upstream=upstream and torch.cuda.is_available(),
            progress=status.update,
        )
    written = refit_report.write(report, output)
    console.print(refit_report.table(report))
    console.print("written: " + ", ".join(map(str, written)), highlight=False, soft_wrap=True)


@bench.command("correction")
def bench_correction(
    responses: Annotated[int, typer.Option(min=2, help="Responses of a step: prompts x samples.")] = 8192,
    tokens: Annotated[str, typer.Option(help="Longest responses in tokens, separated by commas.")] = "2048,8192,20480",
    ranks: Annotated[int, typer.Option(min=1, help="Data-parallel ranks of the actor, for FlashRL's part.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each part.")] = 3,
    output: Annotated[Path, typer.Option(help="Folder for correction.json and correction.png.")] = Path(
        "outputs/bench_correction"
    ),
) -> None:
    """Time the mismatch correction and its memory: on verl's driver, and on one of FlashRL's actor ranks.

    On the CPU, where both compute it. The default needs 12 GiB of memory and some minutes.
    """
    from flashrl_verl.bench import correction, correction_report

    try:
        lengths = [int(word) for word in tokens.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise ConfigError(f"--tokens {tokens!r} is not a list of positive numbers, such as 2048,8192")
    console = new_console()
    with console.status("starting") as status:
        report = correction.run(responses, lengths, ranks, repeats, status.update)
    written = correction_report.write(report, output)
    console.print(correction_report.table(report))
    console.print("written: " + ", ".join(map(str, written)), highlight=False, soft_wrap=True)


def precisions_of(words: str) -> tuple[Precision, ...]:
    """Read ``--precision``: names separated by commas."""
    from flashrl_verl.config import Precision

    chosen = []
    for word in filter(None, map(str.strip, words.split(","))):
        try:
            chosen.append(Precision(word))
        except ValueError:
            names = ", ".join(p.value for p in Precision)
            raise ConfigError(f"--precision {words}: {word!r} is not one of {names}") from None
    if not chosen:
        raise ConfigError(f"--precision {words!r} names no precision")
    return tuple(chosen)


@app.command()
def version() -> None:
    """Print this package's version, and whether those of verl, vLLM and torch have been tested with it."""
    from flashrl_verl import __version__
    from flashrl_verl.compat import check_versions

    typer.echo(f"flashrl-verl {__version__}")
    for finding in check_versions():
        typer.echo(str(finding))


def run(application: typer.Typer) -> None:
    """Run a command line; an error that is meant for users is one message, not a traceback."""
    try:
        with environment_needed():
            application()
    except FlashRLError as error:
        typer.secho(f"{type(error).__name__}: {error}", fg="red", err=True)
        sys.exit(1)


def main() -> None:
    """Run `flashrl`."""
    run(app)


if __name__ == "__main__":
    main()
