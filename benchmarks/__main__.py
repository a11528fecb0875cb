# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks`` (or ``flashrl bench``): one command a benchmark."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.legacy_learning.learning_archive import learning_pack, learning_unpack
from benchmarks.legacy_learning.learning_command import learning
from benchmarks.legacy_learning.learning_figure import learning_figure
from benchmarks.mismatch_command import mismatch
from benchmarks.rollout_command import rollout
from benchmarks.rollout_figure import rollout_figure
from benchmarks.training_command import training
from flashrl_verl.cli import run
from flashrl_verl.errors import ConfigError
from flashrl_verl.tools.console import new_console
from flashrl_verl.tools.engines.arms import precisions_of

app = typer.Typer(
    help="Benchmarks of learning, the rollout, the weight update, the correction and log-probs; nothing is downloaded.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(rollout)
app.command()(rollout_figure)
app.command()(mismatch)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(learning)
app.command()(training)
app.command()(learning_pack)
app.command()(learning_unpack)
app.command()(learning_figure)


@app.command("refit")
def bench_refit(
    model: Annotated[
        str,
        typer.Option(help="A name (qwen2.5-14b, qwen2.5-32b, qwen3-30b-a3b, tiny, ...), a config.json, or its folder."),
    ] = "tiny",
    precision: Annotated[
        str, typer.Option(help="FlashRL's precisions to measure, separated by commas.")
    ] = "int8,fp8,bf16",
    source: Annotated[
        str, typer.Option(help="Dtype of the weights that arrive: bf16 or fp32 (FSDP's masters).")
    ] = "bf16",
    repeats: Annotated[int, typer.Option(min=1, help="Measured updates of each kind.")] = 5,
    layers: Annotated[int | None, typer.Option(min=1, help="Decoder layers instead of the model's.")] = None,
    upstream: Annotated[
        bool, typer.Option(help="Also measure vLLM's BF16 loading and its layerwise FP8 reload (GPU).")
    ] = True,
    output: Annotated[Path, typer.Option(help="Folder for refit.json and refit.png.")] = Path("outputs/bench_refit"),
) -> None:
    """Time the weight update of a model's shape, by precision, beside the bandwidth of a copy."""
    import torch

    from benchmarks import refit, refit_report
    from flashrl_verl.tools.run_directory import check_output

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


@app.command("correction")
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
    from benchmarks import correction, correction_report

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


if __name__ == "__main__":
    run(app)
