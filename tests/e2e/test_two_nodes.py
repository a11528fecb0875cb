# SPDX-License-Identifier: Apache-2.0
"""Two Ray nodes with a replica each: settings, plugins and code reach a node that joined with none of our
environment."""

import json
import os
import re
import subprocess
import sys
import time
import warnings

import pytest
from local_cluster import LocalCluster, can_hide, our_folders
from recipe_runs import ROOT, command, finish, start

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

        # What is left cannot load the shards of two ranks, and verl names the file.
        (tmp_path / "log").rename(tmp_path / "log-lost")
        refused = finish(start(command(assets, tmp_path, *words, "trainer.total_training_steps=30"), tmp_path,
                               variables=variables(cluster)), tmp_path, timeout=1000)  # fmt: skip
        assert refused.returncode != 0
        assert re.search(r"model_world_size_1_rank_0\.pt", refused.output), refused.failure

        # On as many nodes it resumes from the last checkpoint.
        cluster.join(hide=our_folders() if hides else [])
        latest = int((tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
        (tmp_path / "log").rename(tmp_path / "log-refused")
        again = command(assets, tmp_path, *TWO_NODES, *words, f"trainer.total_training_steps={latest + 2}")
        resumed = finish(start(again, tmp_path, variables=variables(cluster)), tmp_path, timeout=1000)
        assert resumed.returncode == 0, resumed.failure
        # Same weights as when they were saved: same checksums of the update that sends them.
        saved = lost.metrics()[latest]["flashrl/receipt_sum"]
        assert f"receipt of step {latest} verified (sum {saved})" in resumed.output
        assert max(resumed.metrics()) == latest + 2
        assert resumed.metrics()[latest + 2]["flashrl/receipts_verified"] == 2


ASKING = """
import importlib.metadata, json, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from flashrl_verl.launch import package
ray.init(address="{address}", log_to_driver=False, runtime_env={{"py_modules": package()}})

@ray.remote(num_cpus=1)
def asked():
    import importlib.metadata, flashrl_verl
    groups = [importlib.metadata.entry_points(group=group) for group in ("verl.plugins", "vllm.general_plugins")]
    return [flashrl_verl.__file__, *([point.load().__name__ for point in g if point.name == "flashrl"] for g in groups)]

[node] = [n["NodeID"] for n in ray.nodes() if n["NodeManagerAddress"] == "127.0.0.3"]
there = asked.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
print("TOLD", json.dumps(ray.get(there, timeout=300)), flush=True)
"""


@pytest.mark.skipif(not can_hide(), reason="processes cannot be given a file system of their own here")
def test_a_node_that_has_no_code_of_ours_is_sent_it_with_its_plugins():
    with LocalCluster() as cluster:
        cluster.join(hide=our_folders())
        done = subprocess.run(
            [sys.executable, "-c", ASKING.format(address=cluster.address)],
            cwd=ROOT,
            env={**os.environ, **variables(cluster)},
            capture_output=True,
            text=True,
            timeout=600,
        )
    line = next((line for line in done.stdout.splitlines() if line.startswith("TOLD ")), None)
    assert line, done.stdout + done.stderr
    file, of_verl, of_vllm = json.loads(line.removeprefix("TOLD "))
    assert "py_modules_files" in file, "Ray's copy"
    assert of_verl == ["flashrl_verl.plugins.verl"] and of_vllm == ["register"]
