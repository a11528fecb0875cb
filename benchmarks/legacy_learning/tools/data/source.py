# SPDX-License-Identifier: Apache-2.0
"""Where the published rows come from: a local file or folder, or the Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from flashrl_verl.errors import DataError
from benchmarks.legacy_learning.tools.data.catalog import DataSet, PublishedFile

BATCH = 8192
"""Rows in memory at a time: a few MB of prompts."""

Tell = Callable[[str], None]
"""Takes a line for people."""

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LINES = (".jsonl", ".json")


@dataclass(frozen=True)
class Source:
    """A published file on this machine."""

    path: Path
    name: str
    """The hub's repository, or the path."""
    revision: str | None
    """Commit of the repository; None for a local file."""


def is_commit(revision: str) -> bool:
    """Whether a revision names one commit, whatever happens to branches and tags."""
    return _COMMIT.fullmatch(revision) is not None


def hub_id(data_set: DataSet, source: str | None) -> str | None:
    """The hub's repository that `--source` means, None for a local path.

    Raises:
        DataError: there is no such path, and it is no repository's name either.
    """
    if source is None:
        return data_set.hub_id
    if Path(source).expanduser().exists():
        return None
    if _HUB_ID.fullmatch(source) and not source.endswith((".parquet", *_LINES)):
        return source
    raise DataError(
        f"--source {source} is not on this machine, and no repository of the hub has such a name (owner/name)."
    )


def local(data_set: DataSet, file: PublishedFile, source: str) -> Source:
    """Find the file of a split below a path that exists.

    Args:
        data_set: the data set.
        file: which of its files.
        source: the file, or a folder that holds it under its published name, or as `<split>.parquet` or
            `<split>.jsonl`.

    Raises:
        DataError: a folder without it.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return Source(path, str(path), None)
    names = [file.path, Path(file.path).name, f"{file.split.value}.parquet", f"{file.split.value}.jsonl"]
    for name in names:
        if (path / name).is_file():
            return Source(path / name, str(path / name), None)
    others = [other.split.value for other in data_set.files if other.split is not file.split]
    remedy = f" --split {others[0]} prepares the other one alone." if others else ""
    raise DataError(
        f"--source {source} has no {file.split.value} file of {data_set.name.value}: none of "
        f"{', '.join(names)}.{remedy}"
    )


def fetch(repository: str, file: PublishedFile, revision: str, wanted: Sequence[PublishedFile], tell: Tell) -> Source:
    """Download a file from the Hugging Face hub, or take it from its cache.

    Args:
        repository: of the hub, type dataset.
        file: which of its files.
        revision: commit, tag or branch.
        wanted: all files that the request needs; the message of an error names them.
        tell: told before the hub is asked.

    Raises:
        DataError: it cannot be had; the message says how to bring all that are wanted here.
    """
    from huggingface_hub import constants, hf_hub_download

    if not constants.HF_HUB_OFFLINE:
        tell(
            f"asking the Hugging Face hub for {repository}, {file.path} (where no hub answers this gives up after half "
            "a minute or more; --source takes files that are here)"
        )
    try:
        from httpx import HTTPError  # huggingface_hub 1; what it used before raises OSErrors
    except ImportError:
        HTTPError = OSError
    try:
        with _quiet_hub():
            path = Path(hf_hub_download(repository, file.path, repo_type="dataset", revision=revision))
    except (OSError, ValueError, HTTPError) as error:
        reason = " ".join(str(error).split())[:300]
        paths, alone = " ".join(other.path for other in wanted), ""
        if len(wanted) > 1:
            alone = (
                " (of one file alone: --source FOLDER --split "
                + " or ".join(other.split.value for other in wanted)
                + ")"
            )
        raise DataError(
            f"{repository} (revision {revision}) was not fetched from the Hugging Face hub: {type(error).__name__}: "
            f"{reason} Remedy: where there is a network, `hf download {repository} {paths} --repo-type dataset "
            f"--revision {revision} --local-dir FOLDER`; then here --source FOLDER{alone}."
        ) from error
    # <cache>/datasets--owner--name/snapshots/<commit>/<file>, as huggingface_hub documents it.
    return Source(path, repository, path.parents[len(Path(file.path).parts) - 1].name)


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Without the hub's warning for each of its attempts: the last failure is in our error."""
    from huggingface_hub.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def sha256(path: Path) -> str:
    """The checksum of a file, in hexadecimal.

    Raises:
        DataError: it cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return digest.hexdigest()


# ---- rows ----


class Rows(Protocol):
    """The rows of a file, a batch at a time."""

    count: int

    def batches(self, wanted: Set[int] | None = None) -> Iterator[tuple[int, list[tuple[int, Any]]]]:
        """Read from the start.

        Args:
            wanted: numbers of the rows to read; None reads all.

        Yields:
            How many rows were passed so far, and the numbers (from 0) and values of those in this batch.
        """


def open_rows(path: Path, columns: tuple[str, ...]) -> Rows:
    """Open a file of rows: parquet, or JSON objects a line (`.jsonl`, `.json`).

    Args:
        path: the file.
        columns: names of the columns to read.

    Raises:
        DataError: the file is not readable, holds no rows, or lacks a column.
    """
    rows = _JsonLines(path) if path.suffix in _LINES else _Parquet(path, columns)
    if rows.count == 0:
        raise DataError(f"{path} holds no rows.")
    return rows


class _Parquet:
    def __init__(self, path: Path, columns: tuple[str, ...]):
        import pyarrow
        from pyarrow import parquet

        self._path, self._columns = path, list(columns)
        try:
            with parquet.ParquetFile(path) as file:
                self.count, found = file.metadata.num_rows, file.schema_arrow.names
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise DataError(f"{path} is not a readable parquet file: {error}") from error
        missing = [name for name in columns if name not in found]
        if missing:
            raise DataError(f"{path} has no column {', '.join(missing)}: its columns are {', '.join(found)}.")

    def batches(self, wanted: Set[int] | None = None) -> Iterator[tuple[int, list[tuple[int, Any]]]]:
        import pyarrow
        from pyarrow import parquet

        start = 0
        try:
            with parquet.ParquetFile(self._path) as file:
                for batch in file.iter_batches(BATCH, columns=self._columns):
                    numbers, end = list(range(start, start + batch.num_rows)), start + batch.num_rows
                    if wanted is not None:
                        numbers = [number for number in numbers if number in wanted]
                        batch = batch.take(pyarrow.array([number - start for number in numbers], pyarrow.int64()))
                    start = end
                    yield end, list(zip(numbers, batch.to_pylist(), strict=True))
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{self._path} cannot be read after row {start}: {error}") from error


class _JsonLines:
    def __init__(self, path: Path):
        self._path = path
        try:
            with path.open("rb") as stream:
                self.count = sum(1 for line in stream)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error}") from error

    def batches(self, wanted: Set[int] | None = None) -> Iterator[tuple[int, list[tuple[int, Any]]]]:
        batch: list[tuple[int, Any]] = []
        for number, line in enumerate(self._lines()):
            if wanted is None or number in wanted:
                batch.append((number, _parsed(line)))
            if (number + 1) % BATCH == 0 or number + 1 == self.count:
                yield number + 1, batch
                batch = []

    def _lines(self) -> Iterator[str]:
        try:
            # What is no UTF-8 becomes half a surrogate, which no row may hold.
            with self._path.open(encoding="utf-8", errors="surrogateescape", newline="\n") as stream:
                yield from stream
        except OSError as error:
            raise DataError(f"{self._path} cannot be read: {error}") from error


def _parsed(line: str) -> Any:
    """The object of a line; a line that is none stays text, which no row may be."""
    try:
        return json.loads(line)
    except ValueError:
        return line.rstrip("\n")
