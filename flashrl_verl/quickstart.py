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
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashrl_verl import report
from flashrl_verl.compat import check_versions, require_verl
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.process_tree import ProcessTree, Stopped, stoppable
from flashrl_verl.progress import Display
from flashrl_verl.toy.assets import Assets, AssetsConfig, make_assets

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
"""The checkout: the recipe is not part of the installed package."""


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


def compose(overrides: Sequence[str]) -> DictConfig:
    """The configuration that the recipe will see.

    Raises:
        ConfigError: verl or the recipe is not there, or Hydra refuses an override.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    require_verl()
    configs = ROOT / "recipe" / "flashrl" / "config"
    if not configs.is_dir():
        raise ConfigError(f"{configs} is not there. The quickstart runs from a checkout: pip install -e . and try again.")
    # As a path: resolving pkg://verl.trainer.config would import verl and torch, which takes seconds.
    verl = Path(next(iter(find_spec("verl").submodule_search_locations))) / "trainer" / "config"
    searchpath = f"hydra.searchpath=[{quoted(f'file://{verl}')},pkg://flashrl_verl.configs]"
    try:
        with initialize_config_dir(str(configs), version_base=None):
            return hydra_compose("flashrl_trainer", [searchpath, *overrides])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"Hydra refuses the overrides {' '.join(overrides)}: {error}") from error


def quoted(text: str) -> str:
    """A string in Hydra's override grammar, whatever is in it."""
    return "'" + text.replace("'", r"\'") + "'"


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
    overrides = training_overrides(config)
    composed = compose(overrides)
    total = composed.trainer.total_training_steps
    if total is None:
        raise ConfigError("trainer.total_training_steps=null: the quickstart needs a number of steps to run to.")
    prepare_directory(config.output, Path(composed.trainer.default_local_dir), resume=config.resume)
    run: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "recipe.flashrl.main_flashrl", *overrides]),
        "hardware": f"{composed.trainer.device}, {os.cpu_count()} CPU cores, {platform.machine()}",
        "precision": str(composed.flashrl.precision),
        "seed": config.seed,
        "total_steps": total,
        "versions": {finding.component.module: finding.installed for finding in check_versions()},
        "seconds": {},
    }
    with stoppable():
        try:
            assets = _assets(config, console)
            run["seconds"]["assets"] = time.monotonic() - started
            run["assets"] = assets.made
            code = _train(config.output, overrides, total, run, console)
        except Stopped as stopped:
            console.print("[yellow]Stopped.[/]")
            code = run["exit_code"] = stopped.exit_code
    run["seconds"]["total"] = time.monotonic() - started
    (config.output / report.RUN_FILE).write_text(json.dumps(run, indent=2) + "\n")
    return _conclude(config.output, code, total, console)


def prepare_directory(output: Path, checkpoints: Path, *, resume: bool) -> None:
    """Make room for a run. Checkpoints of an earlier one are moved aside, never deleted.

    Raises:
        FlashRLError: there is nothing to resume from.
    """
    output.mkdir(parents=True, exist_ok=True)
    if resume:
        if not (checkpoints / "latest_checkpointed_iteration.txt").is_file():
            raise FlashRLError(
                f"{checkpoints} holds no checkpoint to resume from. Run without --resume, and with "
                "trainer.save_freq=10 to save one every 10 steps."
            )
        return
    for name in (report.METRICS_FILE, report.RUN_FILE, report.REPORT_FILE, report.CURVES_FILE):
        (output / name).unlink(missing_ok=True)
    if checkpoints.is_dir() and any(checkpoints.iterdir()):
        checkpoints.rename(checkpoints.with_name(f"{checkpoints.name}-until-{time.strftime('%Y%m%d-%H%M%S')}"))


def _assets(config: QuickstartConfig, console: Console) -> Assets:
    with console.status("making the toy model: supervised warm-up") as status:
        assets = make_assets(
            config.output / "assets",
            AssetsConfig(seed=config.seed),
            on_probe=lambda step, a: status.update(f"supervised warm-up: update {step}, accuracy {a.sampled:.2f}"),
        )
    made = assets.made
    console.print(
        f"toy model: {made['parameters']:,} parameters, {made['warmup_steps']} updates of warm-up in "
        f"{made['warmup_seconds']} s{' (made before, used again)' if assets.reused else ''}; "
        f"held-out accuracy {made['test']['greedy']:.2f} greedy, {made['test']['sampled']:.2f} sampled",
        highlight=False,
        soft_wrap=True,
    )
    return assets


def _train(output: Path, overrides: list[str], total: int, run: dict[str, Any], console: Console) -> int:
    log, metrics = output / "train.log", output / report.METRICS_FILE
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}  # a Ray of its own
    env |= {
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    console.print(f"training: {total} steps on {run['hardware']}, log in {log}", highlight=False, soft_wrap=True)
    started = time.monotonic()
    tree = ProcessTree([sys.executable, "-m", "recipe.flashrl.main_flashrl", *overrides], log, env, ROOT)
    try:
        with Display(console, total, log, metrics) as display:
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
        run["seconds"] |= {"start-up": trained_from - started, "training": time.monotonic() - trained_from}
        run["peak_memory_bytes"], run["memory_kind"] = tree.peak_bytes, tree.memory_kind
    run["exit_code"] = code
    return code


def _conclude(output: Path, code: int, total: int, console: Console) -> int:
    log, metrics = output / "train.log", output / report.METRICS_FILE
    result = report.load(metrics) if metrics.is_file() and metrics.stat().st_size else None
    if code == 0 and (result is None or result.metrics.last_step < total):
        console.print(f"[bold red]The training ended before step {total} without an error.[/]")
        code = 1
    elif code not in (0, 128 + signal.SIGINT, 128 + signal.SIGTERM):
        console.print(f"[bold red]The training failed (exit code {code}):[/]")
        for line in report.last_error(log.read_text(errors="replace")):
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    if result is not None:
        written = report.write(result)
        console.print(result.table())
        console.print("report: " + ", ".join(map(str, written)), highlight=False, soft_wrap=True)
    if code:
        console.print(f"whole log: {log}", highlight=False, soft_wrap=True)
    return code if code >= 0 else 128 - code  # Popen says -n for a process that signal n ended
