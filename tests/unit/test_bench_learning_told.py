# SPDX-License-Identifier: Apache-2.0
"""`flashrl bench learning`: what its runs are told."""

import pytest
from learning_runs import config

from benchmarks import learning_recipe
from benchmarks.learning import arms_of
from benchmarks.learning_command import DEFAULT_ARMS
from flashrl_verl.quickstart.chain import ChainConfig
from flashrl_verl.validation import validate_config


@pytest.mark.parametrize("hardware", ["cpu", "cuda"])
@pytest.mark.parametrize("arm", DEFAULT_ARMS.split(","))
def test_every_default_arm_composes_and_is_valid(tmp_path, arm, hardware):
    cfg = config(tmp_path, arms=arms_of(arm), seeds=(3,), hardware=hardware, overrides=("trainer.save_freq=10",))
    (run,) = cfg.runs()
    composed = learning_recipe.compose_run(cfg, run)
    settings = validate_config(composed)
    assert settings.precision is run.arm.precision and composed.trainer.device == hardware
    assert (composed.algorithm.rollout_correction.rollout_is == "token") == (run.arm.correction == "tis")
    assert composed.data.seed == composed.actor_rollout_ref.rollout.seed == 3
    assert composed.trainer.total_training_steps == 4 and composed.trainer.save_freq == 10
    assert composed.trainer.default_local_dir == str(run.folder / "checkpoints")
    assert composed.actor_rollout_ref.model.path == str(tmp_path / "assets" / "model")
    engine = composed.actor_rollout_ref.rollout.engine_kwargs.get("vllm", {})
    assert engine.get("kv_cache_memory_bytes") == (2 << 30 if hardware == "cuda" else None)


def test_a_folder_with_odd_characters_survives_hydras_grammar(tmp_path):
    cfg = config(tmp_path / "it's, a {folder}=1")
    composed = learning_recipe.compose_run(cfg, cfg.runs()[0])
    assert composed.trainer.default_local_dir == str(cfg.runs()[0].folder / "checkpoints")


def test_the_policy_is_updated_several_times_a_batch_and_asked_as_it_samples(tmp_path):
    cfg = config(tmp_path)
    composed = learning_recipe.compose_run(cfg, cfg.runs()[0])
    assert composed.data.train_batch_size == 4 * composed.actor_rollout_ref.actor.ppo_mini_batch_size
    rollout = composed.actor_rollout_ref.rollout
    assert {k: rollout[k] for k in ("temperature", "top_p", "top_k")} == {
        k: rollout.val_kwargs[k] for k in ("temperature", "top_p", "top_k")
    }
    assert rollout.val_kwargs.do_sample and rollout.val_kwargs.n == 2


def test_the_longest_chain_that_is_accepted_fits_into_the_response(tmp_path):
    cfg = config(tmp_path, chain=ChainConfig(steps=13, train=2000))
    composed = learning_recipe.compose_run(cfg, cfg.runs()[0])
    chains = cfg.chain.split(0).train
    assert max(len(chain.answer) for chain in chains) + 1 <= composed.data.max_response_length
    assert max(len(chain.prompt) for chain in chains) + 8 <= composed.data.max_prompt_length
