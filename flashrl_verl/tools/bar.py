# SPDX-License-Identifier: Apache-2.0
"""What a long count shows: a bar where there is a terminal, a line now and then where there is none."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from flashrl_verl.errors import DataError

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_INTERVAL = 10.0
"""Seconds between two lines where there is no terminal to redraw."""


class Bar:
    """Shows how many are done, how many there are and the time left; a `survey.Progress`. Nothing appears before the
    first.

    Args:
        console: where people read.
        unit: what is counted.
    """

    def __init__(self, console: Console, unit: str = "rows"):
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self._console, self._unit, self._spoke = console, unit, time.monotonic()
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._doing, self._task = "", None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, doing: str, done: int, total: int) -> None:
        if doing != self._doing:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._bar.start()
            self._doing, self._task = doing, self._bar.add_task(doing, total=total)
        self._bar.update(self._task, completed=done, total=total)
        if not self._console.is_terminal and time.monotonic() - self._spoke > PLAIN_INTERVAL:
            self._spoke = time.monotonic()
            self._console.print(
                f"{doing}: {done:,} of {total:,} {self._unit}", markup=False, highlight=False, soft_wrap=True
            )


def sha256(path: Path) -> str:
    """The checksum of a file, in hexadecimal.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
