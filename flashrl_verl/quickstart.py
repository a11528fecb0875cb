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
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from flashrl_verl import report
from flashrl_verl.compat import check_versions, require_verl
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.toy.assets import Assets, AssetsConfig, make_assets

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
"""The checkout: the recipe is not part of the installed package."""
PATIENCE = ((signal.SIGINT, 20.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0))
"""How the training is ended: signals, and seconds to wait after each. Ray needs some 5 s to take its workers
down."""
GRACE = 10.0
"""Seconds that Ray's processes get to end by themselves after their driver did."""
PLAIN_INTERVAL = 10.0
"""Seconds between two lines where there is no terminal to redraw."""

PHASES = (
    ("Started a local Ray instance", "starting Ray"),
    ("dataset len:", "loading the data"),
    ("Before FSDP", "building the trainer's model"),
    ("model engine initialized", "starting vLLM"),
    ("[flashrl] rollout precision", "validating before training"),
)
"""Texts in the training's log, and what they mean has begun. Only words for the wait: nothing depends on
them."""


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


class Stopped(BaseException):
    """Ctrl-C or SIGTERM. Not an Exception, so that no handler on the way mistakes it for a failure."""

    def __init__(self, signum: int):
        self.exit_code = 128 + signum


@contextmanager
def _stoppable() -> Iterator[None]:
    def stop(signum: int, frame: Any) -> None:
        raise Stopped(signum)

    before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class ProcessTree:
    """The training, everything it starts, and the most memory they took together with this process.

    Args:
        command: its words.
        log: file that takes its output.
        env: its environment.
    """

    def __init__(self, command: Sequence[str], log: Path, env: dict[str, str]):
        with log.open("wb") as stream:
            # A session of its own: Ctrl-C in the terminal reaches us alone, and we pass it on once.
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=stream, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        self._root = psutil.Process(self._process.pid)
        self._seen: set[psutil.Process] = {self._root}
        self.peak_bytes, self.memory_kind = 0, "PSS"

    def poll(self) -> int | None:
        """Look at the tree once. Returns the exit code, or None while it runs."""
        code = self._process.poll()
        if code is None:
            with suppress(psutil.NoSuchProcess):
                # Remembered, because Ray's workers become orphans when their parent dies.
                self._seen.update(self._root.children(recursive=True))
            total = sum(self._bytes(process) for process in (psutil.Process(), *self._seen))
            self.peak_bytes = max(self.peak_bytes, total)
        return code

    def _bytes(self, process: psutil.Process) -> int:
        """Proportional set size: memory that several processes share (Ray's object store) counts once in the
        sum."""
        try:
            return process.memory_full_info().pss
        except psutil.NoSuchProcess:
            self._seen.discard(process)
        except (psutil.AccessDenied, AttributeError):
            self.memory_kind = "RSS, shared memory counted repeatedly"
            try:
                return process.memory_info().rss
            except psutil.Error:
                pass
        return 0

    def end(self, patience: Sequence[tuple[int, float]] = PATIENCE) -> None:
        """End what is left of the tree, politely first; being interrupted again makes it less patient.

        Args:
            patience: signals, and seconds to wait after each.
        """
        if self._process.poll() is not None:
            with suppress(Stopped):
                self._wait(GRACE)
        for signum, seconds in patience:
            alive = self._alive()
            if not alive:
                return
            # The driver alone takes Ray down in order; the others are told when that did not help.
            for process in [self._root] if signum == signal.SIGINT and self._root in alive else alive:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signum)
            with suppress(Stopped):
                self._wait(seconds)

    def _alive(self) -> list[psutil.Process]:
        self._process.poll()  # reap it, or it stays a zombie
        alive = []
        for process in self._seen:
            with suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
        return alive

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._alive() and time.monotonic() < deadline:
            time.sleep(0.2)


class Display:
    """Tells how far the training is: a redrawn line on a terminal, a line every step or 10 s elsewhere."""

    def __init__(self, console: Console, total: int, log: Path, metrics: Path):
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
        )

        self._console, self._log, self._metrics, self._total = console, log, metrics, total
        self._step, self._spoke, self._phase = -1, time.monotonic(), "starting Python"
        self._changed = self._modified()  # until it changes, a resumed run shows what it did before
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task(self._phase, total=total)
        self.first_line: float | None = None
        """When the first line of metrics came: the end of the start-up."""

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _modified(self) -> int | None:
        return self._metrics.stat().st_mtime_ns if self._metrics.is_file() else None

    def update(self) -> None:
        """Read what there is and show it."""
        fresh = self._modified() != self._changed
        metrics = report.read_metrics(self._metrics) if fresh else report.Metrics(rows={})
        news = bool(metrics.rows) and metrics.last_step > self._step
        if news:
            self.first_line = self.first_line or time.monotonic()
            self._step = metrics.last_step
            self._phase = _progress_words(metrics)
        elif self._step < 0:
            self._phase = _startup_phase(self._log)
        self._bar.update(self._task, description=self._phase, completed=max(0, self._step))
        if not self._console.is_terminal and (news or time.monotonic() - self._spoke > PLAIN_INTERVAL):
            self._spoke = time.monotonic()
            step = f"step {self._step}/{self._total}: " if self._step >= 0 else "start-up: "
            self._console.print(f"{step}{self._phase}", markup=False, highlight=False, soft_wrap=True)


def _startup_phase(log: Path) -> str:
    text = log.read_text(errors="replace") if log.is_file() else ""
    begun = [words for mark, words in PHASES if mark in text]
    return begun[-1] if begun else "starting Python"


def _progress_words(metrics: report.Metrics) -> str:
    parts = []
    for key in metrics.keys(report.HELD_OUT)[:1]:
        at = metrics.series(key)[0][-1]
        parts.append(f"held-out {report.show(metrics.last(key))}" + (f" (step {at})" if at != metrics.last_step else ""))
    for name, key, form in (("score", report.SCORE, ".2f"), ("mismatch KL", report.MISMATCH_KL, ".1e")):
        if metrics.series(key)[0]:
            parts.append(f"{name} {report.show(metrics.last(key), form)}")
    return ", ".join(parts) or "training"


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
    with _stoppable():
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
    tree = ProcessTree([sys.executable, "-m", "recipe.flashrl.main_flashrl", *overrides], log, env)
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
