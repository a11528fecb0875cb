# SPDX-License-Identifier: Apache-2.0
"""`flashrl bench learning` with several GPUs and cores: which run sees which, how soon runs start; what a folder
refuses."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from learning_runs import PROGRAM, STEPS, Seen, carry_out, config, limits
from omegaconf import OmegaConf

from benchmarks import learning_recipe
from benchmarks.learning import arms_of
from benchmarks.learning_schedule import Schedule, stagger
from flashrl_verl.errors import ConfigError
from flashrl_verl.tools.run_directory import CONFIG_FILE


@pytest.fixture
def runs(tmp_path):
    return config(tmp_path).runs()


def test_each_run_sees_the_gpu_with_the_fewest_runs(runs):
    carry_out(runs, limits(parallel=4, gpus=("3", "GPU-5c")), seconds="0.5")
    assert [(run.folder / "gpu").read_text() for run in runs] == ["3", "GPU-5c"] * 2


def test_a_gpu_whose_run_is_over_takes_the_next_one(runs):
    """The first run takes three times as long as the others, which share the other GPU one after another."""
    seen = Seen()

    def prepare(run):
        words = [sys.executable, str(PROGRAM), str(run.folder), str(STEPS), "1" if run is runs[0] else "0.05", "0"]
        return words, {"seed": run.seed}, OmegaConf.create({})

    Schedule(runs, STEPS, limits(gpus=("0", "1")), prepare, seen.tell, seen.watch).carry_out()
    assert [(run.folder / "gpu").read_text() for run in runs[:3]] == ["0", "1", "1"]


def test_without_gpus_to_spread_over_a_run_sees_what_the_command_does(runs, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    carry_out(runs[:1], limits())
    assert (runs[0].folder / "gpu").read_text() == "6,7"


@pytest.mark.parametrize(("cores", "seconds"), [(2, 15.0), (16, 15.0), (64, 3.75), (256, 3.0)])
def test_many_cores_start_runs_sooner_after_each_other(cores, seconds):
    assert stagger(cores) == seconds


def test_runs_are_spread_over_the_gpus_that_this_process_sees(tmp_path, monkeypatch):
    there = config(tmp_path, hardware="cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert learning_recipe.gpus(there) == ("0", "1", "2")
    assert learning_recipe.gpus(replace(there, overrides=("trainer.n_gpus_per_node=1",))) == ("0", "1", "2")
    two = ("trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64")
    assert learning_recipe.gpus(replace(there, overrides=two)) == ()
    assert learning_recipe.gpus(config(tmp_path)) == ()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("flashrl={precision: bf16}", r"int8:tis seed 3 flashrl\.precision=bf16 \(it is int8\).*--arm"),
        ("data={seed: 5}", r"data\.seed=5 \(it is 3\).*--seed"),
        ("actor_rollout_ref={rollout: {seed: 5}}", r"rollout\.seed=5 \(it is 3\).*--seed"),
        ("trainer={total_training_steps: 9}", r"total_training_steps=9 \(it is 4\).*--steps"),
        ("flashrl.bf16_replica_fraction=0.5", r"bf16_replica_fraction=0\.5 \(it is 0\.0\).*one precision"),
        ("algorithm.rollout_correction.rollout_is=null", r"rollout_is=None \(it is token\).*--arm.*preset"),
        ("+algorithm.rollout_correction.further=1", r"rollout_correction\.further=1 \(it is None\).*--arm"),
    ],
)
def test_a_run_is_what_its_name_says_however_an_override_is_written(tmp_path, override, said):
    cfg = config(tmp_path, arms=arms_of("int8:tis"), seeds=(3,), overrides=(override,))
    with pytest.raises(ConfigError, match=said):
        learning_recipe.check_arms(cfg)


def test_an_override_that_is_right_for_the_first_seed_is_refused_before_anything_runs(tmp_path):
    cfg = config(tmp_path, arms=arms_of("int8:tis"), seeds=(5, 0), overrides=("data={seed: 5}",))
    with pytest.raises(ConfigError, match=r"int8:tis seed 0 data\.seed=5 \(it is 0\).*--seed"):
        learning_recipe.check_arms(cfg)


def begin(there, run) -> None:
    """As an attempt does: the composed configuration lies beside the metrics."""
    run.folder.mkdir(parents=True)
    composed = learning_recipe.compose_run(there, run)
    (run.folder / CONFIG_FILE).write_text(OmegaConf.to_yaml(composed, resolve=True))


def test_a_run_that_was_begun_with_other_settings_is_refused_before_anything_runs(tmp_path):
    there = config(tmp_path, arms=arms_of("int8:tis"), seeds=(0, 1))
    for run in there.runs():
        begin(there, run)
    learning_recipe.check_arms(there)
    file = there.runs()[1].folder / CONFIG_FILE
    before = OmegaConf.load(file)
    before.data.train_batch_size = 128
    before.actor_rollout_ref.rollout.val_kwargs.n = 4
    file.write_text(OmegaConf.to_yaml(before))
    with pytest.raises(
        ConfigError,
        match=r"int8:tis seed 1 .*val_kwargs\.n=2 \(was 4\); data\.train_batch_size=64 \(was 128\).*--output",
    ):
        learning_recipe.check_arms(there)


@pytest.mark.parametrize(("key", "value"), [("flashrl.precision", "bf16"), ("data.seed", 7)])
def test_a_run_that_was_begun_as_another_than_its_folder_says_is_refused(tmp_path, key, value):
    there = config(tmp_path, arms=arms_of("int8:tis"), seeds=(0, 1))
    run = there.runs()[1]
    begin(there, run)
    file = run.folder / CONFIG_FILE
    before = OmegaConf.load(file)
    OmegaConf.update(before, key, value)
    file.write_text(OmegaConf.to_yaml(before))
    with pytest.raises(ConfigError, match=rf"int8:tis seed 1 .*{key}=\w+ \(was {value}\).*--output"):
        learning_recipe.check_arms(there)


def test_what_may_change_between_attempts_may_change_here_too(tmp_path):
    there = config(tmp_path / "a", arms=arms_of("int8:tis"))
    for run in there.runs():
        begin(there, run)
    (tmp_path / "a").rename(tmp_path / "b")
    moved = config(tmp_path / "b", arms=arms_of("int8:tis"), overrides=("trainer.save_freq=7",), kv_cache_gib=0.1)
    learning_recipe.check_arms(moved)


def test_a_setting_that_begins_like_the_folder_is_no_path_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there = config(Path("c"), arms=arms_of("int8:tis"))
    for run in there.runs():
        begin(there, run)
    learning_recipe.check_arms(there)
    other = replace(there, overrides=("actor_rollout_ref.actor.optim.lr_scheduler_type=constant",))
    with pytest.raises(ConfigError, match=r"lr_scheduler_type=constant \(was cosine\)"):
        learning_recipe.check_arms(other)
