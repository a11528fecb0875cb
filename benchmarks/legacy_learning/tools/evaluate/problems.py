# SPDX-License-Identifier: Apache-2.0
"""What is asked: the rows of parquet files in verl's format, each problem once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrl_verl.errors import DataError

COLUMNS = ("data_source", "prompt", "reward_model")
"""Needed; ``extra_info`` is handed to the reward where there is one."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One row, or several that ask the same."""

    data_source: str
    messages: list[dict[str, Any]]
    ground_truth: Any
    extra_info: dict[str, Any]


def read_problems(files: Sequence[Path], limit: int | None = None) -> tuple[list[Problem], int]:
    """Read the problems in the order in which they first appear.

    Copies (data sets for pass@k hold each problem up to 32 times) are one problem: counted apart they would make a
    figure look surer than it is.

    Args:
        files: parquet files with verl's columns.
        limit: take the first so many problems; None takes all.

    Returns:
        The problems, and the number of rows that ask for them.

    Raises:
        DataError: a file is not such a file.
    """
    found: dict[str, Problem] = {}
    rows = 0
    for file in files:
        for number, row in enumerate(_rows(file)):
            problem = _problem(file, number, row)
            key = json.dumps([problem.data_source, problem.messages, problem.ground_truth], sort_keys=True, default=str)
            if key not in found and limit is not None and len(found) == limit:
                continue
            found.setdefault(key, problem)
            rows += 1
    if not found:
        raise DataError(f"{', '.join(map(str, files))}: there are no rows")
    return list(found.values()), rows


def _rows(file: Path) -> list[dict[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        names = parquet.read_schema(file).names
        if absent := [column for column in COLUMNS if column not in names]:
            raise DataError(
                f"--data {file} has no column {', '.join(absent)}: it is not in verl's format, which `flashrl data` "
                "writes"
            )
        return parquet.read_table(file, columns=[c for c in (*COLUMNS, "extra_info") if c in names]).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"--data {file} is not a parquet file that can be read: {error}") from error


def _problem(file: Path, number: int, row: dict[str, Any]) -> Problem:
    messages, reward = row["prompt"], row["reward_model"]
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(m, dict) and "content" in m for m in messages)
    ):
        raise DataError(f"--data {file}, row {number}: `prompt` is no list of messages: {messages!r:.100}")
    if not isinstance(reward, dict) or reward.get("ground_truth") is None:
        raise DataError(f"--data {file}, row {number}: `reward_model.ground_truth` is missing")
    return Problem(
        data_source=str(row["data_source"]),
        messages=messages,
        ground_truth=reward["ground_truth"],
        extra_info=row.get("extra_info") or {},
    )
