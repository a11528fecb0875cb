# SPDX-License-Identifier: Apache-2.0
"""The whole loop on CPU: verl's V1 trainer, Ray, FSDP2, real vLLM; only model and data are small."""

import math
import shutil
from pathlib import Path

import pytest
from recipe_runs import PROGRAMS, ROOT, TWO_RANKS, command, finish, make_assets, start

LAYERS = 2

pytestmark = [pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def moe_assets(tmp_path_factory):
    return make_assets(tmp_path_factory.mktemp("moe"), moe=True)


def assert_healthy(run, steps: int, correlation: float = 0.99) -> None:
    assert run.returncode == 0, run.failure
    metrics = run.metrics()
    assert sorted(metrics) == list(range(steps + 1))
    for step in range(1, steps + 1):
        assert metrics[step]["flashrl/receipt_step"] == step
        assert 0 <= metrics[step]["rollout_corr/k3_kl"] < 1e-2
        assert metrics[step]["training/rollout_actor_probs_pearson_corr"] > correlation
        assert all(math.isfinite(v) for v in metrics[step].values())
    assert any(key.startswith("val-core/") for key in metrics[steps])


@pytest.fixture(scope="module")
def smoke(assets, tmp_path_factory):
    """The smoke experiment, INT8 with TIS."""
    folder = tmp_path_factory.mktemp("smoke")
    return finish(start(command(assets, folder), folder), folder)


def test_int8_rollouts_train_with_tis_on_the_actor(smoke):
    run = smoke
    assert_healthy(run, steps=2)
    last = run.metrics()[2]
    assert last["flashrl/quantized_layers"] == 8
    assert 0.5 < last["flashrl/quantized_bytes"] / last["flashrl/quantized_bytes_as_bf16"] < 0.53
    assert "rollout_corr/rollout_is_mean" in last and "actor/rollout_corr/rollout_is_mean" not in last
    assert "rollout precision int8: 8 quantized layers" in run.output
    assert "self-check passed" in run.output
    assert "LLMServerManager: ['127.0.0.1:" in run.output, "the server listens on loopback"


def test_the_rollouts_speed_counts_what_was_dropped_too(smoke):
    for step in (1, 2):
        metrics = smoke.metrics()[step]
        # 4 prompts x 4 samples were kept; what was dropped was generated too.
        generated = metrics["flashrl/tokens_per_second_gen"] * metrics["timing_s/gen"]
        kept = 16 * metrics["response_length/mean"]
        dropped = [f"training/filter_groups/{what}_samples" for what in ("evicted", "discarded_surplus")]
        thrown_away = any(metrics.get(key, 0) > 0 for key in dropped)
        assert generated > kept if thrown_away else generated == pytest.approx(kept)


@pytest.mark.slow
def test_bf16_rollouts_with_logits_in_fp32_on_both_sides_train(recipe):
    rounded = "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bf16"  # as in the engine
    run = recipe("flashrl.precision=bf16", "flashrl.fp32_lm_head=true", rounded, "data.dataloader_num_workers=1")
    assert_healthy(run, steps=2)
    last = run.metrics()[2]
    assert last["flashrl/quantized_layers"] == 0 and last["flashrl/fp32_lm_head"] == 1
    assert "rollout precision bf16" in run.output
    assert "DataLoader worker" not in run.output, "an error behind a run that succeeded"


@pytest.mark.slow
def test_an_asynchronous_run_trains_on_trajectories_of_two_versions_and_knows_which(recipe):
    # Long enough that an update stops some of them. A random model ends a few of its responses by chance.
    long = "data.max_response_length=440", "actor_rollout_ref.rollout.max_model_len=512"
    run = recipe("trainer.v1.trainer_mode=flashrl_colocate_async", "trainer.total_training_steps=4", *long)
    assert run.returncode == 0, run.failure
    metrics = run.metrics()
    assert sorted(metrics) == list(range(5)) and all(
        metrics[step]["flashrl/receipt_step"] == step for step in range(1, 5)
    )
    assert metrics[1]["rollout_corr/tokens_lag_0"] == 1
    old = 0.0
    for step in range(2, 5):
        ages = [metrics[step].get(f"rollout_corr/tokens_lag_{lag}", 0.0) for lag in range(4)]
        assert sum(ages) == pytest.approx(1)
        assert metrics[step].get("rollout_corr/k3_kl_lag_0", 0.0) < 1e-2
        assert sum(lag * share for lag, share in enumerate(ages)) < 2
        old += ages[1]
    assert old > 0, "no trajectory has outlived an update"
    spans = [metrics[step]["training/off_policy/trajectory_spans/max"] for step in range(2, 5)]
    assert max(spans) > 1, "no update has stopped a response"
    assert "Submission gate barrier timed out" not in run.output, (
        "an update waited a minute for requests to be admitted"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [(), ("loss_type=reinforce", "rollout_is=token", "rollout_is_threshold=2.0")],
    ids=["ppo_clip", "reinforce"],
)
def test_bypass_mode_trains_on_the_rollouts_log_probs(recipe, words):
    """Two updates a step: the second one's policy is no longer the rollout's."""
    run = recipe(
        "correction=bypass",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        *(f"algorithm.rollout_correction.{word}" for word in words),
    )
    assert run.returncode == 0, run.failure
    for step in (1, 2):
        metrics = run.metrics()[step]
        assert metrics["flashrl/receipt_step"] == step
        # Of the policy in training, one update away from the one that sampled.
        assert 0 < metrics["rollout_corr/k3_kl"] < 0.2
        trainers_pass = ("training/rollout_actor_probs_pearson_corr", "actor/entropy")
        assert not any(key in metrics for key in trainers_pass), (
            "there is no pass of the trainer that computes old log-probs"
        )
        assert ("rollout_corr/rollout_is_mean" in metrics) == bool(words)
        assert all(math.isfinite(v) for v in metrics.values())


@pytest.mark.slow
def test_merged_adapters_reach_the_rollout(recipe):
    model = "actor_rollout_ref.model"
    run = recipe(
        f"{model}.lora_rank=8",
        f"{model}.lora.merge=true",
        f"{model}.target_modules=all-linear",
        "actor_rollout_ref.actor.optim.lr=5e-3",
        "trainer.total_training_steps=3",
    )
    assert_healthy(run, steps=3)
    # An adapter begins at zero: had it not been merged, no code would ever change, and the trainer would move away.
    assert run.metrics()[3]["flashrl/code_change_rate"] > 0


@pytest.mark.slow
def test_tokens_of_a_tool_are_neither_trained_nor_compared(recipe):
    multi_turn = "actor_rollout_ref.rollout.multi_turn"
    run = recipe(
        "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
        f"{multi_turn}.enable=true",
        f"{multi_turn}.format=toy",
        f"{multi_turn}.function_tool_path={PROGRAMS}/toy_tool.py",
        f"{multi_turn}.max_assistant_turns=3",
        "data.max_response_length=48",
        "trainer.total_training_steps=3",
    )
    # A mask or a log-prob that is one token off would take the correlation.
    assert_healthy(run, steps=3)
    assert run.metrics()[3]["num_turns/mean"] > 4


@pytest.mark.slow
def test_two_ranks_train_and_sample_with_every_receipt_verified(recipe):
    """FSDP2 over two processes, one engine of two ranks; nothing but the configuration says where they compute."""
    run = recipe(*TWO_RANKS, "trainer.total_training_steps=5", timeout=800)
    assert_healthy(run, steps=5)
    for step, metrics in run.metrics().items():
        assert step == 0 or metrics["flashrl/receipts_verified"] == 2


@pytest.mark.slow
def test_a_mixture_of_experts_trains_with_int8_experts_and_a_router_that_is_not(recipe, moe_assets):
    run = recipe("trainer.total_training_steps=5", assets=moe_assets, timeout=800)
    # The untrained model's distribution is nearly flat (5.41 of at most 5.57 nats), so tokens whose experts differ
    # lower the correlation: 0.976 to 0.9985 in the first step of four INT8 runs, 0.9999 in BF16.
    assert_healthy(run, steps=5, correlation=0.95)
    metrics = run.metrics()
    for step in range(1, 6):
        held = {key.removeprefix("flashrl/"): value for key, value in metrics[step].items()}
        # qkv, o, experts; the router is in high precision by design, and not counted.
        assert held["quantized_layers"] == LAYERS * 3 and held["unquantized_layers"] == 0
        assert 0.5 < held["quantized_bytes"] / held["quantized_bytes_as_bf16"] < 0.54
        assert held["refit_quantized"] == LAYERS * (2 + 2)
        assert held["code_change_rate"] > 0


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
