# SPDX-License-Identifier: Apache-2.0
"""Several result files of ``flashrl bench rollout``: what is in one, what to call it, and where their table may be
written."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from flashrl_verl.errors import ConfigError

if TYPE_CHECKING:
    from benchmarks.rollout import Report, RolloutConfig

REMEDY = "Name the folders that flashrl bench rollout wrote (its --output), or their .jsonl"


def read(path: Path) -> tuple[Path, RolloutConfig, Report]:
    """The file in a folder, or of that name, what was asked for, and what was measured.

    Raises:
        ConfigError: it is not there, has nothing yet, or holds no results of this release.
    """
    from benchmarks import rollout

    try:
        file = path / rollout.RESULTS if path.is_dir() else path
        return file, *rollout.measured(file)
    except FileNotFoundError as error:
        raise ConfigError(f"{_missing(path)}. {REMEDY}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} holds no results of flashrl bench rollout ({type(error).__name__}: {error}). {REMEDY}"
        ) from error


def _missing(path: Path) -> str:
    if not path.is_dir():
        return f"{path} is not there"
    others = ", ".join(sorted(file.name for file in path.glob("*.jsonl")))
    return f"{path} has no rollout.jsonl" + (f", but {others}: name what is meant" if others else "")


def cut_off(file: Path) -> bool:
    """Whether the last line, which is an arm's, is not whole and so left out."""
    return not file.read_text().endswith("\n")


def require_table(path: Path, header: str) -> None:
    """Refuse to put a table in the place of what is none: a picture beside a page may have the page's name.

    Raises:
        ConfigError: the path is a folder, or a file that begins with anything but the table's header, or cannot be
            read.
    """
    try:
        there = path.read_text(errors="replace") if path.exists() else ""
    except OSError as error:
        raise ConfigError(f"--output: {path}, where its table would be written: {error.strerror or error}") from error
    if there and there.partition("\n")[0] != header:
        raise ConfigError(
            f"--output: {path}, where its table would be written, is something else, or another release's. Move it, or "
            "name another picture"
        )


def names(runs: Collection[Path]) -> dict[Path, str]:
    """A name for each of several result files: their paths without what they share, whole folders at the end, whole
    words at the start. ``throughput/7b.jsonl`` and ``throughput/again/7b.jsonl`` are called throughput and
    throughput/again. Whole paths where nothing is left of one.

    Args:
        runs: Absolute paths, all different.
    """
    from benchmarks.rollout import RESULTS

    called = {run: run.parent if run.name == RESULTS else run.with_suffix("") for run in runs}
    if len(set(called.values())) < len(called):  # a/run.jsonl and a/run/rollout.jsonl
        called = {run: run for run in runs}
    while len(called) > 1 and len({path.name for path in called.values()}) == 1:
        called = {run: path.parent for run, path in called.items()}
    shared = os.path.commonprefix([*map(str, called.values())])
    start = max(shared.rfind(mark) for mark in "/-_") + 1  # words that all begin with tell nothing apart
    found = {run: str(path)[start:] for run, path in called.items()}
    return found if all(found.values()) else {run: str(run) for run in runs}
