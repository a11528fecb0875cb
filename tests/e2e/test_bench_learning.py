# SPDX-License-Identifier: Apache-2.0
"""`flashrl bench learning` with a real run: two steps of INT8 with TIS on the CPU, from the warm-up to the picture."""

import json
import os
import subprocess
import sys

import pytest

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


def test_one_arm_is_trained_and_the_same_command_has_nothing_left_to_do(tmp_path):
    out = tmp_path / "out"
    words = ["--arm", "int8:tis", "--seed", "5", "--steps", "2", "--hardware", "cpu", "--minutes", "25", *SMALL, *OVERRIDES]
    command = [sys.executable, "-m", "flashrl_verl", "bench", "learning", *words, "--output", str(out)]

    def call() -> subprocess.CompletedProcess:
        return subprocess.run(command, env=dict(os.environ, HF_HUB_OFFLINE="1"), capture_output=True, text=True, timeout=1600)

    done = call()
    run = out / "runs" / "int8-tis-seed5"
    log = (run / "train.log").read_text()[-3000:] if (run / "train.log").is_file() else ""
    assert done.returncode == 0, done.stdout + done.stderr + log
    assert "int8:tis seed 5: finished" in done.stdout and (out / "learning.png").read_bytes().startswith(b"\x89PNG")
    (found,) = json.loads((out / "learning.json").read_text())["runs"]
    assert (found["arm"], found["seed"], found["status"], found["step"]) == ("int8:tis", 5, "finished", 2)
    assert found["series"]["accuracy"]["step"] == [0, 2] and found["series"]["k3_kl"]["step"] == [1, 2]
    assert all(0 < value < 0.1 for value in found["series"]["k3_kl"]["value"])
    assert all(0.5 < value <= 1.01 for value in found["series"]["effective_sample_size"]["value"])
    metrics = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        metrics.setdefault(entry["step"], {}).update(entry["data"])
    assert metrics[2]["flashrl/quantized_layers"] == 4 and "val-core/toy_chain/acc/mean@4" in metrics[2]
    record = json.loads((run / "run.json").read_text())
    assert (record["precision"], record["seed"], len(record["attempts"])) == ("int8", 5, 1)

    again = call()
    assert again.returncode == 0 and "started" not in again.stdout and "made before, used again" in again.stdout
    assert len(json.loads((run / "run.json").read_text())["attempts"]) == 1
