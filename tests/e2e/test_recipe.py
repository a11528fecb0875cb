# SPDX-License-Identifier: Apache-2.0
"""The whole loop on CPU: verl's V1 trainer, Ray, FSDP2, real vLLM; only model and data are small."""

import math
import shutil
from pathlib import Path

import pytest
from recipe_runs import ROOT, command, finish, start

pytestmark = [pytest.mark.cpu_e2e, pytest.mark.timeout(400)]


def assert_healthy(run, steps: int) -> None:
    assert run.returncode == 0, run.output[-4000:]
    metrics = run.metrics()
    assert sorted(metrics) == list(range(steps + 1))
    for step in range(1, steps + 1):
        assert metrics[step]["flashrl/receipt_step"] == step
        assert 0 <= metrics[step]["rollout_corr/k3_kl"] < 1e-2
        assert metrics[step]["training/rollout_actor_probs_pearson_corr"] > 0.99
        assert all(math.isfinite(v) for v in metrics[step].values())
    assert any(key.startswith("val-core/") for key in metrics[steps])


def test_int8_rollouts_train_with_tis_on_the_actor(recipe):
    run = recipe()
    assert_healthy(run, steps=2)
    last = run.metrics()[2]
    assert last["flashrl/quantized_layers"] == 8
    assert 0.5 < last["flashrl/quantized_bytes"] / last["flashrl/quantized_bytes_as_bf16"] < 0.53
    assert "rollout_corr/rollout_is_mean" in last and "actor/rollout_corr/rollout_is_mean" not in last
    assert "rollout precision int8: 8 quantized layers" in run.output
    assert "self-check passed" in run.output


@pytest.mark.slow
def test_bf16_rollouts_run_from_the_same_command(recipe):
    run = recipe("flashrl.precision=bf16")
    assert_healthy(run, steps=2)
    assert run.metrics()[2]["flashrl/quantized_layers"] == 0
    assert "rollout precision bf16" in run.output


@pytest.mark.slow
def test_without_tis_the_mismatch_is_still_measured(recipe):
    run = recipe("algorithm.rollout_correction.rollout_is=null")
    assert_healthy(run, steps=2)
    assert "rollout_corr/rollout_is_mean" not in run.metrics()[2]


@pytest.mark.slow
def test_verls_own_entry_point_runs_it(assets, tmp_path):
    words = command(assets, tmp_path)
    words[1:4] = ["-m", "verl.trainer.main_ppo", "hydra.searchpath=[pkg://flashrl_verl.configs]", "+experiment=smoke"]
    process = start(words, tmp_path, cwd=tmp_path, variables={"VERL_PLATFORM": "cpu"})
    assert_healthy(finish(process, tmp_path), steps=2)


@pytest.mark.slow
def test_the_recipe_runs_from_inside_verls_source_tree(assets, tmp_path):
    """``recipe/flashrl`` copied beside ``verl/``, as in a fork: both packages are then imported from that tree."""
    import verl

    tree = tmp_path / "fork"
    shutil.copytree(Path(verl.__file__).parent, tree / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "recipe" / "flashrl", tree / "recipe" / "flashrl")
    words = command(assets, tmp_path, "trainer.total_training_steps=2", "actor_rollout_ref.actor.optim.lr=1e-4")
    run = finish(start(words, tmp_path, cwd=tree), tmp_path)
    assert_healthy(run, steps=2)
    assert run.metrics()[2]["actor/lr"] == pytest.approx(1e-4)
