# SPDX-License-Identifier: Apache-2.0
"""The metrics file: verl's file logger, except that a resumed run keeps its history.

verl opens its file with ``"wb"`` (``verl/utils/tracking.py``), which erases what the run before the interruption wrote.
"""

import os
from pathlib import Path

import orjson

from flashrl_verl.whole_file import write_whole


def metrics_path(project_name: str, experiment_name: str) -> Path:
    """The path verl's file logger would use (``VERL_FILE_LOGGER_PATH``, else ``VERL_FILE_LOGGER_ROOT``)."""
    explicit = os.getenv("VERL_FILE_LOGGER_PATH")
    if explicit:
        return Path(explicit)
    return Path(os.path.expanduser(os.getenv("VERL_FILE_LOGGER_ROOT", "."))) / project_name / f"{experiment_name}.jsonl"


class MetricsFile:
    """One ``{"step": n, "data": {...}}`` a line.

    Args:
        path: the file; its folder is made.
        resumed_step: 0 starts a new file. Otherwise lines of later steps (trained, but not in the checkpoint) and a torn last
            line are dropped and the rest is kept.
    """

    def __init__(self, path: Path, resumed_step: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        history = _history(path, resumed_step) if resumed_step > 0 and path.exists() else []
        write_whole(path, b"".join(line + b"\n" for line in history))
        self._file = open(path, "ab", buffering=0)

    def log(self, data: dict, step: int) -> None:
        self._file.write(orjson.dumps({"step": step, "data": data}, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")

    def finish(self) -> None:
        self._file.close()


def _history(path: Path, resumed_step: int) -> list[bytes]:
    kept = []
    for line in path.read_bytes().splitlines():
        try:
            keep = orjson.loads(line)["step"] <= resumed_step
        except (orjson.JSONDecodeError, KeyError, TypeError):
            continue
        if keep:
            kept.append(line)
    return kept
