# SPDX-License-Identifier: Apache-2.0
"""The quickstart: make a toy model, train it with the recipe in a process of its own, watch it, report.

What is trained, and how, is the recipe's affair (`experiment=quickstart`); this file adds paths, a seed and
the hardware.
"""

from __future__ import annotations

import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.quickstart.assets import Assets, AssetsConfig, make_assets
from flashrl_verl.quickstart.model import ToyModelConfig
from flashrl_verl.settings import Precision
from flashrl_verl.tools import report, run_directory
from flashrl_verl.tools.log_excerpt import last_error
from flashrl_verl.tools.process_tree import ProcessTree, Stopped, stoppable
from flashrl_verl.tools.progress import PLAIN_INTERVAL, Display
from flashrl_verl.tools.recipe_process import MODULE, ROOT, compose, environment, quoted
from flashrl_verl.tools.software import installed_versions
from flashrl_verl.validation import check_paths, validate_config

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from rich.console import Console

    from flashrl_verl.quickstart.warmup import Accuracy


@dataclass(frozen=True, kw_only=True)
class QuickstartConfig:
    """What the command line of `flashrl quickstart` says."""

    output: Path
    """Directory of the assets, log, metrics and report."""
    seed: int = 0
    """Of the model, the split, and the order of the prompts. Sampling in vLLM is not deterministic across
    batches."""
    resume: bool = False
    """Go on from the last checkpoint instead of starting afresh."""
    overrides: tuple[str, ...] = ()
    """Hydra overrides for the training; they win over what the quickstart sets."""


def training_overrides(config: QuickstartConfig) -> list[str]:
    """The words after `python -m recipe.flashrl.main_flashrl`."""
    words = [] if _sets(config.overrides, "experiment") else ["experiment=quickstart"]
    if not _sets(config.overrides, "hardware"):
        import torch

        words.append(f"hardware={'cuda' if torch.cuda.is_available() else 'cpu'}")
    words += [
        f"quickstart.assets={quoted(str(config.output / 'assets'))}",
        f"trainer.default_local_dir={quoted(str(config.output / 'checkpoints'))}",
        f"data.seed={config.seed}",
        *(["trainer.resume_mode=auto"] if config.resume else []),
    ]
    return [*words, *config.overrides]


def _sets(overrides: Sequence[str], key: str) -> bool:
    return any(word.lstrip("+").partition("=")[0] == key for word in overrides)


def check(config: QuickstartConfig) -> tuple[list[str], DictConfig]:
    """Everything that can be refused before anything is made or moved, in seconds.

    Args:
        config: the command line.

    Returns:
        The words for the recipe, and the configuration they compose.

    Raises:
        FlashRLError: an option, the configuration, a path or the run to be resumed is at fault.
    """
    from omegaconf import OmegaConf

    run_directory.check_output(config.output)
    overrides = training_overrides(config)
    composed = compose(overrides)
    loggers = composed.trainer.logger
    loggers = [loggers] if isinstance(loggers, str) else list(loggers or [])
    if "file" not in loggers:  # the progress and the report are read from it
        overrides.append(f"trainer.logger=[{','.join([*loggers, 'file'])}]")
        composed = compose(overrides)
    validate_config(composed)
    total = composed.trainer.total_training_steps
    if not isinstance(total, int) or total < 1:
        words = "null" if total is None else total
        raise ConfigError(
            f"trainer.total_training_steps={words}: the quickstart needs a number of steps to run to, from 1 on."
        )
    check_paths(composed, root=ROOT, made_later=config.output / "assets")
    OmegaConf.resolve(composed)
    if config.resume:
        run_directory.check_resumable(config.output, _checkpoints(composed), composed, config.seed, ROOT)
    return overrides, composed


def _checkpoints(composed: DictConfig) -> Path:
    return ROOT / composed.trainer.default_local_dir  # the recipe is started in the checkout


def run_quickstart(config: QuickstartConfig, console: Console) -> int:
    """Run it all.

    Args:
        config: the command line.
        console: where people read.

    Returns:
        The exit code: 0, the training's own, 1 if it ended before its last step, 128 + n after signal n.

    Raises:
        FlashRLError: the assets or the configuration are at fault; nothing was trained.
    """
    started = time.monotonic()
    console.print(
        f"quickstart in {config.output}: checking the configuration", highlight=False, soft_wrap=True, markup=False
    )
    overrides, composed = check(config)
    total = composed.trainer.total_training_steps
    if not config.resume and (aside := run_directory.move_aside(config.output, _checkpoints(composed), ROOT)):
        console.print(f"results of an earlier run moved to {aside}", highlight=False, soft_wrap=True)
    run = run_directory.begin_attempt(
        config.output, _facts(config, overrides, composed), composed, resume=config.resume
    )
    attempt = run["attempts"][-1]
    log = config.output / run_directory.LOG_FILE
    log_from = log.stat().st_size if log.is_file() else 0
    with stoppable():
        try:
            assets = _assets(config, Precision(composed.flashrl.precision), console)
            attempt["seconds"]["assets"] = time.monotonic() - started
            run["assets"] = assets.made
            code = _train(config.output, overrides, total, run, log_from, console)
        except Stopped as stopped:
            console.print("[yellow]Stopped.[/]")
            code = attempt["exit_code"] = stopped.exit_code
        finally:
            attempt["seconds"]["total"] = time.monotonic() - started
            run_directory.write_record(config.output, run)
    code = _conclude(config.output, code, total, log_from, console)
    if code:
        console.print(how_to_go_on(composed), highlight=False, soft_wrap=True, markup=False)
    return code


def _facts(config: QuickstartConfig, overrides: list[str], composed: DictConfig) -> dict[str, Any]:
    from omegaconf import OmegaConf

    correction = composed.algorithm.rollout_correction
    return {
        "command": shlex.join(["python", "-m", MODULE, *overrides]),
        "hardware": f"{composed.trainer.device}, {os.cpu_count()} CPU cores, {platform.machine()}",
        "precision": str(composed.flashrl.precision),
        "correction": OmegaConf.to_container(correction, resolve=True),
        "seed": config.seed,
        "total_steps": composed.trainer.total_training_steps,
        "versions": installed_versions(),
    }


def how_to_go_on(composed: DictConfig) -> str:
    """One line for a run that did not reach its end: whether it can be resumed, and how."""
    latest, every = _checkpoints(composed) / run_directory.LATEST, composed.trainer.save_freq
    if latest.is_file():
        return f"Checkpoint of step {latest.read_text().strip()}: the same command with --resume goes on from it."
    remedy = "" if every > 0 else f": trainer.save_freq={every} saves none, trainer.save_freq=10 one every 10 steps"
    return f"No checkpoint was saved, so this run cannot be resumed{remedy}."


def _assets(config: QuickstartConfig, precision: Precision, console: Console) -> Assets:
    asked, spoke = AssetsConfig(seed=config.seed, model=ToyModelConfig()), time.monotonic()
    console.print(
        f"toy model: supervised warm-up to an accuracy of {asked.warmup.target_accuracy:.2f}, about 130 updates, 16 s "
        f"on two idle cores; made once, in {config.output / 'assets'}",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )
    with console.status("making the toy model: supervised warm-up") as status:

        def show(step: int, accuracy: Accuracy) -> None:
            nonlocal spoke
            line = f"supervised warm-up: update {step}, accuracy {accuracy.sampled:.2f}"
            status.update(line)
            if (
                not console.is_terminal and time.monotonic() - spoke > PLAIN_INTERVAL
            ):  # a status is seen on terminals only
                spoke = time.monotonic()
                console.print(line, highlight=False)

        assets = make_assets(config.output / "assets", asked, on_probe=show)
    made = assets.made
    console.print(
        f"toy model: {made['parameters']:,} parameters, {made['warmup_steps']} updates of warm-up in "
        f"{made['warmup_seconds']} s{' (made before, used again)' if assets.reused else ''}; "
        f"held-out accuracy {made['test']['greedy']:.2f} greedy, {made['test']['sampled']:.2f} sampled",
        highlight=False,
        soft_wrap=True,
    )
    return assets


def _train(output: Path, overrides: list[str], total: int, run: dict[str, Any], log_from: int, console: Console) -> int:
    log, metrics, attempt = output / run_directory.LOG_FILE, output / report.METRICS_FILE, run["attempts"][-1]
    env = environment(metrics)
    console.print(f"training: {total} steps on {run['hardware']}, log in {log}", highlight=False, soft_wrap=True)
    if log_from:
        with log.open("a") as stream:
            stream.write(f"\n---- resumed {time.strftime('%Y-%m-%d %H:%M:%S')} ----\n")
    started = time.monotonic()
    tree = ProcessTree([sys.executable, "-m", MODULE, *overrides], log, env, ROOT)
    try:
        with Display(console, total, log, metrics, log_from=log_from) as display:
            while (code := tree.poll()) is None:
                display.update()
                time.sleep(1.0)
            display.update()
    except Stopped:
        console.print("[yellow]Ending the training (once more to kill it) ...[/]")
        raise
    finally:
        tree.end()
        trained_from = display.first_line or time.monotonic()
        attempt["seconds"] |= {"start-up": trained_from - started, "training": time.monotonic() - trained_from}
        attempt["peak_memory_bytes"], run["memory_kind"] = tree.peak_bytes, tree.memory_kind
    attempt["exit_code"] = code
    return code


def _conclude(output: Path, code: int, total: int, log_from: int, console: Console) -> int:
    log, metrics = output / run_directory.LOG_FILE, output / report.METRICS_FILE
    result = report.load(metrics) if metrics.is_file() and metrics.stat().st_size else None
    if code == 0 and (result is None or result.metrics.last_step < total):
        console.print(f"[bold red]The training ended before step {total} without an error.[/]")
        code = 1
    elif code not in (0, 128 + signal.SIGINT, 128 + signal.SIGTERM):
        console.print(f"[bold red]The training failed (exit code {code}):[/]")
        for line in last_error(log.read_bytes()[log_from:].decode(errors="replace")):
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    if result is not None:
        console.print(result.table())
        try:
            written = report.write(result)
            console.print("report: " + ", ".join(map(str, written)), highlight=False, soft_wrap=True)
        except FlashRLError as error:  # the training is what was asked for
            console.print(str(error), markup=False, style="red", soft_wrap=True)
    if code:
        console.print(f"whole log: {log}", highlight=False, soft_wrap=True)
    return code if code >= 0 else 128 - code  # Popen says -n for a process that signal n ended
