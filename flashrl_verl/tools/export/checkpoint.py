# SPDX-License-Identifier: Apache-2.0
"""What `flashrl eval` and `flashrl export` are pointed at: a run, one of its checkpoints, or a Hugging Face folder."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrl_verl.errors import ConfigError
from flashrl_verl.input_files import last_step

_STEP = re.compile(r"global_step_(\d+)")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Where weights are, and what is known of them."""

    path: Path
    """The actor's FSDP shards, or the Hugging Face folder."""
    step: int | None
    """Training step; None for a Hugging Face folder."""

    @property
    def sharded(self) -> bool:
        """Whether FSDP ranks wrote it, and it has to be merged."""
        return self.step is not None

    @property
    def config(self) -> Path | None:
        """The run's configuration, where the checkpoint has it."""
        file = self.path.parent / "config.yaml"
        return file if self.sharded and file.is_file() else None

    @property
    def name(self) -> str:
        """For a folder made of it: run (``trainer.default_local_dir``, or the folder above ``checkpoints``) and step,
        or the Hugging Face folder's own."""
        if not self.sharded:
            return self.path.name
        run = self.path.parent.parent
        return f"{run.parent.name if run.name == 'checkpoints' else run.name}-step{self.step}"

    def fingerprint(self) -> list[list[Any]]:
        """Name, bytes and time of the files of weights."""
        files = [file for pattern in ("*.pt", "*.safetensors") for file in sorted(self.path.glob(pattern))]
        return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def find(path: Path) -> Checkpoint:
    """Find the weights.

    Args:
        path: ``trainer.default_local_dir`` or the folder above it, of which the last checkpoint is taken,
            ``global_step_N``, its ``actor``, or a Hugging Face folder.

    Raises:
        ConfigError: there are none, or of a kind that cannot be read; the message says what to name.
    """
    path = path.expanduser().resolve()
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder. Name a run, <run>/global_step_<N>, or a Hugging Face folder")
    if (path / "config.json").is_file():
        return _hugging_face(path)
    folder = path.parent if path.name == "actor" else path
    if not _STEP.fullmatch(folder.name):
        folder = _last_of_run(folder)
    actor = folder / "actor"
    if not actor.is_dir():
        raise ConfigError(
            f"{folder} has no weights: verl removes those of all but the last trainer.max_actor_ckpt_to_keep "
            "checkpoints. Name a later one"
        )
    if not (actor / "fsdp_config.json").is_file():
        raise ConfigError(
            f"{actor} has no fsdp_config.json, so verl's FSDP actors did not save it. Convert it first: python -m "
            "verl.model_merger merge --backend megatron, and name the folder that makes"
        )
    return Checkpoint(path=actor, step=int(_STEP.fullmatch(folder.name)[1]))


def _last_of_run(run: Path) -> Path:
    found = [p for p in (*run.glob("global_step_*"), *run.glob("checkpoints/global_step_*")) if _STEP.fullmatch(p.name)]
    steps = {int(_STEP.fullmatch(path.name)[1]): path for path in found}
    if not steps:
        raise ConfigError(
            f"{run} holds no checkpoint (global_step_<N>) and is no Hugging Face folder (no config.json). A run saves "
            "checkpoints with trainer.save_freq=<every so many steps>"
        )
    step = last_step(next(iter(steps.values())).parent)  # a newer folder may be half written
    step = max(steps) if step is None else step
    if step not in steps:
        raise ConfigError(f"{run} has no checkpoint of step {step}. It has {', '.join(map(str, sorted(steps)))}")
    return steps[step]


def _hugging_face(path: Path) -> Checkpoint:
    quantized = json.loads((path / "config.json").read_text()).get("quantization_config")
    if quantized:
        raise ConfigError(
            f"{path} is quantized already ({quantized.get('quant_method')}). Name the BF16 model it was made of"
        )
    if not list(path.glob("*.safetensors")):
        raise ConfigError(f"{path} holds no *.safetensors. Save the model with safetensors first")
    return Checkpoint(path=path, step=None)


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """A folder that appears whole or not at all.

    Yields:
        Where to write; it becomes ``output`` at the end.

    Raises:
        OSError: ``output`` is there and not empty.
    """
    scratch = output.with_name(f".{output.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
        if output.exists():
            output.rmdir()
        os.replace(scratch, output)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
