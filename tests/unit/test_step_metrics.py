# SPDX-License-Identifier: Apache-2.0
"""What a step's metrics come to, and their file: verl's format, with the history that a resumed run's checkpoint
covers."""

import json

import numpy as np
import pytest

from flashrl_verl.trainer.metrics import MetricsFile, metrics_path, refit_metrics


def test_a_refits_codes_are_the_quantized_replicas_and_its_seconds_the_slowest_workers():
    def report(total: float, rate: float | None, quantized: int) -> dict:
        seconds = dict.fromkeys(("load", "finish"), total / 8)
        return {"seconds": seconds | {"total": total}, "code_change_rate": rate, "quantized": quantized}

    receipt = {"bytes": 4 * 10**9, "step": 3, "sum": 2, "count": 0}
    metrics = refit_metrics([report(1.0, 0.1, 14), report(4.0, None, 0), report(2.0, 0.3, 14)], receipt)
    assert metrics["flashrl/code_change_rate"] == pytest.approx(0.2) and metrics["flashrl/refit_quantized"] == 14
    assert metrics["flashrl/refit_seconds"] == 4.0 and metrics["flashrl/refit_quantize_seconds"] == 0.5
    assert "flashrl/code_change_rate" not in refit_metrics([report(4.0, None, 0)], receipt)


# ---- the file ----


def write(path, resumed_step, steps) -> list[int]:
    file = MetricsFile(path, resumed_step)
    for step in steps:
        file.log({"a/b": np.float32(step)}, step)
    file.finish()
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_fresh_run_starts_a_new_file_and_a_resumed_one_drops_what_it_trains_again(tmp_path):
    path = tmp_path / "folder" / "metrics.jsonl"
    write(path, 0, [0, 7])
    write(path, 0, [0, 1, 2, 3, 4, 5])
    with open(path, "ab") as f:
        f.write(b'{"step": 6, "da')  # torn
    assert write(path, 4, [4, 5, 6]) == [0, 1, 2, 3, 4, 4, 5, 6]
    assert write(tmp_path / "none.jsonl", 5, [6]) == [6]


@pytest.mark.parametrize("variable", ["VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT", None])
def test_path_and_content_are_those_of_verls_own_logger(tmp_path, monkeypatch, variable):
    from verl.utils.tracking import FileLogger

    monkeypatch.chdir(tmp_path)
    for name in ("VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, str(tmp_path / "there"))
    theirs = FileLogger("project", "experiment")
    theirs.log({"a/b": np.float32(3)}, 3)
    theirs.finish()
    path = metrics_path("project", "experiment")
    content = path.read_bytes()
    write(path, 0, [3])
    assert path.read_bytes() == content
