# SPDX-License-Identifier: Apache-2.0
"""The guard in real runs: a mismatch that should not be is stopped with its patience, a healthy run never is.

A dropped or stale update is the receipts' (test_failures.py): they need no patience.
"""

import re
import sys

import pytest
from recipe_runs import finish, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_noise_in_the_rollouts_log_probs_is_stopped_with_the_patience_and_saved_by_no_checkpoint(recipe, tmp_path):
    words = ("flashrl.guard.action=stop", "flashrl.guard.patience=2", "algorithm.filter_groups.enable=false")
    run = recipe(*words, "trainer.total_training_steps=6", "trainer.save_freq=1", fault="noisy_log_probs:2")
    assert run.returncode != 0
    stop = (
        r"GuardError: step 3: .*rollout_corr/k3_kl=\S+ is beyond flashrl\.guard\.k3_kl_max=0\.02 for 2 steps.*"
        r"Resume from \S+/global_step_1, or go on regardless"  # step 2 was beyond the limit already
    )
    assert re.search(stop, run.output), run.failure
    metrics = run.metrics()
    events = {step: values["flashrl/guard_events"] for step, values in metrics.items() if step}
    assert sorted(events) == [1, 2, 3] and events[1] == events[2] == 0 < events[3], "the step that is stopped is logged"
    assert metrics[1]["rollout_corr/k3_kl"] < 1e-2 and metrics[2]["rollout_corr/k3_kl"] > 0.1
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("global_step_*"))
    assert saved == ["global_step_1", "global_step_2"]


def test_fifteen_steps_of_the_quickstart_never_touch_a_limit(tmp_path):
    """With a patience of 1 and a stop: not one step may be beyond any of the default limits."""
    guard = ("flashrl.guard.action=stop", "flashrl.guard.patience=1")
    words = [sys.executable, "-m", "flashrl_verl", "quickstart", "--output", str(tmp_path), *guard]
    words += ["hardware=cpu", "trainer.total_training_steps=15", "trainer.test_freq=15"]
    run = finish(start(words, tmp_path), tmp_path, timeout=1100)
    assert run.returncode == 0, run.failure
    steps = {step: metrics for step, metrics in run.metrics().items() if step}
    assert list(steps) == list(range(1, 16)) and steps[15]["flashrl/guard_events"] == 0
    # Far from the limits, so that the next change does not reach them by chance.
    assert max(metrics["rollout_corr/k3_kl"] for metrics in steps.values()) < 5e-3
    assert min(metrics["training/rollout_actor_probs_pearson_corr"] for metrics in steps.values()) > 0.99
    assert min(metrics["rollout_corr/rollout_is_eff_sample_size"] for metrics in steps.values()) > 0.95
