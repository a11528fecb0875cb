# SPDX-License-Identifier: Apache-2.0
"""The guard in real runs: a mismatch that should not be is told or stopped within its patience, a healthy run is left
alone.

A dropped or stale update is the receipts' (test_failures.py): they need no patience.
"""

import re
import sys

import pytest
from recipe_runs import finish, start

pytestmark = [pytest.mark.cpu_e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

NO_FILTER = "algorithm.filter_groups.enable=false"


def steps_trained(run) -> list[int]:
    return [step for step in run.metrics() if step > 0]


def checkpoints(folder) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("global_step_*"))


def test_noise_in_the_rollouts_log_probs_is_stopped_within_the_patience_and_saved_by_no_checkpoint(recipe, tmp_path):
    guard = ("flashrl.guard.action=stop", "flashrl.guard.patience=2")
    run = recipe(NO_FILTER, *guard, "trainer.total_training_steps=6", "trainer.save_freq=1", fault="noisy_log_probs:2")
    assert run.returncode != 0
    message = r"GuardError: step 3: .*rollout_corr/k3_kl=\S+ is beyond flashrl\.guard\.k3_kl_max=0\.02 for 2 steps"
    assert re.search(message, run.output), run.failure
    metrics = run.metrics()
    assert steps_trained(run) == [1, 2, 3], "the step that is stopped is logged"
    assert metrics[1]["rollout_corr/k3_kl"] < 1e-2 and metrics[1]["flashrl/guard_k3_kl_steps"] == 0
    assert metrics[2]["rollout_corr/k3_kl"] > 0.1 and metrics[2]["flashrl/guard_k3_kl_steps"] == 1
    assert metrics[3]["flashrl/guard_k3_kl_steps"] == 2 and metrics[3]["flashrl/guard_events"] >= 1
    assert checkpoints(tmp_path) == ["global_step_1", "global_step_2"]
    assert re.search(r"GuardError: .*Resume from \S+/global_step_2, or go on regardless", run.output), run.failure


def test_a_learning_rate_that_ruins_the_policy_is_stopped_within_the_patience(recipe):
    """At 1.0 the first update moves every weight by about 1, and the policy soon says the same token with certainty,
    whatever the prompt: k3 KL is 0, and the correlation of the probabilities is not a number."""
    guard = ("flashrl.guard.action=stop", "flashrl.guard.patience=2")
    run = recipe(
        NO_FILTER, *guard, "actor_rollout_ref.actor.optim.lr=1.0", "trainer.total_training_steps=8", timeout=900
    )
    assert run.returncode != 0
    assert re.search(r"GuardError: step \d: .* is beyond flashrl\.guard\.\w+=\S+ for 2 steps in a row", run.output), (
        run.failure
    )
    assert "a lower actor_rollout_ref.actor.optim.lr" in run.output
    metrics = run.metrics()
    assert metrics[1]["flashrl/guard_events"] == 0, "the first step samples from the weights it started with"
    last = metrics[max(metrics)]
    assert last["flashrl/guard_correlation_steps"] == 2 and last["flashrl/guard_events"] >= 1


@pytest.mark.timeout(2400)
def test_fifty_steps_of_the_quickstart_never_touch_a_limit(tmp_path):
    """With a patience of 1 and a stop: not one step may be beyond any of the default limits."""
    guard = ("flashrl.guard.action=stop", "flashrl.guard.patience=1")
    words = [sys.executable, "-m", "flashrl_verl", "quickstart", "--output", str(tmp_path), *guard]
    words += ["hardware=cpu", "trainer.total_training_steps=50", "trainer.test_freq=50"]
    run = finish(start(words, tmp_path), tmp_path, timeout=2300)
    assert run.returncode == 0, run.failure
    metrics = run.metrics()
    assert steps_trained(run) == list(range(1, 51))
    assert metrics[50]["flashrl/guard_events"] == 0
    # Far from the limits, so that the next change does not reach them by chance.
    assert max(metrics[step]["rollout_corr/k3_kl"] for step in range(1, 51)) < 5e-3
    assert min(metrics[step]["training/rollout_actor_probs_pearson_corr"] for step in range(1, 51)) > 0.99
    assert min(metrics[step]["rollout_corr/rollout_is_eff_sample_size"] for step in range(1, 51)) > 0.95
