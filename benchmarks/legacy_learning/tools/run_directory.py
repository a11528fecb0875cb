# SPDX-License-Identifier: Apache-2.0
"""The directory of a quickstart run: its record, what a new run moves aside, and what a resumed one has to share with
it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from flashrl_verl.errors import ConfigError, FlashRLError, refuse
from benchmarks.legacy_learning.tools import kept_config, report
from flashrl_verl.trainer.atomic_write import write_whole

if TYPE_CHECKING:
    from omegaconf import DictConfig

LOG_FILE, CONFIG_FILE = "train.log", "config.yaml"
LATEST = "latest_checkpointed_iteration.txt"
"""verl's record of the last whole checkpoint, in trainer.default_local_dir."""
CHECKPOINTS = "trainer.default_local_dir"
RESULTS = (report.METRICS_FILE, report.RUN_FILE, report.REPORT_FILE, report.CURVES_FILE, CONFIG_FILE, LOG_FILE)

MAY_CHANGE = (
    # How long, how often, where to, and how fast: a resumed run is the same run under these.
    *(
        f"trainer.{name}"
        for name in ("total_training_steps", "total_epochs", "test_freq", "save_freq", "val_before_train")
    ),
    *(f"trainer.{name}" for name in ("logger", "log_val_generations", "project_name", "experiment_name")),
    # Not default_local_dir and resume_from_path: whose checkpoint is loaded makes the run.
    *(
        f"trainer.{name}"
        for name in ("resume_mode", "max_actor_ckpt_to_keep", "rollout_data_dir", "validation_data_dir")
    ),
    *("ray_kwargs", "global_profiler", "transfer_queue"),
    *(f"flashrl.{name}" for name in ("update_timeout_s", "max_num_gen_batches", "self_check")),
    *("flashrl.padded_vocab_mass_limit", "flashrl.guard"),
    *(
        f"actor_rollout_ref.rollout.{name}"
        for name in ("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens")
    ),
    "actor_rollout_ref.rollout.trace",
    # Copies of keys that are compared under their own names.
    *("actor_rollout_ref.rollout.custom.flashrl", "actor_rollout_ref.actor.policy_loss.rollout_correction"),
)
"""Keys, with everything below them, that may differ between the attempts of one run."""


def check_output(output: Path) -> None:
    """Refuse an output directory that cannot be made because a file is in its place.

    Raises:
        ConfigError: `--output` is a file, or lies below one.
    """
    for path in (output, *output.parents):
        if path.exists():
            if not path.is_dir():
                raise ConfigError(f"--output {output}: {path} is a file. Choose a directory, which need not exist yet.")
            return


def move_aside(output: Path, checkpoints: Path, root: Path | None = None) -> Path | None:
    """Make room for a new run: the results of an earlier one are moved, never deleted.

    Args:
        output: the run's directory; it is made.
        checkpoints: trainer.default_local_dir; only verl's own entries are moved out of it.
        root: where relative paths in the record start; the working directory when it is None.

    Returns:
        `output/previous-N` with the earlier run's results, or None where there was none.

    Raises:
        ConfigError: the checkpoints are not known to be this directory's; nothing was made or moved.
    """
    saved = sorted(checkpoints.glob("global_step_*")) + [p for p in [checkpoints / LATEST] if p.exists()]
    if saved and not _is_ours(output, checkpoints, root):
        _refuse_others(output, checkpoints, "a new run would move them aside")
    output.mkdir(parents=True, exist_ok=True)
    results = [output / name for name in RESULTS if (output / name).exists()]
    trained = {path.name for path in results} - {report.RUN_FILE, CONFIG_FILE}
    if not trained and not saved:  # a record alone is of a run that never started training
        return None
    endings = [path.name.removeprefix("previous-") for path in output.glob("previous-*")]
    taken = [int(ending) for ending in endings if ending.isdigit()]
    aside = output / f"previous-{max(taken, default=0) + 1}"
    aside.mkdir()
    if saved:
        (aside / "checkpoints").mkdir()
    for path in results:
        shutil.move(path, aside / path.name)
    for path in saved:
        shutil.move(path, aside / "checkpoints" / path.name)
    return aside


def check_resumable(output: Path, checkpoints: Path, cfg: DictConfig, seed: int, root: Path | None = None) -> None:
    """Refuse to go on with another run than the one in the directory.

    Args:
        output: the run's directory.
        checkpoints: trainer.default_local_dir.
        cfg: the composed configuration of the attempt to come.
        seed: of the attempt to come.
        root: where relative paths in the record start; the working directory when it is None.

    Raises:
        FlashRLError: there is no checkpoint.
        ConfigError: verl would not look for it there; or a key differs that makes it another run, and the message names
            each, with both values; or there is no configuration to compare, and the checkpoints may be another run's.
    """
    if cfg.trainer.resume_mode != "auto":
        refuse(
            "trainer.resume_mode",
            cfg.trainer.resume_mode,
            f"--resume goes on from the last checkpoint in {CHECKPOINTS}, and verl looks for that one under auto only",
            "leave trainer.resume_mode out; a run that starts from a checkpoint of another one is a new run, without "
            "--resume",
        )
    if not (checkpoints / LATEST).is_file():
        raise FlashRLError(
            f"{checkpoints} holds no checkpoint to resume from. Run without --resume, and with "
            "trainer.save_freq=10 to save one every 10 steps."
        )
    changed = differences(output, cfg, seed)
    done = (checkpoints / LATEST).read_text().strip()
    if not changed and done == str(cfg.trainer.total_training_steps):
        raise FlashRLError(
            f"the run in {output} is finished: its last checkpoint is of step {done} of {done}. Give a larger "
            "trainer.total_training_steps to go on, or no --resume for a new run."
        )
    if changed:
        more = f" and {len(changed) - 8} more" if len(changed) > 8 else ""
        raise ConfigError(
            f"--resume goes on with the run in {output}, and this would be another one: "
            f"{', '.join(changed[:8])}{more}. "
            "Remedy: the options of that run; or a new run, without --resume or with another --output."
        )
    if not _is_ours(output, checkpoints, root):  # only where there was no configuration to compare
        _refuse_others(output, checkpoints, "--resume would go on with that run under this one's name")


def differences(output: Path, cfg: DictConfig, seed: int) -> list[str]:
    """What makes the attempt to come another run than the recorded one: `key=new (was old)`, by key."""
    changed = []
    record = read_record(output)
    if record.get("seed", seed) != seed:
        changed.append(f"--seed={seed} (was {record['seed']})")
    if not (output / CONFIG_FILE).is_file():
        precision = str(cfg.flashrl.precision)
        if record.get("precision", precision) != precision:
            changed.append(f"flashrl.precision={precision} (was {record['precision']})")
        return changed
    old, new = kept_config.load(output / CONFIG_FILE), kept_config.as_kept(cfg)
    return changed + kept_config.different(
        _moved(old, _recorded_output(record, old, output), str(output)), new, MAY_CHANGE
    )


def _moved(value: Any, before: str, now: str) -> Any:
    """A run may be moved: its own paths are compared as if they had always been where they are.

    Args:
        value: a path, or a list or mapping with paths in it; anything else comes back as it is.
        before: the folder whose contents were moved.
        now: where they are.
    """
    if isinstance(value, dict):
        return {key: _moved(item, before, now) for key, item in value.items()}
    if isinstance(value, list):
        return [_moved(item, before, now) for item in value]
    inside = isinstance(value, str) and (value == before or value.startswith(f"{before}/"))
    return now + value[len(before) :] if inside else value


def _recorded_output(record: dict[str, Any], cfg: dict[str, Any], output: Path) -> str:
    """Where the run's directory was when it was recorded.

    Args:
        record: its `run.json`.
        cfg: the leaves of its `config.yaml`.
        output: where it is now.
    """
    if "output" in record:
        return record["output"]
    # A record from before that. The quickstart's own names for what is in the directory tell where it was.
    parent, name = os.path.split(str(cfg.get(CHECKPOINTS)))
    default = name == "checkpoints" and cfg.get("quickstart.assets") == os.path.join(parent, "assets")
    return parent if default else str(output)


# ---- whose checkpoints ----


def _is_ours(output: Path, checkpoints: Path, root: Path | None) -> bool:
    """Whether the folder lies in the run's directory, or was named by a run that is or was recorded there."""
    if checkpoints.resolve().is_relative_to(output.resolve()):
        return True
    return any(
        ((root or Path.cwd()) / named).resolve() == checkpoints.resolve()
        for folder in (output, *output.glob("previous-*"))
        if (named := _named(folder, output))
    )


def _named(folder: Path, output: Path) -> str | None:
    """The checkpoint folder of the run that is recorded in `folder`, as if its directory had always been `output`."""
    if not (folder / CONFIG_FILE).is_file():
        return None
    cfg = kept_config.load(folder / CONFIG_FILE)
    return _moved(cfg.get(CHECKPOINTS), _recorded_output(read_record(folder), cfg, output), str(output))


def _refuse_others(output: Path, checkpoints: Path, consequence: str) -> NoReturn:
    near = [folder for folder in (checkpoints, *checkpoints.parents) if (folder / report.RUN_FILE).is_file()]
    refuse(
        CHECKPOINTS,
        str(checkpoints),
        f"it holds checkpoints, lies outside --output {output}, and no run recorded there named it. They may be "
        f"{f'those of the run in {near[0]}' if near else 'those of another run'}, and {consequence}",
        f"another {CHECKPOINTS}; or the --output of the run that saved them; or move them yourself",
    )


# ---- the record ----


def read_record(output: Path) -> dict[str, Any]:
    """What `run.json` says; empty where there is none that can be read."""
    try:
        record = json.loads((output / report.RUN_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def begin_attempt(output: Path, facts: dict[str, Any], cfg: DictConfig, *, resume: bool) -> dict[str, Any]:
    """Write down what is about to run: a run that is killed can still be resumed and reported.

    Args:
        output: the run's directory.
        facts: what does not change while it runs; where it is (`output`) is added.
        cfg: the composed configuration.
        resume: whether the attempts recorded there are this run's.

    Returns:
        The record; `attempts[-1]` is the new attempt, to be filled in.
    """
    from omegaconf import OmegaConf

    output.mkdir(parents=True, exist_ok=True)  # checkpoints may be elsewhere
    attempts = []
    if resume:
        earlier = read_record(output)
        only = {key: earlier[key] for key in ("seconds", "peak_memory_bytes", "exit_code") if key in earlier}
        attempts = earlier.get("attempts", [only] if only else [])
    record = facts | {"output": str(output), "attempts": [*attempts, {"seconds": {}, "exit_code": None}]}
    write_whole(output / CONFIG_FILE, OmegaConf.to_yaml(cfg, resolve=True).encode())
    write_record(output, record)
    return record


def write_record(output: Path, record: dict[str, Any]) -> None:
    """Write `run.json`: seconds are the sum over the attempts, memory the largest of them."""
    seconds: dict[str, float] = {}
    for attempt in record["attempts"]:
        for phase, value in attempt.get("seconds", {}).items():
            seconds[phase] = seconds.get(phase, 0.0) + value
    record |= {"seconds": seconds, "exit_code": record["attempts"][-1]["exit_code"]}
    peaks = [attempt["peak_memory_bytes"] for attempt in record["attempts"] if "peak_memory_bytes" in attempt]
    if peaks:
        record["peak_memory_bytes"] = max(peaks)
    write_whole(output / report.RUN_FILE, (json.dumps(record, indent=2) + "\n").encode())
