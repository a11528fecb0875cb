# SPDX-License-Identifier: Apache-2.0
"""The recipe on one GPU and on two: FSDP2, vLLM with CUDA graphs and sleep mode; each precision, KV cache, preset and
head.

A run's metrics are left in ``metrics.jsonl`` of its folder below ``--basetemp``. Runs may share a GPU.
"""

import math

import pytest
import torch
from recipe_runs import command, finish, make_assets, start

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(560)]

HALF_BILLION = dict(hidden_size=896, intermediate_size=4864, num_layers=24, head_dim=64, num_kv_heads=2)
"""Qwen2.5-0.5B's shape without its vocabulary: 0.36 billion parameters in the layers."""

STEPS = 10
KV_CACHE_BYTES = 8 << 30


@pytest.fixture(scope="session")
def large_assets(tmp_path_factory):
    return make_assets(tmp_path_factory.mktemp("assets"), initializer_range=0.02, **HALF_BILLION)


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def train(assets, folder, *overrides: str, steps: int) -> dict[int, dict]:
    words = command(
        assets,
        folder,
        "hardware=cuda",
        f"trainer.total_training_steps={steps}",
        "data.train_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.optim.lr=1e-5",
        # Given, not measured: vLLM stops where another run frees memory while it measures.
        f"+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes={KV_CACHE_BYTES}",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.05",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=512",
        *overrides,
    )
    run = finish(start(words, folder), folder, timeout=540)
    assert run.returncode == 0, run.failure
    assert "self-check passed" in run.output
    metrics = run.metrics()
    assert sorted(metrics) == list(range(steps + 1))
    return metrics


@pytest.mark.parametrize(
    "precision, kv_cache, ranks",
    [
        ("int8", "auto", 1),
        ("fp8", "auto", 1),
        ("bf16", "auto", 1),
        ("int8", "int8_per_token_head", 1),
        pytest.param("int8", "auto", 2, marks=two_gpus),
        pytest.param("int8", "int8_per_token_head", 2, marks=two_gpus),
        pytest.param("fp8", "auto", 2, marks=two_gpus),
    ],
)
def test_ten_steps_with_cuda_graphs_and_sleep_mode(large_assets, tmp_path, precision, kv_cache, ranks):
    metrics = train(
        large_assets,
        tmp_path,
        f"trainer.n_gpus_per_node={ranks}",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={ranks}",
        f"flashrl.precision={precision}",
        f"flashrl.kv_cache={kv_cache}",
        steps=STEPS,
    )
    for step in range(1, STEPS + 1):
        assert metrics[step]["flashrl/receipt_step"] == step
        assert metrics[step]["flashrl/receipts_verified"] == ranks
        assert metrics[step]["flashrl/kv_cache_bits"] == (16 if kv_cache == "auto" else 8)
        assert metrics[step]["flashrl/quantized_layers"] == (0 if precision == "bf16" else 4 * 24)
        # A model of random weights; E4M3's three mantissa bits are ten times further from BF16 than INT8 is.
        kl, correlation = (2e-2, 0.95) if precision == "fp8" else (1e-2, 0.99)
        assert 0 <= metrics[step]["rollout_corr/k3_kl"] < kl
        assert metrics[step]["training/rollout_actor_probs_pearson_corr"] > correlation
        assert all(math.isfinite(v) for v in metrics[step].values())


@pytest.mark.parametrize(
    "setting, metric",
    [
        ("correction=seq_tis", "rollout_corr/rollout_is_seq_mean"),
        ("correction=icepop", "rollout_corr/rollout_is_oob_ratio"),
        ("correction=geo_rs", "rollout_corr/rollout_rs_seq_masked_fraction"),
        ("correction=bypass", "rollout_corr/k3_kl"),
        ("correction=none", "rollout_corr/k3_kl"),
        (
            "actor_rollout_ref.rollout.dtype=half"
            " +actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp16",
            "rollout_corr/k3_kl",
        ),
        ("actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.kl_loss_coef=0.001", "actor/kl_loss"),
        ("algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef=0.001", "actor/reward_kl_penalty"),
    ],
)
def test_two_steps_with_one_other_setting(large_assets, tmp_path, setting, metric):
    words = (
        *setting.split(),
        "flashrl.precision=int8",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16",
        "flashrl.guard.patience=1",
        "flashrl.guard.action=stop",
    )
    metrics = train(large_assets, tmp_path, *words, steps=2)
    for step in (1, 2):
        assert math.isfinite(metrics[step][metric])
        assert all(math.isfinite(v) for v in metrics[step].values())
        assert metrics[step]["flashrl/guard_events"] == 0


@pytest.mark.parametrize("precision, kl", [("bf16", 1e-3), ("int8", 1e-2)])
def test_two_steps_with_logits_in_fp32_on_both_sides(large_assets, tmp_path, precision, kl):
    metrics = train(large_assets, tmp_path, f"flashrl.precision={precision}", "flashrl.fp32_lm_head=true", steps=2)
    for step in (1, 2):
        assert metrics[step]["flashrl/fp32_lm_head"] == 1
        assert 0 <= metrics[step]["rollout_corr/k3_kl"] < kl
