# SPDX-License-Identifier: Apache-2.0
"""The command `flashrl bench mismatch`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashrl_verl.tools.console import new_console

if TYPE_CHECKING:
    from benchmarks.mismatch import MismatchConfig


def mismatch(
    model: Annotated[
        str,
        typer.Option(
            help="A Hugging Face folder in high precision, or toy: the quickstart's model, made under --output."
        ),
    ] = "toy",
    precision: Annotated[
        str,
        typer.Option(help="Precisions, or precision:kv_cache, separated by commas; bf16 is measured in any case."),
    ] = "bf16,int8,fp8",
    prompts: Annotated[int, typer.Option(min=2, help="Prompts, one sampled response each.")] = 1024,
    tokens: Annotated[int, typer.Option(min=1, help="Longest response, in tokens.")] = 64,
    data: Annotated[
        Path | None,
        typer.Option(help="Prompts: a parquet file in verl's format. Without it, the toy task's additions."),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(min=0.01, max=1.0, help="vLLM's share of the GPU; without it, most of what is free.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts, the sampling and the toy model.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder for mismatch.json, mismatch.png and the engines' logs.")] = Path(
        "outputs/bench_mismatch"
    ),
) -> None:
    """Compare the rollout's log-probs with the trainer's, by precision, and say where the difference arises.

    Each engine gets the weights as a run sends them. The trainer's side is transformers with BF16 weights under
    autocast to BF16, as verl's FSDP engine computes. Engines run eagerly, without CUDA graphs. The same command goes on
    after a stop.
    """
    from transformers.utils import logging

    from benchmarks import mismatch as bench
    from flashrl_verl.tools.engines.arms import arms_of

    logging.disable_progress_bar()  # it would break the status line

    config = bench.MismatchConfig(
        model=model,
        arms=arms_of(precision, "--precision"),
        prompts=prompts,
        tokens=tokens,
        data=data,
        gpu_memory_utilization=gpu_memory_utilization,
        seed=seed,
        output=output.expanduser().resolve(),
    )
    _compare(config)


def _compare(config: MismatchConfig) -> None:
    """Run, print the tables, write the files."""
    from benchmarks import mismatch as bench
    from benchmarks import mismatch_kept, mismatch_report
    from flashrl_verl.tools.process_tree import Stopped

    console = new_console()
    with console.status("starting") as status:

        def progress(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                console.print(text, markup=False, highlight=False, soft_wrap=True)

        try:
            report = bench.run(config, progress)
        except Stopped as stopped:
            console.print("stopped; the same command goes on behind the engines that have answered", highlight=False)
            raise typer.Exit(stopped.exit_code) from None
    written = mismatch_report.write(report, config.output)
    mismatch_kept.forget(config.output)
    for table in mismatch_report.tables(report):
        console.print(table)
    for note in mismatch_report.notes(report):
        console.print(note, markup=False, highlight=False, style="dim")
    console.print("written: " + ", ".join(map(str, written)), highlight=False, soft_wrap=True)
