# SPDX-License-Identifier: Apache-2.0
"""`flashrl bench learning` with real runs on the CPU: from the warm-up to the picture, by way of an archive, and its
engine."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from learning_runs import config
from safetensors.torch import load_file, save_file

from benchmarks.legacy_learning import learning
from benchmarks.legacy_learning import learning_bf16 as bf16
from benchmarks.legacy_learning.learning import arms_of
from benchmarks.legacy_learning.learning_recipe import compose_run
from benchmarks.legacy_learning.learning_results import accuracy_of
from benchmarks.toy.chain import ChainConfig
from flashrl_verl.quickstart.model import ToyModelConfig
from flashrl_verl.quickstart.run import LATEST
from flashrl_verl.quickstart.warmup import WarmupConfig

pytestmark = [pytest.mark.cpu_e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

SMALL = ("--hidden-size", "128", "--layers", "1", "--chain-steps", "2", "--target-accuracy", "0")
"""A model that has hardly learnt anything: whether it gets better is not asked."""

OVERRIDES = (
    "data.train_batch_size=8",
    "data.val_max_samples=8",
    "data.max_response_length=32",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "actor_rollout_ref.rollout.max_num_seqs=64",
    "actor_rollout_ref.rollout.max_num_batched_tokens=2048",
    "reward.reward_kwargs.overlong_buffer_cfg.len=8",
)


def command_of(*words) -> list[str]:
    return [sys.executable, "-m", "flashrl_verl", "bench", *map(str, words)]


def test_a_stopped_run_goes_on_where_its_archive_is_unpacked(tmp_path):
    """SIGINT behind the first checkpoint; the folder travels in small parts, and the old one is gone."""
    there, here, archive = tmp_path / "there", tmp_path / "here", tmp_path / "saved" / "chain"
    words = [
        "--arm",
        "bf16:none",
        "--seed",
        "0",
        "--steps",
        "3",
        "--hardware",
        "cpu",
        "--minutes",
        "25",
        *SMALL,
        *OVERRIDES,
    ]
    words += ["trainer.save_freq=1", "--first-step-limit", "900", "--step-limit", "600"]
    env = dict(os.environ, HF_HUB_OFFLINE="1")
    latest = there / "runs" / "bf16-none-seed0" / "checkpoints" / LATEST
    with (tmp_path / "first.log").open("wb") as log:
        first = subprocess.Popen(command_of("learning", *words, "--output", there), env=env, stdout=log, stderr=log)
        try:
            while first.poll() is None and not latest.is_file():
                time.sleep(0.2)
            first.send_signal(signal.SIGINT)
            assert first.wait(120) == 130, (tmp_path / "first.log").read_text()
        finally:
            first.kill()
    saved = int(latest.read_text())
    assert 1 <= saved < 3
    for step in (["learning-pack", there, archive, "--part-mb", "1"], ["learning-unpack", archive, here]):
        subprocess.run(command_of(*step), env=env, check=True, timeout=120)
    shutil.rmtree(there)
    done = subprocess.run(
        command_of("learning", *words, "--output", here), env=env, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"bf16:none seed 0: started at step {saved}" in done.stdout and "made before, used again" in done.stdout
    steps = [
        json.loads(line)["step"]
        for line in (here / "runs" / "bf16-none-seed0" / "metrics.jsonl").read_text().splitlines()
    ]
    assert sorted(set(steps)) == [0, 1, 2, 3] and (here / "runs" / "bf16-none-seed0" / "bf16.json").is_file()


def test_one_arm_is_trained_and_the_same_command_has_nothing_left_to_do(tmp_path):
    out = tmp_path / "out"
    words = [
        "--arm",
        "int8:tis",
        "--seed",
        "5",
        "--steps",
        "2",
        "--hardware",
        "cpu",
        "--minutes",
        "25",
        *SMALL,
        *OVERRIDES,
    ]
    words += ["--first-step-limit", "900", "--step-limit", "600"]  # a busy machine
    command = command_of("learning", *words, "--output", out)

    def call() -> subprocess.CompletedProcess:
        return subprocess.run(
            command, env=dict(os.environ, HF_HUB_OFFLINE="1"), capture_output=True, text=True, timeout=1600
        )

    done = call()
    run = out / "runs" / "int8-tis-seed5"
    log = (run / "train.log").read_text()[-3000:] if (run / "train.log").is_file() else ""
    assert done.returncode == 0, done.stdout + done.stderr + log
    assert "int8:tis seed 5: finished" in done.stdout and (out / "learning.png").read_bytes().startswith(b"\x89PNG")
    (found,) = json.loads((out / "learning.json").read_text())["runs"]
    assert (found["arm"], found["seed"], found["status"], found["step"]) == ("int8:tis", 5, "finished", 2)
    assert found["series"]["accuracy"]["step"] == [0, 2] and found["series"]["k3_kl"]["step"] == [1, 2]
    asked = [json.loads(file.read_text()) for file in (out / "bf16.json", run / "bf16.json")]
    assert all(one["precision"] == "bf16" and len(one["right"]) == 512 for one in asked)
    assert found["bf16"]["mean@8"]["value"] == pytest.approx(accuracy_of(asked[1])["value"], abs=1e-3)
    assert all(0 < value < 0.1 for value in found["series"]["k3_kl"]["value"])
    assert all(0.5 < value <= 1.01 for value in found["series"]["effective_sample_size"]["value"])
    metrics = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        metrics.setdefault(entry["step"], {}).update(entry["data"])
    assert metrics[2]["flashrl/quantized_layers"] == 4 and "val-core/toy_chain/acc/mean@2" in metrics[2]
    record = json.loads((run / "run.json").read_text())
    assert (record["precision"], record["seed"], len(record["attempts"])) == ("int8", 5, 1)

    again = call()
    assert again.returncode == 0 and "started" not in again.stdout and "made before, used again" in again.stdout
    assert len(json.loads((run / "run.json").read_text())["attempts"]) == 1


def test_one_bf16_engine_tells_every_models_accuracy_apart(tmp_path):
    """Three models, one engine: the start, random weights, the start again. The reference is the mean probability of
    the right answers, from one forward pass of transformers; sampling may leave it by some standard errors."""
    cfg = config(
        tmp_path,
        arms=arms_of("bf16:none,int8:none"),
        seeds=(0,),
        model=ToyModelConfig(),
        chain=ChainConfig(steps=1, train=3000, probe=64, test=64),
        warmup=WarmupConfig(target_accuracy=0.3, max_steps=600, batch_size=128, probe_every=10),
    )
    assets = learning.make(cfg)
    untrained, again = cfg.runs()
    shutil.copytree(assets.model, again.folder / bf16.MODEL)
    shutil.copytree(assets.model, untrained.folder / bf16.MODEL)
    weights = untrained.folder / bf16.MODEL / "model.safetensors"
    save_file(
        {name: 0.02 * torch.randn_like(tensor) for name, tensor in load_file(weights).items()},
        weights,
        {"format": "pt"},
    )
    pairs = bf16.left_over(cfg, [untrained, again])
    assert len(pairs) == 3
    bf16.ask(cfg, compose_run(cfg, untrained), pairs, 600)
    start, random, same = (json.loads(file.read_text()) for _, file in pairs)
    found = [accuracy_of(asked)["value"] for asked in (start, random, same)]
    expected = assets.made["test"]["sampled"]
    assert 0.2 < expected < 0.7 and found[1] < 0.05
    # 64 chains of 8 answers: a standard error of at most 0.5 / sqrt(512) = 0.022 given the chains.
    assert abs(found[0] - expected) < 0.1 and abs(found[2] - expected) < 0.1
    assert sum(start["right"]) / 512 == found[0] and accuracy_of(start)["low"] < found[0] < accuracy_of(start)["high"]
    assert bf16.left_over(cfg, [untrained, again]) == []


def test_an_engine_that_runs_out_of_time_is_ended(tmp_path):
    cfg = config(
        tmp_path,
        model=ToyModelConfig(num_layers=1),
        chain=ChainConfig(steps=1, train=500, probe=8, test=8),
        warmup=WarmupConfig(target_accuracy=0.0, probe_every=1, batch_size=8),
    )
    learning.make(cfg)
    with pytest.raises(bf16.TimeOver):
        bf16.ask(cfg, compose_run(cfg, cfg.runs()[0]), bf16.left_over(cfg, []), 1.0)
    # So small a model may be done while it is being ended: then its figures are whole.
    assert bf16.left_over(cfg, []) or json.loads((tmp_path / bf16.FILE).read_text())["metrics"]
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if str(tmp_path / "bf16.job.json") in (p.info["cmdline"] or [])
    ]
