# SPDX-License-Identifier: Apache-2.0
"""`flashrl bench learning`: its settings, and how far each run is."""

import json
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from learning_runs import KEY, config, write_metrics, write_record
from typer.testing import CliRunner

from benchmarks import learning, learning_command
from benchmarks.__main__ import app
from benchmarks.learning import Arm, arms_of, check_settings, lasting, seeds_of, write_settings
from benchmarks.learning_command import DEFAULT_ARMS, UNFINISHED
from benchmarks.learning_run import Status, state_of
from benchmarks.learning_schedule import Schedule
from flashrl_verl.errors import ConfigError
from flashrl_verl.quickstart.chain import ChainConfig
from flashrl_verl.quickstart.model import ToyModelConfig
from flashrl_verl.quickstart.outliers import OutlierConfig
from flashrl_verl.quickstart.warmup import WarmupConfig
from flashrl_verl.settings import Precision
from flashrl_verl.tools.recipe_process import compose
from flashrl_verl.tools.run_directory import LATEST

# ---- words ----


def test_arms_and_seeds_are_read_from_their_words():
    assert arms_of(" int8:tis ,fp8:seq_tis") == (
        Arm(precision=Precision.INT8, correction="tis"),
        Arm(precision=Precision.FP8, correction="seq_tis"),
    )
    assert seeds_of("0, 7,12") == (0, 7, 12)
    assert [str(arm) for arm in arms_of(DEFAULT_ARMS)] == DEFAULT_ARMS.split(",")


def test_the_first_seed_of_every_arm_comes_first(tmp_path):
    assert [run.name for run in config(tmp_path).runs()] == [
        "bf16:none seed 0",
        "int8:tis seed 0",
        "bf16:none seed 1",
        "int8:tis seed 1",
    ]
    assert len({run.folder for run in config(tmp_path).runs()}) == 4


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--arm", "int4:tis"], "--arm 'int4:tis': 'int4' is no precision"),
        (["--arm", "int8"], "'' is no correction; there are bypass, geo_rs"),
        (["--arm", ","], "--arm names none"),
        (["--arm", "int8:tis,int8:tis"], "--arm names one twice"),
        (["--seed", "0,-1"], "--seed '0,-1'"),
        (["--seed", "1,1"], "--seed names one twice"),
        (["--hardware", "tpu"], "--hardware tpu"),
        (["--hidden-size", "200"], "--hidden-size 200"),
        (["--chain-steps", "14"], "Remedy: --chain-steps 13"),
        (["trainer.total_training_steps=5"], "Remedy: --steps"),
        (["+flashrl.precision=int8"], "Remedy: --arm"),
        (["nonsense"], "'nonsense' is neither"),
        (["actor_rollout_ref.actor.optim.lrr=1"], "there is no key"),
        (["trainer.logger=[console]"], "`file` among the loggers"),
        (["trainer.save_freq=-1"], "saves nothing"),
    ],
)
def test_words_that_cannot_be_are_refused_before_anything_is_made(tmp_path, words, part):
    given = ["--hardware", "cpu", *words] if "--hardware" not in words else words
    result = CliRunner().invoke(app, ["learning", *given, "--output", str(tmp_path / "out")])
    assert result.exit_code == 1 and isinstance(result.exception, ConfigError) and part in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_the_exit_code_says_whether_all_is_done(tmp_path, monkeypatch):
    """3 while a run is unfinished, 1 where one has failed twice, 0 when all are finished; no process is started
    here."""
    words = ["--hardware", "cpu", "--arm", "bf16:none", "--seed", "0,1", "--steps", "4", "--output", str(tmp_path)]
    monkeypatch.setattr("benchmarks.learning_bf16.LEAST_S", float("inf"))
    words += ["--hidden-size", "128", "--layers", "1", "--chain-steps", "2", "--target-accuracy", "0"]
    one, other = config(tmp_path, arms=arms_of("bf16:none")).runs()
    monkeypatch.setattr(Schedule, "carry_out", lambda self: None)

    def call():
        result = CliRunner().invoke(app, ["learning", *words])
        assert "written: " in result.output, result.output
        return result.exit_code, result.output

    code, said = call()
    assert code == UNFINISHED == 3 and "runs: 2 not started" in said
    assert "Time was over first: 8 of 8 steps are left, and none was saved this time" in said and "goes on" in said
    write_metrics(one, {0: {KEY: 0.3}, 4: {KEY: 0.5}})
    (one.folder / "model").mkdir()
    write_record(other, {"error": ["ValueError: no"]})
    assert call()[0] == UNFINISHED
    write_record(other, *[{"error": ["ValueError: no"]}] * 2)
    code, said = call()
    assert code == UNFINISHED and "Time was over first: 2 models are to be asked in BF16; the same" in said
    for file in (tmp_path / "bf16.json", one.folder / "bf16.json"):
        file.write_text(json.dumps({"samples": 8, "metrics": {"mean@8": {"value": 0.5, "low": 0.4, "high": 0.6}}}))
    code, said = call()
    assert code == 1 and "--retry" in said and "bf16:none seed 1 failed 2 times: ValueError: no" in said
    write_metrics(other, {0: {KEY: 0.3}, 4: {KEY: 0.6}})
    (other.folder / "model").mkdir()
    (other.folder / "bf16.json").write_text((one.folder / "bf16.json").read_text())
    code, said = call()
    assert code == 0 and "runs: 2 finished" in said and "0.550 ± 0.050" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["learning", "--hardware", "cuda", "--output", str(tmp_path / "out")])
    assert isinstance(result.exception, ConfigError) and "no GPU" in str(result.exception)


def test_more_runs_at_a_time_than_there_is_memory_for_are_refused_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=24.5 * 2**30))
    words = ["learning", "--hardware", "cpu", "--parallel", "6", "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, ConfigError) and not (tmp_path / "out").exists()
    assert "--parallel 6: " in str(result.exception) and "Remedy: --parallel 3;" in str(result.exception)
    learning_command._require_memory(
        config(tmp_path, parallel=6, arms=arms_of("int8:tis"))
    )  # two seeds, no more at a time


# ---- one folder, one experiment ----


def test_a_folder_takes_more_arms_seeds_and_time_but_no_other_settings(tmp_path):
    cfg = config(tmp_path)
    check_settings(cfg)  # nothing is there
    write_settings(cfg)
    check_settings(replace(cfg, arms=arms_of("fp8:none"), seeds=(5,), parallel=7, minutes=5.0, kv_cache_gib=1.0))
    check_settings(replace(cfg, overrides=("trainer.save_freq=1", "actor_rollout_ref.rollout.max_num_seqs=64")))
    for other, named in (
        ({"steps": 5}, "steps (4, now 5)"),
        ({"overrides": ("trainer.save_freq=1", "data.shuffle=false")}, 'overrides ([], now ["data.shuffle=false"])'),
        ({"chain": ChainConfig(steps=2)}, "chain"),
        ({"outliers": OutlierConfig(factor=64)}, 'outliers (null, now {"factor": 64, "channels": 2})'),
    ):
        with pytest.raises(ConfigError) as refused:
            check_settings(replace(cfg, **other))
        assert named in str(refused.value) and "--output" in str(refused.value)


def test_what_may_change_between_the_attempts_of_a_run_may_change_here_but_for_its_validations():
    may = ["trainer.save_freq=1", "+ray_kwargs.ray_init.x=1", "~flashrl.guard", "flashrl.guard.action=stop"]
    must_not = ["trainer.test_freq=5", "trainer.val_before_train=false", "trainer.save_freq_x=1", "data.seed=1"]
    assert lasting([*may, *must_not]) == must_not


def test_a_warm_up_that_fails_leaves_the_folder_free_for_other_settings(tmp_path):
    words = ["--hardware", "cpu", "--arm", "bf16:none", "--seed", "0", "--steps", "4", "--output", str(tmp_path)]
    brief = WarmupConfig(target_accuracy=1.0, max_steps=1, probe_every=1, batch_size=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learning, "WARMUP", brief)
        result = CliRunner().invoke(
            app, ["learning", *words, "--hidden-size", "128", "--layers", "1", "--chain-steps", "2"]
        )
    assert "short of 1.00" in str(result.exception)
    assert not (tmp_path / learning.SETTINGS).exists()


def test_a_folder_of_other_versions_is_refused(tmp_path):
    write_settings(config(tmp_path))
    file = tmp_path / learning.SETTINGS
    there = json.loads(file.read_text())
    there["environment"]["torch"] = "1.0"
    file.write_text(json.dumps(there))
    with pytest.raises(ConfigError, match="another torch"):
        check_settings(config(tmp_path))
    file.write_text("[]")
    with pytest.raises(ConfigError, match="holds no settings"):
        check_settings(config(tmp_path))


def test_the_model_is_made_once_and_not_again_under_runs_that_started_from_it(tmp_path):
    brief = config(
        tmp_path,
        model=ToyModelConfig(hidden_size=64, intermediate_size=64, num_layers=1),
        chain=ChainConfig(steps=2, train=40, probe=8, test=8),
        warmup=WarmupConfig(target_accuracy=0.0, probe_every=1, batch_size=8),
    )
    probes = []
    first = learning.make(brief, lambda step, accuracy: probes.append(step))
    assert not first.reused and probes == [1] and first.made["device"] == "cpu"
    assert learning.make(brief).reused
    write_metrics(brief.runs()[0], {1: {}})
    assert learning.make(brief).reused
    first.train.unlink()
    with pytest.raises(ConfigError, match="bf16-none-seed0"):
        learning.make(brief)


# ---- how far a run is ----


@pytest.fixture
def run(tmp_path):
    return config(tmp_path).runs()[0]


def test_a_run_without_a_folder_is_new(run):
    state = state_of(run, 4)
    assert (state.status, state.step, state.resumes_at, state.failures) == (Status.NEW, 0, 0, 0)


def test_a_run_goes_on_from_its_checkpoint_and_not_from_its_last_line(run):
    write_record(run, {"exit_code": 130})
    write_metrics(run, {0: {KEY: 0.3}, 1: {}, 2: {}, 3: {}})
    (run.folder / "checkpoints").mkdir()
    (run.folder / "checkpoints" / LATEST).write_text("2")
    state = state_of(run, 4)
    assert (state.status, state.step, state.resumes_at) == (Status.UNFINISHED, 3, 2)


def test_a_run_is_finished_when_it_has_validated_after_its_last_step(run):
    write_record(run, {"exit_code": None})
    write_metrics(run, {0: {KEY: 0.3}, 4: {"timing_s/step": 1.0}})
    assert state_of(run, 4).status is Status.UNFINISHED
    write_metrics(run, {0: {KEY: 0.3}, 4: {"timing_s/step": 1.0, KEY: 0.5}})
    assert state_of(run, 4).status is Status.FINISHED


def test_a_run_has_failed_after_two_errors_and_a_stop_is_none(run):
    write_record(run, {"error": ["ValueError: one"]}, {"exit_code": 130}, {"exit_code": None})
    state = state_of(run, 4)
    assert (state.status, state.failures, state.error) == (Status.UNFINISHED, 1, ("ValueError: one",))
    write_record(run, {"error": ["ValueError: one"]}, {"exit_code": 130}, {"error": ["ValueError: two", "more"]})
    state = state_of(run, 4)
    assert (state.status, state.error) == (Status.FAILED, ("ValueError: two", "more"))


def test_a_torn_last_line_is_not_a_step(run):
    write_metrics(run, {0: {}, 1: {}})
    with (run.folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 2, "da')
    assert state_of(run, 4).step == 1


@pytest.mark.parametrize("hardware", ["cuda", "cpu"])
def test_runs_that_share_a_gpu_neither_sleep_nor_pack_their_batches(hardware):
    """vLLM's sleep asserts on the memory of the whole GPU; SDPA masks a packed row with tokens x tokens."""
    cfg = compose(["experiment=chain", f"hardware={hardware}"])
    rollout = cfg.actor_rollout_ref.rollout
    assert not rollout.enable_sleep_mode and not rollout.free_cache_engine
    assert not cfg.actor_rollout_ref.model.use_remove_padding
