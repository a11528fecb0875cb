# SPDX-License-Identifier: Apache-2.0
"""The command `flashrl bench learning`."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from flashrl_verl.errors import ConfigError, FlashRLError
from benchmarks.legacy_learning.tools.console import new_console

if TYPE_CHECKING:
    from rich.console import Console

    from benchmarks.legacy_learning.learning import LearningConfig, Run
    from benchmarks.legacy_learning.learning_run import State
    from benchmarks.legacy_learning.quickstart.warmup import Accuracy

DEFAULT_ARMS = "bf16:none,int8:none,int8:tis,fp8:none,fp8:tis,fp8:seq_tis"
_CPU_RUN_GIB = 8
"""Of the host's memory, about: the processes of the quickstart, a run of the same size, have 8.2 at most
(README.md)."""

UNFINISHED = 3
"""Exit code where time was over before all runs were finished: the same command goes on."""


def learning(
    context: typer.Context,
    arm: Annotated[
        str, typer.Option(help="Arms separated by commas: precision:correction, such as int8:tis.")
    ] = DEFAULT_ARMS,
    seed: Annotated[
        str, typer.Option(help="Seeds separated by commas: prompts' order and sampling, in every arm.")
    ] = "0,1,2",
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each run.")] = 200,
    parallel: Annotated[int, typer.Option(min=1, help="Runs at a time on this machine, spread over its GPUs.")] = 1,
    minutes: Annotated[
        float, typer.Option(min=5, help="Time for everything; then runs are ended, and the same command goes on.")
    ] = 60.0,
    hardware: Annotated[str | None, typer.Option(help="cuda or cpu; cuda where there is a GPU.")] = None,
    kv_cache_gib: Annotated[float, typer.Option(min=0.1, help="Each run's KV cache on a GPU, GiB.")] = 0.5,
    model_seed: Annotated[
        int, typer.Option(min=0, help="Seed of the model that all runs start from, and of the chains.")
    ] = 0,
    hidden_size: Annotated[int | None, typer.Option(min=128, help="Channels of the model, a multiple of 64.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Decoder layers of the model.")] = None,
    chain_steps: Annotated[int | None, typer.Option(min=1, help="Additions and subtractions of a chain.")] = None,
    target_accuracy: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Sampled accuracy at which the supervised warm-up stops.")
    ] = None,
    outliers: Annotated[
        int | None,
        typer.Option(
            help="Make two channels of every layer so many times as large, a power of two: more mismatch in INT8."
        ),
    ] = None,
    first_step_limit: Annotated[
        float, typer.Option(min=1, help="Seconds to a run's first line of metrics; then it is ended, as failed.")
    ] = 600.0,
    step_limit: Annotated[
        float, typer.Option(min=1, help="Seconds from a line of metrics to the next; as above.")
    ] = 120.0,
    retry: Annotated[bool, typer.Option("--retry", help="Try runs once more that failed twice.")] = False,
    output: Annotated[
        Path, typer.Option(help="Folder for the model, the runs, learning.json and learning.png.")
    ] = Path("outputs/bench_learning"),
) -> None:
    """Learning curves on chains of sums, by precision of the rollout and correction, over seeds; in pieces, if need be.

    The same command goes on after a stop, and arms and seeds may be added. Words after the options are Hydra overrides
    for every run. Exit code 0: all runs are finished and evaluated in BF16. 3: time was over first. 1: a run failed
    twice, or no run trained a step.
    """
    from benchmarks.legacy_learning.learning import LearningConfig, arms_of, seeds_of
    from benchmarks.legacy_learning.tools.engines.visible_gpus import hardware_of
    from benchmarks.legacy_learning.tools.run_directory import check_output

    started = time.monotonic()
    _require_overrides(context.args)
    check_output(output)
    config = LearningConfig(
        output=output.expanduser().resolve(),
        arms=arms_of(arm),
        seeds=seeds_of(seed),
        steps=steps,
        parallel=parallel,
        minutes=minutes,
        hardware=hardware_of(hardware),
        kv_cache_gib=kv_cache_gib,
        model_seed=model_seed,
        overrides=tuple(context.args),
        **_assets(hidden_size, layers, chain_steps, target_accuracy, outliers),
    )
    over, no_news_s = started + 60 * minutes, (first_step_limit, step_limit)
    raise typer.Exit(_learn(config, over, no_news_s, new_console(), retry=retry))


def _require_overrides(words: list[str]) -> None:
    for word in words:
        if word.startswith("-") or not ("=" in word or word.startswith("~")):
            raise ConfigError(
                f"{word!r} is neither an option (flashrl bench learning --help) nor an override key=value."
            )


def _assets(
    hidden: int | None, layers: int | None, chain_steps: int | None, target: float | None, outliers: int | None
) -> dict[str, object]:
    """The parts of the configuration that are about the model and the task."""
    from dataclasses import replace

    from benchmarks.legacy_learning.learning import CHAIN, MODEL, WARMUP
    from benchmarks.legacy_learning.quickstart.outliers import OutlierConfig

    if hidden is not None and hidden % 64:
        raise ConfigError(f"--hidden-size {hidden} is no multiple of 64, two heads")
    sizes = {"hidden_size": hidden, "intermediate_size": hidden and 2 * hidden, "num_layers": layers}
    return {
        "model": replace(MODEL, **{name: size for name, size in sizes.items() if size is not None}),
        "chain": CHAIN if chain_steps is None else replace(CHAIN, steps=chain_steps),
        "warmup": WARMUP if target is None else replace(WARMUP, target_accuracy=target),
        "outliers": None if outliers is None else OutlierConfig(factor=outliers),
    }


def _learn(
    config: LearningConfig, over: float, no_news_s: tuple[float, float], console: Console, *, retry: bool
) -> int:
    """Make what is missing, run, evaluate, report; returns the exit code.

    Args:
        config: what.
        over: when the time is, by ``time.monotonic``.
        no_news_s: longest waits for a run's first line of metrics, and for the next one.
        console: where people read.
        retry: what failed twice is tried again.
    """
    from benchmarks.legacy_learning import learning as bench
    from benchmarks.legacy_learning import learning_recipe
    from benchmarks.legacy_learning.learning_board import Board
    from benchmarks.legacy_learning.learning_run import states_of
    from benchmarks.legacy_learning.learning_schedule import Event, Limits, News, Schedule, stagger
    from benchmarks.legacy_learning.tools.process_tree import Stopped

    _require_memory(config)
    learning_recipe.check_arms(config)
    bench.check_settings(config)
    _make(config, console)
    bench.write_settings(config)
    first_s, between_s = no_news_s
    limits = Limits(
        parallel=config.parallel,
        gpus=learning_recipe.gpus(config),
        seconds=over - time.monotonic(),
        stagger_s=stagger(os.cpu_count() or 1),
        first_s=first_s,
        between_s=between_s,
    )
    code, errors = None, []
    before, began = states_of(config.runs(), config.steps), time.monotonic()
    try:
        with Board(console, config.steps) as board:

            def tell(news: News) -> None:
                board.tell(news)
                if news.event is Event.FINISHED:  # at once: this is small enough to be carried to another machine
                    _keep(config, [news.state.run])  # what goes wrong is said where all are looked at, in `_evaluate`

            prepare = learning_recipe.preparation(config)
            Schedule(config.runs(), config.steps, limits, prepare, tell, board.watch, retry=retry).carry_out()
        errors = _evaluate(config, over - limits.ending_s, console)
    except Stopped as stopped:
        code = stopped.exit_code
    minutes = (time.monotonic() - began) / 60
    found = _report(config, console, _Since(before, minutes, stopped=code is not None, failed=bool(errors)))
    if code is None and errors:  # behind the report: what was trained is there all the same
        raise FlashRLError("\n".join(errors))
    return found if code is None else code


def _require_memory(config: LearningConfig) -> None:
    """Refuse more runs at a time than a machine without a GPU has memory for: Linux would end some, or a neighbour.

    Raises:
        ConfigError: they are too many.
    """
    import psutil

    there, together = psutil.virtual_memory().total / 2**30, min(config.parallel, len(config.runs()))
    if config.hardware == "cpu" and together > 1 and together * _CPU_RUN_GIB > there:
        raise ConfigError(
            f"--parallel {config.parallel}: a run takes some {_CPU_RUN_GIB} GiB of memory where there is no GPU, and "
            f"this machine has {there:.0f}. Remedy: --parallel {max(1, int(there // _CPU_RUN_GIB))}; "
            "scripts/figure_learning.sh has it from FIGURE_RUNS"
        )


def _evaluate(config: LearningConfig, over: float, console: Console) -> list[str]:
    """Ask the last weights of all runs in BF16 when none is left to run; returns why some are not asked, but for
    time."""
    from benchmarks.legacy_learning import learning_bf16 as bf16
    from benchmarks.legacy_learning.learning_recipe import compose_run
    from benchmarks.legacy_learning.learning_run import Status, states_of

    states = states_of(config.runs(), config.steps)
    finished = [state.run for state in states if state.status is Status.FINISHED]
    lost = _keep(config, finished) if time.monotonic() < over else {}
    there, errors = [run for run in finished if run not in lost], list(lost.values())
    pairs = bf16.left_over(config, there)
    if not finished or not pairs or len(finished) + sum(s.status is Status.FAILED for s in states) < len(states):
        return errors
    left = over - time.monotonic()
    if left >= bf16.LEAST_S:
        console.print(
            f"asking {len(pairs)} models in BF16, log in {config.output / 'bf16.log'}", highlight=False, soft_wrap=True
        )
        try:
            bf16.ask(config, compose_run(config, finished[0]), pairs, left)
        except bf16.TimeOver:
            pass
        except FlashRLError as error:
            errors.append(str(error))
    return errors


def _keep(config: LearningConfig, finished: list[Run]) -> dict[Run, str]:
    """Write the last weights of runs that have none yet; returns why some cannot be written."""
    from benchmarks.legacy_learning import learning_bf16 as bf16
    from benchmarks.legacy_learning.tools.export.command import quiet

    lost = {}
    with quiet():
        for run in finished:
            try:
                bf16.keep_weights(run, config.steps)
            except (FlashRLError, OSError) as error:
                lost[run] = str(error)
    return lost


class _Since(NamedTuple):
    """What a command has done."""

    before: list[State]
    """The runs when it began with them."""
    minutes: float
    """Since then."""
    stopped: bool
    """By the user, before time was over."""
    failed: bool
    """Models could not be asked in BF16: an error says why, and how many are left is not said as if time had been
    over."""


def _report(config: LearningConfig, console: Console, since: _Since) -> int:
    """Tables and files; returns the exit code."""
    from benchmarks.legacy_learning import learning_bf16, learning_report
    from benchmarks.legacy_learning.learning_board import summary, what_is_left
    from benchmarks.legacy_learning.learning_results import collect
    from benchmarks.legacy_learning.learning_run import Status, states_of

    states = states_of(config.runs(), config.steps)
    report = collect(config, states)
    for table in learning_report.tables(report):
        console.print(table)
    for note in learning_report.notes(report):
        console.print(note, markup=False, highlight=False, style="dim", soft_wrap=True)
    console.print("written: " + ", ".join(map(str, learning_report.write(report))), highlight=False, soft_wrap=True)
    console.print(f"runs: {summary(states)}", highlight=False)
    there = {state.status for state in states}
    unfinished = bool(there & {Status.NEW, Status.UNFINISHED})
    finished = [] if since.failed else [state.run for state in states if state.status is Status.FINISHED]
    models = len(learning_bf16.left_over(config, finished)) if finished else 0
    if unfinished or models:
        what = learning_bf16.models_left(models, config.hardware)
        if unfinished:
            what = what_is_left(since.before, states, config.steps, since.minutes, stopped=since.stopped)
        why = "Stopped" if since.stopped else "Time was over first"
        console.print(f"{why}: {what}; the same command goes on.", highlight=False, soft_wrap=True)
        return UNFINISHED
    if Status.FAILED in there:
        console.print("Runs that failed twice are tried again with --retry.", highlight=False)
        return 1
    return 0


def _make(config: LearningConfig, console: Console) -> None:
    from benchmarks.legacy_learning import learning as bench
    from benchmarks.legacy_learning.tools.progress import PLAIN_INTERVAL

    spoke = -math.inf  # the first line at once
    with console.status("making the model: supervised warm-up") as status:

        def show(step: int, accuracy: Accuracy) -> None:
            nonlocal spoke
            line = (
                f"supervised warm-up: update {step}, accuracy {accuracy.sampled:.3f} of {config.warmup.target_accuracy}"
            )
            status.update(line)
            if not console.is_terminal and time.monotonic() - spoke > PLAIN_INTERVAL:
                spoke = time.monotonic()
                console.print(line, highlight=False)

        assets = bench.make(config, show)
    made = assets.made
    console.print(
        f"model: {made['parameters']:,} parameters, {made['warmup_steps']} updates of warm-up in "
        f"{made['warmup_seconds']} s{' (made before, used again)' if assets.reused else ''}; held-out accuracy "
        f"{made['test']['greedy']:.3f} greedy, {made['test']['sampled']:.3f} sampled",
        highlight=False,
        soft_wrap=True,
    )
