# SPDX-License-Identifier: Apache-2.0
"""``flashrl bench refit`` as a user runs it, on whatever device there is."""

import json
import os
import subprocess
import sys

import pytest
import torch

pytestmark = [pytest.mark.cpu_e2e, pytest.mark.timeout(300)]
ROOT = __file__.rsplit("/tests/", 1)[0]


def bench(folder, *words: str) -> tuple[subprocess.CompletedProcess, dict]:
    command = [sys.executable, "-m", "flashrl_verl.cli", "bench", "refit", "--output", str(folder), *words]
    run = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ, HF_HUB_OFFLINE="1"), capture_output=True, text=True, timeout=280
    )
    data = folder / "refit.json"
    return run, json.loads(data.read_text()) if data.exists() else {}


@pytest.mark.parametrize("source, size", [("bf16", 2), ("fp32", 4)])
def test_every_arm_is_measured_and_its_bytes_are_those_of_the_model(tmp_path, source, size):
    run, report = bench(tmp_path, "--model", "tiny", "--precision", "int8,bf16", "--repeats", "2", "--source", source)
    assert run.returncode == 0, run.stderr[-2000:]
    arms = {result["arm"]: result for result in report["results"]}
    assert {"flashrl int8", "flashrl bf16"} <= arms.keys()
    assert ("vllm bf16 load_weights" in arms) == torch.cuda.is_available()
    for result in arms.values():
        assert len(result["refit_seconds"]) == len(result["load_seconds"]) == 2
        assert all(0 < load <= whole for load, whole in zip(result["load_seconds"], result["refit_seconds"], strict=True))
    int8, bf16 = arms["flashrl int8"], arms["flashrl bf16"]
    assert int8["read_bytes"] == bf16["read_bytes"] and bf16["read_bytes"] * 2 == bf16["written_bytes"] * size
    assert 0.5 < int8["written_bytes"] / bf16["written_bytes"] < 1
    assert "flashrl int8" in run.stdout and (tmp_path / "refit.png").stat().st_size > 1000
    assert report["versions"]["torch"] == torch.__version__


def test_an_unknown_model_is_refused_with_the_names_there_are(tmp_path):
    run, _ = bench(tmp_path, "--model", "qwen9-1t")
    assert run.returncode == 1 and "qwen2.5-14b" in run.stderr and "Traceback" not in run.stderr
