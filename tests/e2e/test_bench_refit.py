# SPDX-License-Identifier: Apache-2.0
"""``flashrl bench refit`` as a user runs it, on whatever device there is."""

import json
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import app
from flashrl_verl.errors import ConfigError

pytestmark = [pytest.mark.cpu_e2e, pytest.mark.timeout(1200)]
ROOT = __file__.rsplit("/tests/", 1)[0]


def bench(folder, *words: str) -> tuple[subprocess.CompletedProcess, dict]:
    command = [sys.executable, "-m", "benchmarks", "refit", "--output", str(folder), *words]
    run = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ, HF_HUB_OFFLINE="1"), capture_output=True, text=True, timeout=900
    )
    data = folder / "refit.json"
    return run, json.loads(data.read_text()) if data.exists() else {}


@pytest.mark.parametrize("source, size", [("bf16", 2), pytest.param("fp32", 4, marks=pytest.mark.slow)])
def test_every_arm_is_measured_and_its_bytes_are_those_of_the_model(tmp_path, source, size):
    run, report = bench(tmp_path, "--model", "tiny", "--precision", "int8,bf16", "--repeats", "2", "--source", source)
    assert run.returncode == 0, run.stderr[-2000:]
    arms = {result["arm"]: result for result in report["results"]}
    assert {"flashrl int8", "flashrl bf16"} <= arms.keys()
    assert ("vllm bf16 load_weights" in arms) == torch.cuda.is_available()
    for result in arms.values():
        assert len(result["refit_seconds"]) == len(result["load_seconds"]) == 2
        assert all(
            0 < load <= whole for load, whole in zip(result["load_seconds"], result["refit_seconds"], strict=True)
        )
    int8, bf16 = arms["flashrl int8"], arms["flashrl bf16"]
    assert int8["read_bytes"] == bf16["read_bytes"] and bf16["read_bytes"] * 2 == bf16["written_bytes"] * size
    assert 0.5 < int8["written_bytes"] / bf16["written_bytes"] < 1
    assert "flashrl int8" in run.stdout and (tmp_path / "refit.png").stat().st_size > 1000
    assert report["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    "words, message",
    [
        (["--model", "qwen9-1t"], "qwen2.5-14b"),
        (["--model", "tiny", "--layers", "99"], "--layers 99: tiny has"),
        (["--model", "broken"], "transformers cannot read"),
        (["--precision", "int9"], "--precision int9: 'int9' is not one of int8"),
        (["--precision", ","], "names no precision"),
    ],
)
def test_a_wrong_option_is_one_message_that_names_it(tmp_path, words, message):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    words = [str(tmp_path / word) if word == "broken" else word for word in words]
    result = CliRunner().invoke(app, ["refit", "--output", str(tmp_path / "out"), *words])
    assert isinstance(result.exception, ConfigError) and message in str(result.exception)
    assert len(str(result.exception).splitlines()) == 1


def test_an_output_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    run, _ = bench(tmp_path / "file")
    assert run.returncode == 1 and "--output" in run.stderr and "Traceback" not in run.stderr
    assert len(run.stderr.strip().splitlines()) < 4
