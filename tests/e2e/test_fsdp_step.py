# SPDX-License-Identifier: Apache-2.0
"""A policy update of a real FSDP2 actor on two ranks: our correction on the shards is verl's on the driver, loss and
gradient."""

import os
import subprocess
import sys

import pytest
import torch
from recipe_runs import PROGRAMS, make_assets

pytestmark = [pytest.mark.timeout(1200)]
RANKS = 2


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    """Every variant's, from ``fsdp_step.py``'s rank 0."""
    folder = tmp_path_factory.mktemp("fsdp")
    words = [RANKS, folder / "store", make_assets(folder) / "model", folder / "results.pt"]
    path = os.pathsep.join([str(PROGRAMS), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    processes = []
    try:
        for rank in range(RANKS):
            with open(folder / f"rank{rank}.log", "wb") as log:
                command = [sys.executable, PROGRAMS / "fsdp_step.py", rank, *words]
                processes.append(subprocess.Popen([*map(str, command)], env=env, stdout=log, stderr=log))
        for rank, process in enumerate(processes):
            assert process.wait(350) == 0, (folder / f"rank{rank}.log").read_text(errors="replace")[-4000:]
    finally:
        for process in processes:
            process.kill()
    return torch.load(folder / "results.pt", weights_only=False)


def distance(ours: list[dict], theirs: list[dict]) -> float:
    """Largest relative distance of a mini-batch's gradient."""
    assert len(ours) == len(theirs) == 2
    pairs = [
        [torch.cat([g[name].double().flatten() for name in sorted(g)]) for g in pair]
        for pair in zip(ours, theirs, strict=True)
    ]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def test_loss_and_gradient_are_those_of_verls_own_path(results):
    uncorrected = results["metrics only"]["ours"]["gradients"]
    for name, result in results.items():
        ours, verls = result["ours"], result["verls"]
        assert distance(ours["gradients"], verls["gradients"]) < 1e-6, name
        corrects = distance(ours["gradients"], uncorrected) > 1e-3
        assert corrects == (name != "metrics only"), name
        loss = "actor/pg_loss"
        assert ours["metrics"][loss] == pytest.approx(verls["metrics"][loss], rel=1e-6, abs=1e-9), name
        told = {metric: value for metric, value in ours["metrics"].items() if metric.startswith("rollout_corr/")}
        assert "rollout_corr/k3_kl" in told
        for metric, value in told.items():
            assert value == [pytest.approx(result["metrics"][metric], rel=1e-5, abs=1e-6)], (name, metric)
