# SPDX-License-Identifier: Apache-2.0
"""The quickstart: make a toy model, train it with the recipe in a process of its own, watch it, report.

What is trained, and how, is the recipe's affair (`experiment=quickstart`); this file adds paths, a seed and
the hardware.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flashrl_verl.errors import ConfigError
from flashrl_verl.input_files import last_step
from flashrl_verl.quickstart.assets import make_assets
from flashrl_verl.quickstart.progress import LOG, METRICS, follow, last_logged, say
from flashrl_verl.tools.log_excerpt import last_error
from flashrl_verl.tools.process_tree import Stopped, stoppable
from flashrl_verl.tools.recipe_process import MODULE, ROOT, compose, quoted
from flashrl_verl.validation import validate_config

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class QuickstartConfig:
    """What the command line of `flashrl quickstart` says."""

    output: Path
    """Directory of the assets, log, metrics, checkpoints and report; absolute."""
    seed: int = 0
    """Of the model, the split, and the order of the prompts. Sampling in vLLM is not deterministic across
    batches."""
    steps: int | None = None
    """Of the training; None for the experiment's."""
    resume: bool = False
    """Resume from the last checkpoint; from the start, if there is none."""
    overrides: tuple[str, ...] = ()
    """Hydra overrides for the training; they win over what the quickstart sets."""


def training_overrides(config: QuickstartConfig) -> list[str]:
    """The words after `python -m recipe.flashrl.main_flashrl`."""
    import torch

    ours = {
        "experiment": "quickstart",
        "hardware": "cuda" if torch.cuda.is_available() else "cpu",
        "quickstart.assets": quoted(str(config.output / "assets")),
        "trainer.default_local_dir": quoted(str(config.output / "checkpoints")),
        "data.seed": config.seed,
        "trainer.resume_mode": "auto" if config.resume else "disable",
    }
    if config.steps:
        ours["trainer.total_training_steps"] = config.steps
    theirs = {word.lstrip("+").partition("=")[0] for word in config.overrides}
    return [*(f"{key}={value}" for key, value in ours.items() if key not in theirs), *config.overrides]


def check(config: QuickstartConfig) -> tuple[list[str], DictConfig]:
    """Refuse what can be refused before anything is made, in seconds.

    Returns:
        The words for the recipe, and the configuration they compose.

    Raises:
        ConfigError: an option, the configuration, or what is in the output directory is at fault.
    """
    overrides = training_overrides(config)
    composed = compose(overrides)
    validate_config(composed)
    total, saved = composed.trainer.total_training_steps, saved_step(composed)
    if not isinstance(total, int):
        raise ConfigError(f"trainer.total_training_steps={total}: the quickstart needs a number of steps.")
    if config.resume and not config.output.exists():
        raise ConfigError(f"{config.output} is not there, so that there is no run to resume. Remedy: --output DIR.")
    if (config.output / METRICS).exists() and not config.resume:
        raise ConfigError(f"{config.output} holds a run already. Remedy: --resume, or a new folder: --output DIR.")
    if config.resume and saved is not None and saved >= total:
        raise ConfigError(f"The run in {config.output} has its {total} steps. Remedy: more, by --steps N.")
    config.output.mkdir(parents=True, exist_ok=True)
    return overrides, composed


def saved_step(composed: DictConfig) -> int | None:
    """Step of the last checkpoint, or None."""
    return last_step(ROOT / composed.trainer.default_local_dir)  # the recipe is started in the checkout


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
    output = config.output
    say(console, f"quickstart in {output}: checking the configuration")
    overrides, composed = check(config)
    total, log = composed.trainer.total_training_steps, output / LOG
    log_from = log.stat().st_size if log.exists() else 0
    command = [sys.executable, "-m", MODULE, *overrides]
    with stoppable():
        try:
            say(console, f"toy model in {output / 'assets'}: made by supervised warm-up, a minute")
            made = make_assets(output / "assets", seed=config.seed, tell=lambda line: say(console, line))
            say(console, f"held-out accuracy {made['greedy']:.2f} greedy, {made['sampled']:.2f} sampled")
            say(console, f"training: {total} steps on {composed.trainer.device}; log in {log}")
            code = follow(command, output, total, console)
        except Stopped as stopped:
            code = stopped.exit_code
    last = last_logged(output / METRICS)
    if code == 0 and (last is None or last < total):
        say(console, f"The training ended before step {total} without an error.", style="bold red")
        code = 1
    elif code not in (0, 130, 143):  # stopped by Ctrl-C or SIGTERM
        say(console, f"The training failed (exit code {code}):", style="bold red")
        said = last_error(log.read_bytes()[log_from:].decode(errors="replace"))
        say(console, "\n".join([*(f"  {line}" for line in said), f"whole log: {log}"]))
    if last is not None:
        subprocess.run([sys.executable, "-m", "flashrl_verl", "report", str(output)], cwd=ROOT)
    if code:
        saved = saved_step(composed)
        begins = "no checkpoint yet, so from the start" if saved is None else f"from the checkpoint of step {saved}"
        say(console, f"To resume ({begins}): the same command with --resume")
    else:
        flashrl = Path(sys.executable).with_name("flashrl")  # `bash scripts/quickstart.sh` activates no environment
        say(console, f"the trained model: {flashrl} eval {output}, or {flashrl} export {output} --format int8")
        say(console, "eval samples at temperature 1, where the accuracy above is greedy: its score is lower")
    return code if code >= 0 else 128 - code  # Popen says -n of a process that signal n ended
