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

from flashrl_verl.errors import ConfigError
from flashrl_verl.settings import Precision
from flashrl_verl.tools.evaluate.evaluate import EvalConfig, run
from flashrl_verl.tools.export.checkpoint import find

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


def test_a_stopped_evaluation_resumes_and_gives_both_precisions_with_intervals(trained, tmp_path):
    out = tmp_path / "out"
    process = evaluate(trained, out, "--precision", "bf16,int8")
    log, deadline = out / "int8" / "eval.log", time.monotonic() + 1500
    while not (log.is_file() and "Started a local Ray" in log.read_text(errors="replace")):
        assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()
        time.sleep(0.5)
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert "rerun to resume" in process.communicate(timeout=400)[0] and process.returncode == 130
    assert started and psutil.wait_procs(started, timeout=30)[1] == []
    assert not (out / "int8" / "responses.jsonl").exists()

    written = (out / "bf16" / "responses.jsonl").stat().st_mtime_ns
    text = said(evaluate(trained, out, "--precision", "bf16,int8"))
    assert "bf16: done before" in text and (out / "bf16" / "responses.jsonl").stat().st_mtime_ns == written
    # Two decoder layers of qkv, o, gate_up and down; the run keeps o.
    for precision, layers in (("bf16", 0), ("int8", 6)):
        log = (out / precision / "eval.log").read_text(errors="replace")
        assert f"rollout precision {precision}: {layers} quantized layers" in log
    report = json.loads((out / "eval.json").read_text())
    assert report["step"] == 1 and report["problems"] == {"toy_addition": 8}
    figures, gaps = (report[part]["toy_addition"] for part in ("figures", "differences"))
    assert list(figures) == ["mean@4", "pass@2", "pass@4"]
    for precision in ("bf16", "int8"):
        rows = [json.loads(line) for line in (out / precision / "responses.jsonl").read_text().splitlines()]
        # The test's reward: the share of digits, and acc, which verl's figures are made of, by length.
        values = [row["score"] + len(row["output"]) / 1000 for row in rows]
        assert len(rows) == 8 * SAMPLES and values == pytest.approx([row["acc"] for row in rows])
        figure = figures["mean@4"][precision]
        assert figure["value"] == pytest.approx(sum(values) / len(values))
        assert figure["low"] < figure["value"] < figure["high"]
    gap = gaps["mean@4"]["int8"]
    assert gap["low"] <= gap["value"] <= gap["high"]
    assert gap["value"] == pytest.approx(figures["mean@4"]["int8"]["value"] - figures["mean@4"]["bf16"]["value"])
    assert (out / "eval.md").read_text().count("int8 - bf16") == 1 == text.count("int8 - bf16")

    # Other settings are not mixed with these, nor other weights.
    config = dict(checkpoint=find(trained), precisions=(Precision.BF16,), temperature=1.0, output=out)
    with pytest.raises(ConfigError, match=r"with other settings: .*val_kwargs\.n was 4 and is 2"):
        run(EvalConfig(**config, n=2), None)
    os.utime(trained / "checkpoints" / "global_step_1" / "actor" / "model_world_size_2_rank_0.pt")
    with pytest.raises(ConfigError, match="of other weights"):
        run(EvalConfig(**config, n=SAMPLES), None)


def test_a_hugging_face_folder_is_evaluated_with_the_recipes_defaults(trained, tmp_path):
    data = f"data.val_files={trained}/assets/test.parquet"
    reward = f"reward.custom_reward_function.path={PROGRAMS}/digit_reward.py"
    words = ["experiment=smoke", data, reward, "reward.custom_reward_function.name=even_length"]
    said(evaluate(trained / "assets" / "model", tmp_path / "out", "--precision", "int8", *words))
    report = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert report["step"] is None and 0 < report["figures"]["toy_addition"]["mean@4"]["int8"]["value"] < 1
