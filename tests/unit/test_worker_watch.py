# SPDX-License-Identifier: Apache-2.0
"""What is said of a lost worker."""

import ray

from flashrl_verl.trainer.worker_watch import WorkerWatch

RAYS = """1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.7) was 122GB
OOM kill reason: Memory usage 128464912384B exceeded threshold of 128391135232B (95.0% of 135148564480B limit)
Object store memory usage: [- objects spillable: 1
- bytes spillable: 75620]
"""
"""Ray 2.60's, shortened."""


def test_a_full_host_is_told_with_what_fills_it_and_without_rays_figures():
    said = str(WorkerWatch([], lambda: "Rerun.").cause(ray.exceptions.OutOfMemoryError(RAYS)))
    assert "10.0.0.7) was 122GB. What takes a host's memory: " in said and said.endswith(". Rerun.")
    assert "actor_rollout_ref.rollout.agent.num_workers" in said and "spillable" not in said and " ..." not in said


def test_of_a_long_traceback_the_worker_and_the_error_are_told():
    trace = "ray::RewardLoopWorker.__init__() (pid=7, ip=10.0.0.7)\n"
    trace += "  File somewhere, line 1, in load\n" * 60 + "ModuleNotFoundError: No module named 'sympy'"
    of_constructor = ray.exceptions.RayTaskError("RewardLoopWorker.__init__", trace, ModuleNotFoundError())
    said = str(WorkerWatch([], lambda: "Rerun.").cause(ray.exceptions.ActorDiedError(of_constructor)))
    assert "RewardLoopWorker.__init__" in said and said.endswith("No module named 'sympy' Rerun.") and len(said) < 800
