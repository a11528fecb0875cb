# SPDX-License-Identifier: Apache-2.0
"""A run's checkpoint, evaluated in BF16 and INT8 by real engines: figures with intervals, nothing generated twice."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from engines import CUDA
from recipe_runs import PROGRAMS, command, finish, make_assets, start
from typer.testing import CliRunner

from flashrl_verl.cli import app
from flashrl_verl.errors import ConfigError
from flashrl_verl.quickstart.task import TaskConfig, split_problems, verl_rows
from flashrl_verl.tools.evaluate.partial import PARTIAL, read

pytestmark = [pytest.mark.cpu_e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

PROBLEMS, SAMPLES, TOKENS = 40, 4, 12
KEPT = "re:.*o_proj"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """What one step of the recipe leaves behind."""
    folder = tmp_path_factory.mktemp("run")
    assets = make_assets(folder / "assets", initializer_range=0.15)
    overrides = (
        "trainer.total_training_steps=1",
        "trainer.save_freq=1",
        f"flashrl.ignore=['{KEPT}']",
        "flashrl.self_check=false",
    )
    run = finish(start(command(assets, folder, *overrides), folder), folder, 900)
    assert run.returncode == 0, run.failure
    return folder / "checkpoints" / "global_step_1"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Additions, every third of them twice."""
    import pyarrow
    import pyarrow.parquet

    problems = split_problems(TaskConfig(), seed=5).train[:PROBLEMS]
    rows = verl_rows([*problems, *problems[::3]], split="test")
    file = tmp_path_factory.mktemp("data") / "test.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("eval")


def evaluate(checkpoint: Path, data: Path, output: Path, *words: str):
    reward = f"{PROGRAMS}/digit_reward.py:even_length"
    options = [
        "--data",
        data,
        "--output",
        output,
        "--n",
        SAMPLES,
        "--max-tokens",
        TOKENS,
        "--reward-function",
        reward,
        *words,
    ]
    return CliRunner().invoke(app, ["eval", str(checkpoint), *map(str, options)])


@pytest.fixture(scope="module")
def evaluated(checkpoint, data, output):
    result = evaluate(checkpoint, data, output, "--precision", "bf16,int8")
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output, json.loads((output / "eval.json").read_text())


def test_both_precisions_have_figures_with_intervals_and_a_paired_difference(evaluated):
    said, report = evaluated
    assert report["problems"] == {"toy_addition": PROBLEMS} and report["rows"] == PROBLEMS + -(-PROBLEMS // 3)
    assert report["step"] == 1 and report["interval"]["level"] == 0.95
    rows = report["figures"]["toy_addition"]
    assert list(rows) == ["mean@4", "pass@2", "pass@4"]
    for row in rows.values():
        for figure in row.values():
            # pass@4 may be 1: the interval has a width all the same.
            assert 0 <= figure["low"] <= figure["value"] <= figure["high"] <= 1 and figure["low"] < figure["high"]
    assert all(figure["low"] < figure["value"] < figure["high"] for figure in rows["mean@4"].values())
    gap = report["differences"]["toy_addition"]["mean@4"]["int8"]
    assert gap["low"] <= gap["value"] <= gap["high"]
    assert gap["value"] == pytest.approx(rows["mean@4"]["int8"]["value"] - rows["mean@4"]["bf16"]["value"])
    assert "int8 - bf16" in said and f"{rows['mean@4']['int8']['value']:.3f} [" in said


def test_the_engines_hold_what_they_are_called_and_the_runs_record_says_what_int8_keeps(evaluated):
    said, report = evaluated
    bf16, int8 = (report["precisions"][name] for name in ("bf16", "int8"))
    assert (bf16["layers"]["quantized_layers"], bf16["kernels"]["linear"]) == (0, "unquantized")
    # Two decoder layers of qkv, o, gate_up and down; the run kept o.
    assert (int8["layers"]["quantized_layers"], int8["layers"]["unquantized_layers"]) == (6, 2)
    assert int8["kernels"]["linear"] == ("cutlass" if CUDA else "onednn")
    assert f"ignore=['{KEPT}']" in said and "the run's record" in said
    assert int8["values"] != bf16["values"]


def test_responses_are_written_with_what_they_are_worth(evaluated, output):
    for precision in ("bf16", "int8"):
        rows = [json.loads(line) for line in (output / precision / "responses.jsonl").read_text().splitlines()]
        values = [[float(len(text) % 2 == 0) for text in row["responses"]] for row in rows]
        assert values == [row["values"] for row in rows] == evaluated[1]["precisions"][precision]["values"]
        assert len(values) == PROBLEMS and {len(group) for group in values} == {SAMPLES}
        assert len({text for row in rows for text in row["responses"]}) > PROBLEMS
    assert {path.name for path in output.iterdir()} == {"bf16", "int8", "model", "eval.json"}
    assert not {path.name for path in (output / "int8").iterdir()} & {
        "engine.job.json",
        "engine.answer.json",
        "progress",
    }


def test_what_is_finished_is_not_generated_again_and_other_settings_are_refused(evaluated, checkpoint, data, output):
    before = {p: (output / p / "answer.json").stat().st_mtime_ns for p in ("bf16", "int8")}
    again = evaluate(checkpoint, data, output, "--precision", "int8,bf16", "--threshold", "0.5")
    assert again.exit_code == 0, (again.output, again.exception)
    assert again.output.count("generated before") == 2 and "bf16 - int8" in again.output
    assert before == {p: (output / p / "answer.json").stat().st_mtime_ns for p in ("bf16", "int8")}
    other = evaluate(checkpoint, data, output, "--precision", "bf16", "--seed", "1")
    assert isinstance(other.exception, ConfigError) and "seed 0 (now 1)" in str(other.exception)


def test_a_reward_that_does_not_know_the_data_is_refused_before_an_engine_starts(checkpoint, data, tmp_path):
    words = [
        "eval",
        str(checkpoint),
        "--data",
        str(data),
        "--output",
        str(tmp_path / "out"),
        "--max-tokens",
        str(TOKENS),
    ]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, ConfigError) and "--reward-function" in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_a_response_longer_than_the_model_is_refused_before_an_engine_starts(checkpoint, data, tmp_path):
    result = evaluate(checkpoint, data, tmp_path / "out", "--max-tokens", "100000")
    assert isinstance(result.exception, ConfigError) and "set --max-tokens" in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_ctrl_c_ends_the_engine_and_what_is_unfinished_is_not_taken_for_finished(checkpoint, data, tmp_path):
    reward = f"{PROGRAMS}/digit_reward.py:even_length"
    options = ["--data", data, "--output", tmp_path / "out", "--max-tokens", 64, "--n", 64, "--reward-function", reward]
    words = [sys.executable, "-m", "flashrl_verl.cli", "eval", checkpoint, *options]
    process = subprocess.Popen([*map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log = tmp_path / "out" / "bf16" / "engine.log"
    deadline = time.monotonic() + 300
    while not (log.is_file() and log.stat().st_size) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.2)
    started = psutil.Process(process.pid).children(recursive=True)
    assert started, process.stdout.read()
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=400)[0]
    assert process.returncode == 130 and "the same command goes on" in said, said
    assert psutil.wait_procs(started, timeout=10)[1] == []
    assert not (tmp_path / "out" / "bf16" / "settings.json").exists()


def test_what_a_stop_cut_off_is_drawn_again_as_it_was(checkpoint, data, tmp_path):
    samples = 16  # more than an engine takes at a time
    words = ["--precision", "bf16", "--n", samples, "--max-tokens", 64]
    command = ["eval", checkpoint, "--data", data, "--output", tmp_path / "out", *words]
    command += ["--reward-function", f"{PROGRAMS}/digit_reward.py:even_length"]
    process = subprocess.Popen(
        [sys.executable, "-m", "flashrl_verl.cli", *map(str, command)], stdout=subprocess.DEVNULL
    )
    partial, deadline = tmp_path / "out" / "bf16" / PARTIAL, time.monotonic() + 300
    while not (partial.is_file() and partial.stat().st_size) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=400) == 130
    kept = read(partial)
    assert 0 < len(kept) < PROBLEMS * samples  # it was stopped in the middle
    other = evaluate(checkpoint, data, tmp_path / "out", *words, "--seed", "1")
    assert isinstance(other.exception, ConfigError) and "generated otherwise: --seed 0 (now 1)" in str(other.exception)
    again, whole = (evaluate(checkpoint, data, tmp_path / name, *words) for name in ("out", "whole"))
    assert again.exit_code == 0 and f"behind {len(kept)} responses" in again.output, (again.output, again.exception)
    assert whole.exit_code == 0 and "behind" not in whole.output, (whole.output, whole.exception)
    ours, theirs = (json.loads((tmp_path / name / "bf16" / "answer.json").read_text()) for name in ("out", "whole"))
    mine, others = ([ids for group in one["responses"] for ids in group] for one in (ours, theirs))
    assert [mine[number] for number in kept] == [response.token_ids for response in kept.values()]
    # Other neighbours in a batch may round another way; a stream of draws that began anew would make all different.
    assert sum(one == another for one, another in zip(mine, others, strict=True)) > 0.9 * len(mine)
    assert not partial.exists() and ours["kept"] == len(kept)


def test_precisions_share_their_random_numbers(evaluated, output):
    bf16, int8 = (json.loads((output / name / "answer.json").read_text())["responses"] for name in ("bf16", "int8"))
    pairs = [pair for one, other in zip(bf16, int8, strict=True) for pair in zip(one, other, strict=True)]
    first = sum(one[0] == other[0] for one, other in pairs) / len(pairs)
    shifted = sum(one[0] == other[0] for (one, _), (_, other) in zip(pairs, pairs[1:], strict=False)) / (len(pairs) - 1)
    assert first > 0.8 and shifted < 0.5


def test_an_engine_that_cannot_start_says_why_and_leaves_the_finished_precision(
    checkpoint, data, output, tmp_path, evaluated
):
    copy = shutil.copytree(output, tmp_path / "copy")
    shutil.rmtree(copy / "int8")
    (copy / "model" / "model.safetensors").write_bytes(b"broken")
    result = evaluate(checkpoint, data, copy, "--precision", "bf16,int8")
    assert (
        result.exit_code != 0
        and "the int8 engine failed" in str(result.exception)
        and "engine.log" in str(result.exception)
    )
    assert (copy / "bf16" / "answer.json").exists()
