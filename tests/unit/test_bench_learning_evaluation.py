# SPDX-License-Identifier: Apache-2.0
"""The last part of `flashrl bench learning`: weights that are kept, models that are asked, and a report whatever
happens."""

import json
import shutil
import signal

import pytest
from learning_runs import KEY, config, write_metrics
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.learning import ASSETS, arms_of
from benchmarks.learning_bf16 import models_left
from benchmarks.learning_command import UNFINISHED
from benchmarks.learning_run import state_of
from benchmarks.learning_schedule import Event, News, Schedule
from flashrl_verl.errors import FlashRLError
from flashrl_verl.tools.process_tree import Stopped
from flashrl_verl.tools.run_directory import LATEST


def words_of(output):
    """Of a command of two runs, and of a model that is made in seconds."""
    sizes = ["--hidden-size", "128", "--layers", "1", "--chain-steps", "2", "--target-accuracy", "0"]
    runs = ["--hardware", "cpu", "--arm", "bf16:none", "--seed", "0,1", "--steps", "4"]
    return ["learning", *runs, *sizes, "--output", str(output)]


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """The model that all runs start from, and its data."""
    output = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Schedule, "carry_out", lambda self: None)
        assert CliRunner().invoke(app, words_of(output)).exit_code == UNFINISHED
    return output / ASSETS


@pytest.fixture
def two_runs(assets, tmp_path, monkeypatch):
    """Two finished runs, of which the first one has its weights, and the words of their command. None is started
    here."""
    monkeypatch.setattr(Schedule, "carry_out", lambda self: None)
    shutil.copytree(assets, tmp_path / ASSETS)
    runs = config(tmp_path, arms=arms_of("bf16:none")).runs()
    for run in runs:
        write_metrics(run, {0: {KEY: 0.3}, 4: {KEY: 0.5}})
    (runs[0].folder / "model").mkdir()
    return runs, words_of(tmp_path)


@pytest.mark.parametrize(
    ("latest", "what"), [(None, "it has no checkpoint"), ("2", "is of step 2"), ("4", "step_4 is gone")]
)
def test_a_finished_run_without_weights_costs_neither_the_report_nor_the_others(two_runs, monkeypatch, latest, what):
    (one, other), words = two_runs
    asked = []
    monkeypatch.setattr("benchmarks.learning_bf16.ask", lambda config, composed, pairs, seconds: asked.extend(pairs))
    if latest:
        (other.folder / "checkpoints").mkdir()
        (other.folder / "checkpoints" / LATEST).write_text(latest)
    result = CliRunner().invoke(app, words)
    assert "written: " in result.output and "runs: 2 finished" in result.output
    assert isinstance(result.exception, FlashRLError) and what in str(result.exception)
    assert str(result.exception).startswith("bf16:none seed 1 is finished")
    assert f"Put it back, or remove {other.folder} to train it again" in str(result.exception)
    assert [model.parent.name for model, _ in asked] == ["assets", one.folder.name]


def test_an_engine_that_fails_costs_no_report(two_runs, monkeypatch):
    (_, other), words = two_runs
    (other.folder / "model").mkdir()

    def ask(*_):
        raise FlashRLError("the BF16 engine failed (exit code 1)")

    monkeypatch.setattr("benchmarks.learning_bf16.ask", ask)
    result = CliRunner().invoke(app, words)
    assert "written: " in result.output and "Time was over" not in result.output
    assert isinstance(result.exception, FlashRLError) and "the BF16 engine failed" in str(result.exception)


def test_ctrl_c_while_models_are_asked_says_that_the_same_command_goes_on(two_runs, monkeypatch):
    (one, other), words = two_runs
    (other.folder / "model").mkdir()

    def ask(config, composed, pairs, seconds):
        pairs[0][1].write_text(
            json.dumps({"samples": 8, "metrics": {"mean@8": {"value": 0.5, "low": 0.4, "high": 0.6}}})
        )
        raise Stopped(signal.SIGINT)

    monkeypatch.setattr("benchmarks.learning_bf16.ask", ask)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 130 and "written: " in result.output
    assert "Stopped: 2 models are to be asked in BF16; the same command goes on." in result.output


def test_how_many_models_are_left_is_in_words():
    assert models_left(1, "cpu") == "1 model is to be asked in BF16"
    assert models_left(10, "cuda") == "10 models are to be asked in BF16, by estimate 3 minutes"  # 1 + 10 x 12 s


def test_weights_are_kept_as_soon_as_a_run_is_finished(two_runs, monkeypatch):
    (_, other), words = two_runs
    kept, at_once = [], []
    monkeypatch.setattr("benchmarks.learning_bf16.LEAST_S", float("inf"))
    monkeypatch.setattr("benchmarks.learning_bf16.keep_weights", lambda run, steps: kept.append((run, steps)))

    def carry_out(schedule):
        schedule._tell(News(event=Event.STOPPED, state=state_of(other, 4)))
        schedule._tell(News(event=Event.FINISHED, state=state_of(other, 4)))
        at_once.extend(kept)

    monkeypatch.setattr(Schedule, "carry_out", carry_out)
    assert CliRunner().invoke(app, words).exit_code == UNFINISHED
    assert at_once == [(other, 4)]
