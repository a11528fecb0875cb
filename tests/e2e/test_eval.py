# SPDX-License-Identifier: Apache-2.0
"""A two-rank run's checkpoint and a Hugging Face folder, evaluated by verl's own validation, stopped and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from recipe_runs import PROGRAMS, TWO_RANKS, command, finish, make_assets, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SAMPLES = 4
KEPT = "re:.*o_proj"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """What one step of the recipe on two ranks leaves behind, with its configuration beside it."""
    folder = tmp_path_factory.mktemp("run")
    assets = make_assets(folder / "assets", initializer_range=0.15)
    validates_not = ("trainer.val_before_train=false", "trainer.test_freq=-1")
    overrides = ("trainer.total_training_steps=1", "trainer.save_freq=1", f"flashrl.ignore=['{KEPT}']", *validates_not)
    words = command(assets, folder, "flashrl.self_check=false", *overrides, *TWO_RANKS)
    done = finish(start(words, folder), folder, 1500)
    assert done.returncode == 0, done.failure
    return folder


def evaluate(checkpoint: Path, output: Path, *words: str) -> subprocess.Popen:
    options = ["--output", output, "--n", SAMPLES, *words]
    command = [sys.executable, "-m", "flashrl_verl", "eval", checkpoint, *options]
    env = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    return subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )


def said(process: subprocess.Popen) -> str:
    text = process.communicate(timeout=1500)[0]
    assert process.returncode == 0, text[-6000:]
    return text


def of(out: Path, precision: str, file: str) -> Path | None:
    """A file of the only evaluation in that precision, or None."""
    return next(out.glob(f"*/{precision}-*/{file}"), None)


def logged(out: Path, precision: str) -> str:
    log = of(out, precision, "eval.log")
    return log.read_text(errors="replace") if log else ""


def test_a_stopped_evaluation_resumes_and_gives_both_precisions_with_intervals(trained, tmp_path):
    out = tmp_path / "out"
    process = evaluate(trained, out, "--precision", "bf16,int8")
    deadline = time.monotonic() + 1500
    while "Started a local Ray" not in logged(out, "int8"):
        assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()
        time.sleep(0.5)
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert "rerun to resume" in process.communicate(timeout=400)[0] and process.returncode == 130
    assert started and psutil.wait_procs(started, timeout=30)[1] == []
    assert not of(out, "int8", "responses.jsonl")

    written = of(out, "bf16", "responses.jsonl").stat().st_mtime_ns
    text = said(evaluate(trained, out, "--precision", "bf16,int8"))
    assert "bf16: done before" in text and of(out, "bf16", "responses.jsonl").stat().st_mtime_ns == written
    # Two decoder layers of qkv, o, gate_up and down; the run keeps o.
    for precision, layers in (("bf16", 0), ("int8", 6)):
        assert f"rollout precision {precision}: {layers} quantized layers" in logged(out, precision)
    report = json.loads((out / "eval.json").read_text())
    figures = report["figures"]
    assert report["problems"] == 8 and list(figures) == ["bf16", "int8", "int8 - bf16"]
    assert list(figures["bf16"]) == ["mean@4", "pass@2", "pass@4"]
    for precision in ("bf16", "int8"):
        rows = [json.loads(line) for line in of(out, precision, "responses.jsonl").read_text().splitlines()]
        # The test's reward: the share of digits, and acc, which verl's figures are made of, by length.
        values = [row["score"] + len(row["output"]) / 1000 for row in rows]
        assert len(rows) == 8 * SAMPLES and values == pytest.approx([row["acc"] for row in rows])
        figure = figures[precision]["mean@4"]
        assert figure["value"] == pytest.approx(sum(values) / len(values))
        assert figure["low"] < figure["value"] < figure["high"]
    gap = figures["int8 - bf16"]["mean@4"]
    assert gap["value"] == pytest.approx(figures["int8"]["mean@4"]["value"] - figures["bf16"]["mean@4"]["value"])
    assert "int8 - bf16" in text


def test_a_hugging_face_folder_is_evaluated_with_the_recipes_defaults(trained, tmp_path):
    data = f"data.val_files={trained}/assets/test.parquet"
    reward = f"reward.custom_reward_function.path={PROGRAMS}/digit_reward.py"
    words = ["experiment=smoke", data, reward, "reward.custom_reward_function.name=share_of_digits"]
    said(evaluate(trained / "assets" / "model", tmp_path / "out", "--precision", "int8", *words))
    report = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert report["problems"] == 8 and 0 < report["figures"]["int8"]["mean@4"]["value"] < 1
