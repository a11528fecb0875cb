# SPDX-License-Identifier: Apache-2.0
"""The metrics file has verl's format, and a resumed run keeps the history that its checkpoint covers."""

import json

import numpy as np
import pytest

from flashrl_verl.metrics_file import MetricsFile, metrics_path


def write(path, resumed_step, steps) -> list[dict]:
    file = MetricsFile(path, resumed_step)
    for step in steps:
        file.log({"a/b": np.float32(step)}, step)
    file.finish()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_step_and_data_as_verl_writes_it(tmp_path, monkeypatch):
    from verl.utils.tracking import FileLogger

    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "verl.jsonl"))
    theirs = FileLogger("p", "e")
    theirs.log({"a/b": np.float32(3)}, 3)
    theirs.finish()
    write(tmp_path / "ours.jsonl", 0, [3])
    assert (tmp_path / "ours.jsonl").read_bytes() == (tmp_path / "verl.jsonl").read_bytes()


def test_a_fresh_run_starts_a_new_file(tmp_path):
    path = tmp_path / "folder" / "metrics.jsonl"
    write(path, 0, [0, 1, 2])
    assert [x["step"] for x in write(path, 0, [0])] == [0]


def test_a_resumed_run_appends_and_drops_what_it_trains_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 0, [0, 1, 2, 3, 4, 5])
    assert [x["step"] for x in write(path, 4, [4, 5, 6])] == [0, 1, 2, 3, 4, 4, 5, 6]


def test_a_torn_last_line_does_not_survive_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 0, [0, 1])
    with open(path, "ab") as f:
        f.write(b'{"step": 2, "da')
    assert [x["step"] for x in write(path, 2, [3])] == [0, 1, 3]


def test_a_resumed_run_without_history_starts_one(tmp_path):
    assert [x["step"] for x in write(tmp_path / "none.jsonl", 5, [6])] == [6]


@pytest.mark.parametrize("variable", ["VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT", None])
def test_the_path_is_the_one_verl_would_use(tmp_path, monkeypatch, variable):
    from verl.utils.tracking import FileLogger

    monkeypatch.chdir(tmp_path)
    for name in ("VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, str(tmp_path / "there"))
    theirs = FileLogger("project", "experiment")
    theirs.finish()
    assert metrics_path("project", "experiment").resolve() == (tmp_path / theirs.filepath).resolve()
