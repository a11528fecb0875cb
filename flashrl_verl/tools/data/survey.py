# SPDX-License-Identifier: Apache-2.0
"""The first reading of a source: every row is checked and every prompt counted before anything is written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from flashrl_verl.errors import DataError
from flashrl_verl.tools.data import rows
from flashrl_verl.tools.data.catalog import DataSet
from flashrl_verl.tools.data.source import Rows

SHOWN = 10
"""Bad rows that an error shows; the rest are counted."""


class Progress(Protocol):
    """Told of the work: what is being done, and how many of how many rows are done."""

    def __call__(self, doing: str, done: int, total: int) -> None: ...


@dataclass
class Prompt:
    """A prompt of the source."""

    row: int
    """The first with it."""
    answers: tuple[str, ...]
    """More than one where copies of the prompt disagree."""
    copies: int = 1
    index: int = -1
    """Its number among the prompts that are kept; -1 for one that is not."""


@dataclass
class Survey:
    """What a source holds."""

    rows: int
    prompts: dict[bytes, Prompt] = field(default_factory=dict)
    """By `Example.key`, in the order of their first rows."""
    bad: set[int] = field(default_factory=set)
    """Numbers of the rows that are not what they must be."""
    bad_shown: list[str] = field(default_factory=list)
    """The first of them, in words."""
    respelled: int = 0
    """Rows whose answer is written in another spelling than the published one."""

    @property
    def conflicts(self) -> list[Prompt]:
        """Prompts with more than one answer: no reward can be right for all of their copies."""
        return [prompt for prompt in self.prompts.values() if len(prompt.answers) > 1]

    def number(self, keep_duplicates: bool) -> list[Prompt]:
        """Number the prompts that are kept, and return them: all, or those with one answer."""
        kept = [prompt for prompt in self.prompts.values() if keep_duplicates or len(prompt.answers) == 1]
        for index, prompt in enumerate(kept):
            prompt.index = index
        return kept


def survey(source: Rows, path: Path, data_set: DataSet, *, drop_invalid: bool, progress: Progress) -> Survey:
    """Read a source once, a batch at a time.

    Args:
        source: its rows.
        path: where they are, for messages.
        data_set: what they must be.
        drop_invalid: whether bad rows are only counted.
        progress: told of every batch.

    Raises:
        DataError: there are bad rows; the message shows the first of them with number, column, value and what was
            expected.
    """
    found = Survey(source.count)
    rows_of_ids: dict[str, tuple[bytes, int]] = {}
    for done, batch in source.batches():
        for number, row in batch:
            try:
                example = data_set.example(row, number)
                key = example.key()
                known, first = rows_of_ids.setdefault(example.source_id, (key, number))
                if known != key:
                    raise rows.BadRow(
                        "extra_info.index", example.source_id, f"one of its own: row {first} asks something else"
                    )
            except rows.BadRow as bad:
                found.bad.add(number)
                if len(found.bad_shown) < SHOWN:
                    found.bad_shown.append(f"row {number}: {bad}")
                continue
            _count(found, key, example, number)
        progress(f"checking {path.name}", done, found.rows)
    if found.bad and not drop_invalid:
        raise DataError(_bad_rows(found, path))
    return found


def _count(found: Survey, key: bytes, example: rows.Example, number: int) -> None:
    found.respelled += example.respelled
    prompt = found.prompts.get(key)
    if prompt is None:
        found.prompts[key] = Prompt(number, (example.answer,))
        return
    prompt.copies += 1
    if example.answer not in prompt.answers:
        prompt.answers += (example.answer,)


def _bad_rows(found: Survey, path: Path) -> str:
    shown = "".join(f"\n  {words}" for words in found.bad_shown)
    unseen = len(found.bad) - len(found.bad_shown)
    more = f"\n  and {unseen:,} more" if unseen else ""
    return (
        f"{len(found.bad):,} of {found.rows:,} rows of {path} cannot be used (rows are counted from 0); nothing was "
        f"written:{shown}{more}\nRemedy: another --source, or --drop-invalid to go on without these rows."
    )


def kept_rows(
    source: Rows, path: Path, data_set: DataSet, found: Survey, *, keep_duplicates: bool, split: str, progress: Progress
) -> Iterator[dict[str, Any]]:
    """Read a source for the second time: the rows for verl, in the source's order.

    Args:
        source, path, data_set, progress: as in `survey`.
        found: what that found, numbered.
        keep_duplicates: whether all copies of a prompt are wanted, or the first.
        split: `train` or `test`.

    Raises:
        DataError: the source is no longer what it was.
    """
    firsts = None if keep_duplicates else {prompt.row for prompt in found.prompts.values() if prompt.index >= 0}
    left = len(firsts) if firsts is not None else found.rows
    for done, batch in source.batches(firsts):
        for number, row in batch:
            if number not in found.bad:
                yield _verl_row(row, number, path, data_set, found, split)
        progress("writing", done, found.rows)
        left -= len(batch)
        if left == 0:
            return


def _verl_row(row: Any, number: int, path: Path, data_set: DataSet, found: Survey, split: str) -> dict[str, Any]:
    try:
        example = data_set.example(row, number)
        return example.verl_row(split, found.prompts[example.key()].index)
    except (rows.BadRow, KeyError) as error:
        raise DataError(f"row {number} of {path} is not what it was when it was checked. Run again.") from error
