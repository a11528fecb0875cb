# SPDX-License-Identifier: Apache-2.0
"""Two Ray nodes with a replica each: settings, plugins and code reach a node that joined with none of our
environment."""

import re
import time
import warnings

import pytest
from local_cluster import LocalCluster, can_hide, our_folders
from recipe_runs import command, finish, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

TWO_NODES = (
    "trainer.nnodes=2",
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    # Half of 4 prompts x 4 samples.
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
)


def variables(cluster: LocalCluster) -> dict[str, str]:
    return {"RAY_ADDRESS": cluster.address, "RAY_AUTH_MODE": "disabled"}


def test_a_replica_on_each_of_two_nodes_trains_and_a_lost_one_ends_the_run_which_resumes_with_another(assets, tmp_path):
    words = ("trainer.save_freq=1", "trainer.resume_mode=auto", "algorithm.filter_groups.enable=false")
    with LocalCluster() as cluster:
        # As a machine with verl and vLLM alone, where the file system can be shown so; else the test says what it has
        # not seen.
        if not (hides := can_hide()):
            warnings.warn("the second node sees our code: that it is sent there was not tested", stacklevel=1)
        second = cluster.join(hide=our_folders() if hides else [])

        run = finish(start(command(assets, tmp_path, *TWO_NODES, *words, "trainer.total_training_steps=3"), tmp_path,
                           variables=variables(cluster)), tmp_path, timeout=1000)  # fmt: skip
        assert run.returncode == 0, run.failure
        metrics = run.metrics()
        assert sorted(metrics) == [0, 1, 2, 3]
        for step in (1, 2, 3):
            assert metrics[step]["flashrl/receipts_verified"] == 2
            assert metrics[step]["flashrl/quantized_layers"] == 8
            assert 0 <= metrics[step]["rollout_corr/k3_kl"] < 1e-2
        assert "ip=127.0.0.3)" in run.output, "workers of the other node log here"

        # A second run goes on to step 30, and loses a node on the way.
        (tmp_path / "log").rename(tmp_path / "log-3-steps")
        process = start(command(assets, tmp_path, *TWO_NODES, *words, "trainer.total_training_steps=30"), tmp_path,
                        variables=variables(cluster))  # fmt: skip
        deadline = time.monotonic() + 400
        while max(run.metrics()) < 4:
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.5)
        cluster.kill(second)
        killed = time.monotonic()
        lost = finish(process, tmp_path, timeout=600)
        assert time.monotonic() - killed < 120
        assert lost.returncode != 0
        assert re.search(r"WorkerLostError: .*127\.0\.0\.3.*trainer\.resume_mode=auto", lost.output), lost.failure

        # On as many nodes it resumes from the last checkpoint.
        cluster.join(hide=our_folders() if hides else [])
        latest = int((tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
        (tmp_path / "log").rename(tmp_path / "log-lost")
        again = command(assets, tmp_path, *TWO_NODES, *words, f"trainer.total_training_steps={latest + 2}")
        resumed = finish(start(again, tmp_path, variables=variables(cluster)), tmp_path, timeout=1000)
        assert resumed.returncode == 0, resumed.failure
        # Same weights as when they were saved: same checksums of the update that sends them.
        saved = lost.metrics()[latest]["flashrl/receipt_sum"]
        assert f"receipt of step {latest} verified (sum {saved})" in resumed.output
        assert max(resumed.metrics()) == latest + 2
        assert resumed.metrics()[latest + 2]["flashrl/receipts_verified"] == 2
