# SPDX-License-Identifier: Apache-2.0
"""The record beside a prepared file, `<name>.json`: what it was made of, how, and the checksums of both."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import flashrl_verl
from flashrl_verl.tools.data.catalog import DataSet, PublishedFile
from flashrl_verl.tools.data.source import Source, sha256
from flashrl_verl.tools.data.survey import Survey
from flashrl_verl.tools.data.verl_file import schema, temporary_beside
from flashrl_verl.trainer.atomic_write import move, write_synced

PREPARATION = 1
"""Raise it when a change to this package changes what is made of the same source."""


def path_of(prepared: Path) -> Path:
    """Where the record of a prepared file is."""
    return prepared.with_suffix(".json")


def read(prepared: Path) -> dict[str, Any] | None:
    """The record of a prepared file; None where there is none, or something else under its name."""
    try:
        record = json.loads(path_of(prepared).read_text(encoding="utf-8"))
        output = [record["output"][key] for key in ("rows", "prompts", "sha256")]
        known = {*record["source"]} >= {"name", "revision", "sha256"} and list(map(type, output)) == [int, int, str]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if known and "dataset" in record and "split" in record else None


def write(prepared: Path, record: dict[str, Any]) -> None:
    """Write the record whole.

    Raises:
        DataError: it cannot be written.
    """
    path = path_of(prepared)
    with temporary_beside(path) as temporary:
        write_synced(temporary, (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode())
        move(temporary, path)


def request(data_set: DataSet, file: PublishedFile, options: dict[str, Any]) -> dict[str, Any]:
    """What was asked for: two records that agree in this and in the source's checksum describe equal files."""
    return {"dataset": data_set.name.value, "split": file.split.value, "preparation": PREPARATION, "options": options}


def of_source(source: Source, file: PublishedFile, checksum: str, found: Survey) -> dict[str, Any]:
    """What the file was made of. `published` says whether that was the file that the catalog knows."""
    return {
        "name": source.name,
        "file": str(source.path) if source.revision is None else file.path,
        "revision": source.revision,
        "sha256": checksum,
        "bytes": source.path.stat().st_size,
        "rows": found.rows,
        "published": checksum == file.sha256,
    }


def of_output(prepared: Path, written: Path, count: int, found: Survey) -> dict[str, Any]:
    """What was made.

    Args:
        prepared: the file's name to be.
        written: where it still is.
        count: its rows.
        found: what its source holds.
    """
    copies = [prompt.copies for prompt in found.prompts.values() if prompt.index >= 0]
    replaced = {"replaces_sha256": sha256(prepared)} if prepared.is_file() else {}
    return {
        "file": prepared.name,
        "sha256": sha256(written),
        "bytes": written.stat().st_size,
        "rows": count,
        "prompts": len(copies),
        "copies_in_source": [min(copies), max(copies)],
        "columns": {field.name: str(field.type) for field in schema()},
        **replaced,
    }


def of_findings(found: Survey) -> dict[str, Any]:
    """What was noticed while reading: rows that cannot be used, prompts with several answers, answers spelled anew."""
    return {
        "invalid": len(found.bad),
        "invalid_first": found.bad_shown,
        "respelled_answers": found.respelled,
        "prompts_with_several_answers": [
            {"first_row": prompt.row, "answers": list(prompt.answers), "rows": prompt.copies}
            for prompt in found.conflicts
        ],
    }


def versions() -> dict[str, str]:
    """What the bytes of a parquet file depend on, besides its rows."""
    return {
        "flashrl_verl": flashrl_verl.__version__,
        "pyarrow": importlib.metadata.version("pyarrow"),
        "python": platform.python_version(),
    }
