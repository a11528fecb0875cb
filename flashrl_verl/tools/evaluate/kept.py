# SPDX-License-Identifier: Apache-2.0
"""What an evaluation leaves in a precision's folder, and whether the next one may use it."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flashrl_verl
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.settings import Precision
from flashrl_verl.tools.bar import sha256
from flashrl_verl.tools.evaluate.engine import LOG, Answer
from flashrl_verl.tools.evaluate.partial import PARTIAL, Response, read
from flashrl_verl.tools.export.source import Checkpoint
from flashrl_verl.trainer.atomic_write import write_whole

if TYPE_CHECKING:
    from flashrl_verl.tools.evaluate.evaluate import EvalConfig

GENERATED, ANSWER, RESPONSES = "settings.json", "answer.json", "responses.jsonl"
"""What its responses depend on, what its engine was, and the responses."""

BEGUN = "begun.json"
"""What the responses depend on that are being generated."""

_LONG = ("checkpoint", "weights", "config", "prompts")
"""Paths, checksums and lists of files, which tell a reader nothing."""

_OPTIONS = {"samples": "--n"} | {
    name: f"--{name.replace('_', '-')}"
    for name in ("temperature", "top_p", "max_tokens", "seed", "tensor_parallel_size")
}


def settings_of(
    config: EvalConfig,
    checkpoint: Checkpoint,
    prompts: list[list[int]],
    stops: list[int],
    vocab_size: int,
    precision: Precision,
) -> dict[str, Any]:
    """All that the responses of a precision depend on. Answers, rewards and thresholds may change without generating
    again.

    Args:
        config: what the command line says.
        checkpoint: the weights, and the model's configuration.
        prompts: tokens of every prompt.
        stops: tokens that end a turn; generation_config.json and the tokenizer have them.
        vocab_size: length of the tokenizer.
        precision: of the engine.
    """
    return {
        "checkpoint": str(checkpoint.path),
        "weights": checkpoint.fingerprint(),
        "config": sha256(checkpoint.folder / "config.json"),
        "prompts": hashlib.sha256(
            json.dumps(prompts).encode()
        ).hexdigest(),  # data, their choice, and the chat template
        "stop_token_ids": stops,
        "vocab_size": vocab_size,
        **{
            key: getattr(config, key)
            for key in ("samples", "temperature", "top_p", "max_tokens", "seed", "tensor_parallel_size")
        },
        "layers": None if precision is Precision.BF16 else config.layers,
        "versions": _versions(),
    }


def finished(output: Path, precision: Precision, settings: dict[str, Any], force: bool) -> bool:
    """Whether the responses of a precision are there.

    Raises:
        ConfigError: they are another evaluation's, or damaged.
    """
    folder = output / precision.value
    if force or not (folder / GENERATED).is_file():
        return False
    _require_same(folder, _read(folder / GENERATED), settings)
    read_answer(folder)  # a damaged one is found out before another precision is generated
    return True


def begun(output: Path, precision: Precision, settings: dict[str, Any], force: bool) -> bool:
    """Whether some responses of a precision are there, to go on behind.

    Raises:
        ConfigError: they are another evaluation's, or damaged.
    """
    folder = output / precision.value
    if force or not (folder / BEGUN).is_file():
        return False
    before, there = _read(folder / BEGUN), read_responses(folder)
    if there:
        _require_same(folder, before, settings)
    return bool(there)


def begin(folder: Path, settings: dict[str, Any]) -> None:
    """Make an empty folder of one precision, in place of what an earlier evaluation left.

    Raises:
        ConfigError: the folder holds something else.
        FlashRLError: no space, no rights, ...
    """
    clear(folder, LOG if (folder / LOG).exists() else BEGUN)
    try:
        folder.mkdir(parents=True)
        write_whole(folder / BEGUN, json.dumps(settings, indent=1).encode())
    except OSError as error:
        raise FlashRLError(f"{folder} cannot be written: {error}. Make room, or choose another --output") from error


def read_responses(folder: Path) -> dict[int, Response]:
    """Responses that a stopped engine has left.

    Raises:
        ConfigError: they are damaged.
    """
    try:
        return read(folder / PARTIAL)
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(folder / PARTIAL, error) from None


def _require_same(folder: Path, before: dict[str, Any], settings: dict[str, Any]) -> None:
    changed = [key for key in settings if before.get(key) != settings[key]]
    if changed:
        words = ", ".join(
            f"{key} (another one)"
            if key in _LONG
            else f"{_OPTIONS.get(key, key)} {before.get(key)} (now {settings[key]})"
            for key in changed
        )
        raise ConfigError(
            f"{folder} has responses that were generated otherwise: {words}. Choose another --output, or --force"
        )


def write_answer(folder: Path, answer: Answer, settings: dict[str, Any]) -> None:
    """With it the precision is finished.

    Raises:
        FlashRLError: no space, no rights, ...; the precision is not finished.
    """
    try:
        write_whole(folder / ANSWER, json.dumps(dataclasses.asdict(answer)).encode())
        write_whole(folder / GENERATED, json.dumps(settings, indent=1).encode())  # last
        for name in (PARTIAL, BEGUN):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise FlashRLError(
            f"the responses cannot be written to {folder}: {error}. Make room; the same command goes on"
        ) from error


def read_answer(folder: Path) -> Answer:
    """The answer of a finished precision.

    Raises:
        ConfigError: it is damaged.
    """
    found = _read(folder / ANSWER)
    try:
        return Answer(**found)
    except TypeError as error:
        raise _damaged(folder / ANSWER, error) from None


def clear(folder: Path, mark: str) -> None:
    """Remove what an earlier evaluation left, and nothing else.

    Raises:
        ConfigError: the folder holds something without the mark.
    """
    if (folder / mark).exists() or (folder.is_dir() and not any(folder.iterdir())):
        shutil.rmtree(folder)
    elif folder.exists():
        raise ConfigError(
            f"{folder} is no evaluation's (it has no {mark}) and is not replaced. Choose another --output"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise TypeError(f"a {type(found).__name__} instead of an object")
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(path, error) from None
    return found


def _damaged(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{path} cannot be used ({type(error).__name__}: {error}). Generate the responses again with --force, or "
        "choose another --output"
    )


def _versions() -> dict[str, str]:
    names = ("torch", "vllm", "verl", "transformers")
    return {"flashrl_verl": flashrl_verl.__version__, **{name: importlib.metadata.version(name) for name in names}}
