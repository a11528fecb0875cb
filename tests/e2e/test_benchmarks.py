# SPDX-License-Identifier: Apache-2.0
"""The benchmarks as a user runs them, small, on whatever device there is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def run(name: str, output: Path, *words: str, status: int = 0) -> subprocess.CompletedProcess:
    """``python -m benchmarks.NAME``."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *words, "--output", str(output)]
    done = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ, HF_HUB_OFFLINE="1"), capture_output=True, text=True, timeout=2000
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def test_a_rollout_is_measured_and_its_weights_are_eight_bits(tmp_path):
    words = ("--workloads", "4x16+24", "--max-num-batched-tokens", "512", "--max-num-seqs", "16")
    words += ("--gpu-memory-utilization", "0.2", "--spread", "0.7", "--limit", "48")
    run("rollout", tmp_path, "--variants", "bf16,int8", *words)
    _, bf16, int8 = map(json.loads, (tmp_path / "rollout.jsonl").read_text().splitlines())
    assert int8["memory"]["weight_bytes"] < bf16["memory"]["weight_bytes"]
    for timing in (int8["timings"][0], bf16["timings"][0]):
        assert len(timing["seconds"]) == len(timing["ends"]) == 2
        lengths, ends = zip(*timing["ends"][0], strict=True)
        assert len(set(lengths)) > 1 and sum(lengths) == pytest.approx(4 * 24, abs=2)
        assert list(ends) == sorted(ends) and 0 < ends[-1] <= timing["seconds"][0]


def test_on_the_same_tokens_bf16_is_nearer_to_the_trainer_than_int8_and_both_are_near(tmp_path):
    from flashrl_verl.quickstart.assets import make_assets
    from flashrl_verl.quickstart.task import split_problems

    make_assets(tmp_path / "assets", seed=0)
    model = tmp_path / "assets" / "model"
    problems = [{"question": p.prompt, "answer": str(p.answer)} for p in split_problems(0).train]
    data = tmp_path / "problems.jsonl"
    data.write_text("".join(json.dumps(problem) + "\n" for problem in problems[:64]))
    words = ("--model", str(model), "--data", str(data), "--variants", "int8")
    run("mismatch", tmp_path, *words, "--prompts", "64", "--tokens", "16")
    record = json.loads((tmp_path / "mismatch.json").read_text())
    bf16, int8 = record["results"]
    assert bf16["common"]["tokens"] == int8["common"]["tokens"] > 64
    assert 0 < bf16["common"]["rollout_corr/k3_kl"] < int8["common"]["rollout_corr/k3_kl"] < 1e-2
    assert int8["own"]["training/rollout_actor_probs_pearson_corr"] > 0.99
    assert (bf16["quantized_layers"], int8["quantized_layers"]) == (0, 8)


def test_a_run_of_gsm8k_is_evaluated_in_bf16_and_leaves_no_weights_and_one_without_time_is_not_started(tmp_path):
    from pyarrow import Table, parquet

    from flashrl_verl.quickstart.assets import make_assets

    assets = tmp_path / "assets"
    make_assets(assets, seed=0)
    for split in ("train", "test"):
        rows = parquet.read_table(assets / f"{split}.parquet").to_pylist()[:64]
        parquet.write_table(
            Table.from_pylist([row | {"data_source": "lighteval/MATH"} for row in rows]),
            tmp_path / f"gsm8k-boxed-{split}.parquet",
        )
    words = ["--model", str(assets / "model"), "--data", str(tmp_path), "--variants", "int8+tis", "--steps", "3"]
    words += ["--test-every", "1", "hardware=cpu", "algorithm.filter_groups.enable=false"]
    words += ["data.train_batch_size=8", "data.max_prompt_length=64", "data.max_response_length=32"]
    words += ["reward.reward_kwargs.overlong_buffer_cfg.len=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    refused = run("gsm8k", tmp_path / "late", "--deadline", "4", *words, status=1)
    assert "int8+tis seed 0: not started: the deadline is too near" in refused.stdout
    refused = run("gsm8k", tmp_path / "misspelt", *words, "trainer.nnods=1", status=1)
    assert "Remedy: trainer.nnodes" in refused.stderr and not (tmp_path / "misspelt").exists()
    failed = run("gsm8k", tmp_path / "failed", *words, "actor_rollout_ref.model.path=/no/such/folder", status=1)
    assert "int8+tis seed 0: ConfigError: actor_rollout_ref.model.path=/no/such/folder not found" in failed.stdout
    run("gsm8k", tmp_path / "out", *words)
    (one,) = json.loads((tmp_path / "out" / "gsm8k.json").read_text())["runs"]
    assert (one["step"], one["bf16_step"], one["bf16"]) == (3, 3, 0.0), "no toy writes boxes"
    assert one["series"]["score"]["step"] == [0, 1, 2, 3] and one["series"]["k3_kl"]["step"] == [1, 2, 3]
    assert not list((tmp_path / "out").rglob("*.safetensors")) and (tmp_path / "out" / "gsm8k.png").exists()
