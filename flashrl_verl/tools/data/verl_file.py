# SPDX-License-Identifier: Apache-2.0
"""The prepared parquet file: written whole or not at all, and read back row by row."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashrl_verl.errors import DataError
from flashrl_verl.tools.data import rows
from flashrl_verl.tools.data.catalog import DataSet
from flashrl_verl.tools.data.source import open_rows
from flashrl_verl.tools.data.survey import Progress

if TYPE_CHECKING:
    import pyarrow

GROUP = 8192
"""Rows written at a time: what is in memory."""

ABANDONED_AFTER = 3600.0
"""Seconds after which a temporary file that nobody wrote to is one of a process that was killed."""


def schema() -> pyarrow.Schema:
    """Columns of every prepared file: what verl's dataset and its rewards read."""
    import pyarrow

    text = pyarrow.string()
    message = pyarrow.struct([("role", text), ("content", text)])
    return pyarrow.schema(
        [
            ("data_source", text),
            ("prompt", pyarrow.list_(message)),
            ("ability", text),
            ("reward_model", pyarrow.struct([("style", text), ("ground_truth", text)])),
            ("extra_info", pyarrow.struct([("split", text), ("index", pyarrow.int64()), ("source_id", text)])),
        ]
    )


# ---- writing ----


@contextlib.contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """Name a temporary file in the folder of `path`, to be moved there by the caller; otherwise it is gone afterwards.

    Raises:
        DataError: what the caller does with it fails for want of space, rights, ...
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f".{path.name}.*.part"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > ABANDONED_AFTER:
                    left.unlink()
        yield temporary
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(
            f"{path} could not be written: {reason}. There is no half-written file; what was there before is "
            "unchanged. Remedy: make room or allow writing there, or choose another --output."
        ) from error
    finally:
        with contextlib.suppress(OSError):  # what the caller is told is what went wrong before
            temporary.unlink()


def write(path: Path, examples: Iterable[dict[str, Any]]) -> int:
    """Write rows to a new parquet file and wait until they are on the disk.

    Args:
        path: the file, which does not exist.
        examples: rows as `Example.verl_row` makes them.

    Returns:
        How many there were.

    Raises:
        OSError: no space, no rights, ...
    """
    import pyarrow
    from pyarrow import parquet

    count, pending = 0, iter(examples)
    # Our own file object: its errors are Python's, and it can be synchronized.
    with path.open("xb") as stream:
        with parquet.ParquetWriter(stream, schema(), compression="zstd") as writer:
            while group := list(itertools.islice(pending, GROUP)):
                writer.write_table(pyarrow.Table.from_pylist(group, schema()))
                count += len(group)
        stream.flush()
        os.fsync(stream.fileno())
    return count


# ---- reading back ----


def examine(path: Path, data_set: DataSet, split: str, progress: Progress) -> tuple[int, int]:
    """Check a prepared file: its columns, every row, and that an index and a prompt belong to each other.

    Args:
        path: the file.
        data_set: what it was made of.
        split: `train` or `test`.
        progress: told of every batch.

    Returns:
        Its rows and its different prompts.

    Raises:
        DataError: the first thing that is wrong.
    """
    from pyarrow import parquet

    source, wanted = open_rows(path, rows.VERL_COLUMNS), schema()
    found = parquet.read_schema(path)
    for column in wanted:
        if found.field(column.name).type != column.type:
            raise DataError(f"{path}: column {column.name} is {found.field(column.name).type}; expected {column.type}.")
    prompts: dict[bytes, int] = {}
    for done, batch in source.batches():
        for number, row in batch:
            try:
                example, index = rows.from_prepared_row(row, split, data_set.rules)
                # Numbered in the order of their first rows: the next new prompt has the next number.
                if prompts.setdefault(example.key(), len(prompts)) != index:
                    raise rows.BadRow("extra_info.index", index, "the number of this prompt, and of no other")
            except rows.BadRow as bad:
                raise DataError(f"{path}: row {number} (counted from 0): {bad}.") from None
        progress(f"checking {path.name}", done, source.count)
    return source.count, len(prompts)
