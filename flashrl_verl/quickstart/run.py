# SPDX-License-Identifier: Apache-2.0
"""The quickstart: make a toy model, train it with the recipe in a process of its own, watch it, report.

What is trained, and how, is the recipe's affair (`experiment=quickstart`); this file adds paths, a seed and
the hardware.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.plugins.versions import check_versions
from flashrl_verl.quickstart.assets import AssetsConfig, made_before, make_assets
from flashrl_verl.quickstart.progress import Progress, follow, read_rows
from flashrl_verl.tools import report
from flashrl_verl.tools.log_excerpt import last_error
from flashrl_verl.tools.process_tree import Stopped, stoppable
from flashrl_verl.tools.recipe_process import MODULE, ROOT, compose, environment, quoted
from flashrl_verl.trainer.atomic_write import write_whole
from flashrl_verl.validation import check_paths, validate_config

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from rich.console import Console

    from flashrl_verl.quickstart.warmup import Accuracy

LOG, METRICS, RECORD = "train.log", "metrics.jsonl", "run.json"
LATEST = "latest_checkpointed_iteration.txt"
"""verl's record of the last whole checkpoint, in trainer.default_local_dir."""


@dataclass(frozen=True, kw_only=True)
class QuickstartConfig:
    """What the command line of `flashrl quickstart` says."""

    output: Path
    """Directory of the assets, log, metrics, checkpoints and report."""
    seed: int = 0
    """Of the model, the split, and the order of the prompts. Sampling in vLLM is not deterministic across
    batches."""
    resume: bool = False
    """Resume from the last checkpoint; from the start, if there is none."""
    overrides: tuple[str, ...] = ()
    """Hydra overrides for the training; they win over what the quickstart sets."""


def training_overrides(config: QuickstartConfig) -> list[str]:
    """The words after `python -m recipe.flashrl.main_flashrl`."""
    words = [] if _sets(config.overrides, "experiment") else ["experiment=quickstart"]
    if not _sets(config.overrides, "hardware"):
        import torch

        words.append(f"hardware={'cuda' if torch.cuda.is_available() else 'cpu'}")
    return [
        *words,
        f"quickstart.assets={quoted(str(config.output / 'assets'))}",
        f"trainer.default_local_dir={quoted(str(config.output / 'checkpoints'))}",
        f"data.seed={config.seed}",
        f"trainer.resume_mode={'auto' if config.resume else 'disable'}",
        *config.overrides,
    ]


def _sets(overrides: Sequence[str], key: str) -> bool:
    return any(word.lstrip("+").partition("=")[0] == key for word in overrides)


def check(config: QuickstartConfig) -> tuple[list[str], DictConfig]:
    """Refuse what can be refused before anything is made, in seconds.

    Returns:
        The words for the recipe, and the configuration they compose.

    Raises:
        FlashRLError: an option, the configuration, a path, or what is in the output directory is at fault.
    """
    from omegaconf import OmegaConf

    for path in (config.output, *config.output.parents):
        if path.is_file():
            raise ConfigError(f"--output {config.output}: {path} is a file. Choose another directory.")
    overrides = training_overrides(config)
    composed = compose(overrides)
    validate_config(composed)
    total, loggers = composed.trainer.total_training_steps, composed.trainer.logger or []
    if not isinstance(total, int) or total < 1:
        raise ConfigError(f"trainer.total_training_steps={total}: the quickstart needs a number of steps, from 1 on.")
    if "file" not in loggers:
        raise ConfigError(f"trainer.logger={loggers}: the report is made from `file`. Remedy: [console,file].")
    check_paths(composed, root=ROOT, made_later=config.output / "assets")
    OmegaConf.resolve(composed)
    _check_directory(config, composed)
    return overrides, composed


def _check_directory(config: QuickstartConfig, composed: DictConfig) -> None:
    output, checkpoints = config.output, _checkpoints(composed)
    saved, total = saved_step(composed), composed.trainer.total_training_steps
    if not config.resume:
        if (output / METRICS).exists() or any(checkpoints.glob("global_step_*")):
            holder = output if (output / METRICS).exists() else checkpoints
            raise ConfigError(f"{holder} holds a run already. Remedy: --resume, or a new folder: --output DIR.")
    elif saved is not None:
        if saved >= total:
            raise ConfigError(
                f"The run in {output} is finished: its last checkpoint is of step {saved} of {total}. Remedy: a larger "
                f"trainer.total_training_steps, or `flashrl report {shlex.quote(str(output))}` to see it."
            )
        if made_before(output / "assets", AssetsConfig(seed=config.seed)) is None:
            raise ConfigError(
                f"--resume: {output}/assets was not made with --seed {config.seed} and this torch and transformers. "
                "Remedy: the seed of that run, or a new run with another --output."
            )


def _checkpoints(composed: DictConfig) -> Path:
    return ROOT / composed.trainer.default_local_dir  # the recipe is started in the checkout


def saved_step(composed: DictConfig) -> int | None:
    """Step of the last checkpoint, or None."""
    latest = _checkpoints(composed) / LATEST
    return int(latest.read_text()) if latest.is_file() else None


def run_quickstart(config: QuickstartConfig, console: Console) -> int:
    """Run it all.

    Args:
        config: the command line.
        console: where people read.

    Returns:
        The exit code: 0, the training's own, 1 if it ended before its last step, 128 + n after signal n.

    Raises:
        FlashRLError: the command line, the configuration or the assets are at fault; nothing was trained.
    """
    started, output = time.monotonic(), config.output
    _say(console, f"quickstart in {output}: checking the configuration")
    overrides, composed = check(config)
    total, resumed_from = composed.trainer.total_training_steps, saved_step(composed)
    record = _facts(config, overrides, composed)
    spent = json.loads((output / RECORD).read_text())["seconds"] if resumed_from and (output / RECORD).is_file() else {}
    output.mkdir(parents=True, exist_ok=True)
    _write_record(output, record | {"seconds": spent, "exit_code": None})  # for a report of a run that is killed
    log_from = (output / LOG).stat().st_size if (output / LOG).exists() else 0
    seconds: dict[str, float] = {}
    with stoppable():
        try:
            record["assets"] = _make_assets(config, console)
            seconds["assets"] = time.monotonic() - started
            goes_on = f", from the checkpoint of step {resumed_from}" if resumed_from else ""
            _say(console, f"training: {total} steps on {record['hardware']}{goes_on}; log in {output / LOG}")
            code = _train(
                output, overrides, Progress(console, total, output / LOG, log_from, output / METRICS), seconds
            )
        except Stopped as stopped:
            code = stopped.exit_code
        finally:
            seconds["total"] = time.monotonic() - started
            record["seconds"] = {phase: spent.get(phase, 0.0) + value for phase, value in seconds.items()}
    code = _conclude(output, code, total, log_from, record, console)
    if code:
        saved = saved_step(composed)
        begins = "no checkpoint yet, so from the start" if saved is None else f"from the checkpoint of step {saved}"
        _say(console, f"To resume ({begins}): the same command with --resume")
    return code


def _facts(config: QuickstartConfig, overrides: list[str], composed: DictConfig) -> dict[str, Any]:
    from omegaconf import OmegaConf

    return {
        "command": shlex.join(["python", "-m", MODULE, *overrides]),
        "hardware": f"{composed.trainer.device}, {os.cpu_count()} CPU cores, {platform.machine()}",
        "precision": str(composed.flashrl.precision),
        "correction": OmegaConf.to_container(composed.algorithm.rollout_correction),
        "seed": config.seed,
        "total_steps": composed.trainer.total_training_steps,
        "versions": {finding.component.module: finding.installed for finding in check_versions()},
    }


def _make_assets(config: QuickstartConfig, console: Console) -> dict[str, Any]:
    folder, asked = config.output / "assets", AssetsConfig(seed=config.seed)

    def probed(step: int, accuracy: Accuracy) -> None:
        if step % 50 == 0:
            _say(console, f"supervised warm-up: update {step}, accuracy {accuracy.sampled:.2f}")

    _say(console, f"toy model in {folder}: supervised warm-up to an accuracy of {asked.warmup.target_accuracy:.2f}")
    assets = make_assets(folder, asked, on_probe=probed)
    made = assets.made
    _say(
        console,
        f"toy model: {made['parameters']:,} parameters, {made['warmup_steps']} updates of warm-up in "
        f"{made['warmup_seconds']} s{' (made before, used again)' if assets.reused else ''}; "
        f"held-out accuracy {made['test']['greedy']:.2f} greedy, {made['test']['sampled']:.2f} sampled",
    )
    return made


def _train(output: Path, overrides: list[str], progress: Progress, seconds: dict[str, float]) -> int:
    """Run the recipe to its end; its exit code. `seconds` takes how long that was, also when it is stopped."""
    started = time.monotonic()
    try:
        command = [sys.executable, "-m", MODULE, *overrides]
        return follow(command, output / LOG, environment(output / METRICS), progress)
    finally:
        trains_since = progress.trains_since or time.monotonic()
        seconds |= {"start-up": trains_since - started, "training": time.monotonic() - trains_since}


def _conclude(output: Path, code: int, total: int, log_from: int, record: dict[str, Any], console: Console) -> int:
    """Say how it ended and write the report; the exit code of the command."""
    rows = read_rows(output / METRICS)
    if code == 0 and max(rows, default=-1) < total:
        _say(console, f"The training ended before step {total} without an error.", style="bold red")
        code = 1
    elif code not in (0, 130, 143):  # stopped by Ctrl-C or SIGTERM
        _say(console, f"The training failed (exit code {code}):", style="bold red")
        log = (output / LOG).read_bytes()[log_from:].decode(errors="replace")
        _say(console, "\n".join([*(f"  {line}" for line in last_error(log)), f"whole log: {output / LOG}"]))
    code = code if code >= 0 else 128 - code  # Popen says -n of a process that signal n ended
    record["exit_code"] = code
    _write_record(output, record)
    if rows:
        runs = report.load(output)
        console.print(report.table(runs))
        try:
            _say(console, f"plots: {report.draw(runs, output)}")
        except FlashRLError as error:  # no matplotlib; the training is what was asked for
            _say(console, str(error), style="red")
    if not code:
        _say(console, f"the trained model: flashrl eval {output}, or flashrl export {output} --format int8")
    return code


def _write_record(output: Path, record: dict[str, Any]) -> None:
    write_whole(output / RECORD, (json.dumps(record, indent=2) + "\n").encode())


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
