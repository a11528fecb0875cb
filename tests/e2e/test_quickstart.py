# SPDX-License-Identifier: Apache-2.0
"""The quickstart from its command line: stopped by Ctrl-C, resumed, finished."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

from flashrl_verl.tools.recipe_process import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def quickstart(folder, *words):
    command = [sys.executable, "-m", "flashrl_verl", "quickstart", "--output", str(folder), "hardware=cpu"]
    # A healthy run touches none of the guard's default limits, not for one step.
    guard = ("flashrl.guard.action=stop", "flashrl.guard.patience=1")
    words = ("experiment=smoke", "--steps", "4", "trainer.save_freq=1", *guard, *words)
    return subprocess.Popen(
        [*command, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_a_quickstart_that_is_stopped_leaves_no_process_and_resumes_to_its_end(tmp_path):
    folder = tmp_path / "my run"
    process = quickstart(folder)
    said = []
    for line in process.stdout:
        said.append(line)
        if "] step 1/4" in line:
            break
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) > 5, "".join(said)
    process.send_signal(signal.SIGINT)
    stopped = time.monotonic()
    rest = process.communicate(timeout=100)[0]
    assert process.returncode == 130 and "To resume (from the checkpoint of step " in rest, rest
    assert time.monotonic() - stopped < 60 and not [p for p in started if p.is_running() and p.status() != "zombie"]

    resumed = quickstart(folder, "--resume")
    rest = resumed.communicate(timeout=900)[0]
    assert resumed.returncode == 0 and "step 4/4, held-out accuracy" in rest, rest
    assert "supervised warm-up: update" not in rest, "the assets are used again"
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and {*steps} == {*range(5)}
    assert (folder / "report.png").is_file()
