# SPDX-License-Identifier: Apache-2.0
"""From a published data set to files for verl, and back: is a prepared file still what its record says?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrl_verl.errors import ConfigError, DataError
from flashrl_verl.tools.data import record as records
from flashrl_verl.tools.data import source as sources
from flashrl_verl.tools.data import verl_file
from flashrl_verl.tools.data.catalog import CATALOG, DataSet, Name, PublishedFile, Split
from flashrl_verl.tools.data.survey import Progress, Survey, kept_rows, survey
from flashrl_verl.trainer.atomic_write import move


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a user asks for."""

    name: Name
    output: Path
    """Folder for the prepared files."""
    source: str | None = None
    """A file, a folder, or a repository of the hub; None for the repository where the data set is published."""
    revision: str | None = None
    """Of the repository: commit, tag or branch; None for the catalog's commit, `main` of another repository."""
    split: Split | None = None
    """One split of a data set that has several; None for all."""
    keep_duplicates: bool | None = None
    """Whether copies of a prompt stay; None for what the catalog says."""
    drop_invalid: bool = False
    """Whether rows that cannot be used are left out, instead of refusing the source."""
    force: bool = False
    """Whether to make it again, and over a file that this did not make."""


@dataclass(frozen=True)
class Prepared:
    """A file, and whether this call made it."""

    path: Path
    record: dict[str, Any]
    made: bool


@dataclass(frozen=True)
class _Plan:
    """A source that was found good, and the file to make of it."""

    path: Path
    data_set: DataSet
    file: PublishedFile
    keep_duplicates: bool
    asked: dict[str, Any]
    source: sources.Source
    checksum: str
    rows: sources.Rows
    found: Survey


def _untold(line: str) -> None:
    """Nobody reads."""


def prepare(request: Request, progress: Progress, tell: sources.Tell = _untold) -> list[Prepared]:
    """Make the files of a data set. All of its sources are read and checked before the first file is written.

    Args:
        request: what is asked for.
        progress: told of every batch of rows.
        tell: told of what may take long before there are rows.

    Raises:
        ConfigError: the request contradicts itself; nothing was read.
        DataError: the source cannot be had or used, or the output cannot be written.
    """
    data_set = CATALOG[request.name]
    files = _files(data_set, request)
    plans = [_plan(data_set, file, files, request, progress, tell) for file in files]
    return [plan if isinstance(plan, Prepared) else _write(plan, progress) for plan in plans]


def _files(data_set: DataSet, request: Request) -> list[PublishedFile]:
    name, splits = data_set.name.value, [file.split for file in data_set.files]
    if request.split is not None and request.split not in splits:
        raise ConfigError(
            f"--split {request.split.value}: {name} has {', '.join(split.value for split in splits)} only."
        )
    files = [file for file in data_set.files if request.split in (None, file.split)]
    given = request.source
    if len(files) > 1 and given is not None and Path(given).expanduser().is_file():
        raise ConfigError(
            f"--source {given} is one file, and {name} has several splits. Add --split train or --split test."
        )
    if request.revision is not None and sources.hub_id(data_set, given) is None:
        raise ConfigError(
            f"--revision {request.revision} is for repositories of the hub, and --source {given} is a local path."
        )
    return files


def _plan(
    data_set: DataSet,
    file: PublishedFile,
    files: list[PublishedFile],
    request: Request,
    progress: Progress,
    tell: sources.Tell,
) -> _Plan | Prepared:
    path = request.output / f"{file.output}.parquet"
    keep = data_set.keep_duplicates if request.keep_duplicates is None else request.keep_duplicates
    options = {"duplicates": "keep" if keep else "drop", "drop_invalid": request.drop_invalid}
    asked = records.request(data_set, file, options)
    before = _made_before(path, request)
    repository = sources.hub_id(data_set, request.source)
    revision = request.revision or (data_set.revision if repository == data_set.hub_id else "main")
    if repository is not None and sources.is_commit(revision):
        if before is not None and _describes(before, asked, {"name": repository, "revision": revision}):
            return Prepared(path, before, made=False)  # nothing need be fetched to know it
    if repository is None:
        source = sources.local(data_set, file, request.source or "")
    else:
        source = sources.fetch(repository, file, revision, files, tell)
    if path.exists() and source.path.samefile(path):
        raise ConfigError(f"{source.path} is the source and the output. Choose another --output.")
    checksum = sources.sha256(source.path)
    _check_published(data_set, file, source, checksum)
    if before is not None and _describes(before, asked, {"sha256": checksum}):
        return Prepared(path, before, made=False)
    rows = sources.open_rows(source.path, data_set.columns)
    found = survey(rows, source.path, data_set, drop_invalid=request.drop_invalid, progress=progress)
    if not found.number(keep):
        raise DataError(f"{source.path}: none of its {found.rows:,} rows is left: {len(found.bad):,} cannot be used.")
    return _Plan(path, data_set, file, keep, asked, source, checksum, rows, found)


def _write(plan: _Plan, progress: Progress) -> Prepared:
    record = {
        **plan.asked,
        "source": records.of_source(plan.source, plan.file, plan.checksum, plan.found),
        "findings": records.of_findings(plan.found),
    }
    with verl_file.temporary_beside(plan.path) as temporary:
        count = verl_file.write(temporary, _examples(plan, progress))
        record |= {"output": records.of_output(plan.path, temporary, count, plan.found), "versions": records.versions()}
        # The record first: a stop between the two leaves no file without one, and the record names the file that it
        # replaces.
        records.write(plan.path, record)
        move(temporary, plan.path)
    return Prepared(plan.path, record, made=True)


def _examples(plan: _Plan, progress: Progress) -> Iterator[dict[str, Any]]:
    return kept_rows(
        plan.rows,
        plan.source.path,
        plan.data_set,
        plan.found,
        keep_duplicates=plan.keep_duplicates,
        split=plan.file.split.value,
        progress=progress,
    )


def _made_before(path: Path, request: Request) -> dict[str, Any] | None:
    """The record of a file that is what it says; None where the file is to be made.

    Raises:
        DataError: there is a file that this did not make, or that was changed since.
    """
    if request.force or not path.exists():
        return None
    record = records.read(path)
    if record is None:
        raise DataError(
            f"{path} exists, and no {records.path_of(path).name} beside it says that it was prepared here. Remedy: "
            "another --output; or move it away; or --force, to replace it."
        )
    checksum = sources.sha256(path)
    if checksum == record["output"]["sha256"]:
        return record
    if checksum == record["output"].get("replaces_sha256"):
        return None  # a stop between the record and the file
    raise DataError(
        f"{path} was changed: its sha256 is {checksum}, and {records.path_of(path).name} has "
        f"{record['output']['sha256']}. Remedy: another --output; or move it away; or --force, to replace it."
    )


def _describes(record: dict[str, Any], asked: dict[str, Any], source: dict[str, Any]) -> bool:
    return asked.items() <= record.items() and source.items() <= record["source"].items()


def _check_published(data_set: DataSet, file: PublishedFile, source: sources.Source, checksum: str) -> None:
    """What the hub gives for the catalog's commit has to be what was published: a broken download is no data set."""
    if (source.name, source.revision) == (data_set.hub_id, data_set.revision) and checksum != file.sha256:
        raise DataError(
            f"{source.path} has sha256 {checksum}; {file.path} of {source.name} at {source.revision} has "
            f"{file.sha256}. Remedy: delete that file and run again; or --source with a file that you trust."
        )


# ---- the other way ----


def check(path: Path, progress: Progress) -> Prepared:
    """Compare a prepared file with its record, and check its columns and rows again.

    Args:
        path: the parquet file.
        progress: told of every batch of rows.

    Raises:
        DataError: the first thing that is wrong.
    """
    if not path.is_file():
        raise DataError(f"{path} is not there.")
    record = records.read(path)
    if record is None:
        raise DataError(f"{path} has no record: {records.path_of(path)} is not there, or not one of this tool's.")
    checksum = sources.sha256(path)
    if checksum != record["output"]["sha256"]:
        raise DataError(
            f"{path} is not the file that was prepared: its sha256 is {checksum}, and {records.path_of(path).name} has "
            f"{record['output']['sha256']}. Remedy: prepare it again with --force."
        )
    try:
        data_set = CATALOG[Name(record["dataset"])]
        file = data_set.file(Split(record["split"]))
    except (ValueError, KeyError):
        raise DataError(
            f"{records.path_of(path)} is of a data set that is not known here: {record['dataset']!r}."
        ) from None
    rows, prompts = verl_file.examine(path, data_set, file.split.value, progress)
    if (rows, prompts) != (record["output"].get("rows"), record["output"].get("prompts")):
        raise DataError(
            f"{path} has {rows:,} rows and {prompts:,} prompts; {records.path_of(path).name} has other numbers."
        )
    return Prepared(path, record, made=False)
