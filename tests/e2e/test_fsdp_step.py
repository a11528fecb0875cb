# SPDX-License-Identifier: Apache-2.0
"""A policy update of a real FSDP2 actor: our correction on the shards is verl's on the driver, loss and gradient.

On a CPU, one rank and two.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from recipe_runs import make_assets

PROGRAM = Path(__file__).parents[1] / "programs" / "fsdp_step.py"
pytestmark = [pytest.mark.cpu_e2e, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_assets(tmp_path_factory.mktemp("assets")) / "model"


def ranks_results(model: Path, folder: Path, ranks: int) -> dict:
    """Every variant's results, from ``fsdp_step.py``'s rank 0."""
    path = os.pathsep.join([str(PROGRAM.parent), os.environ.get("PYTHONPATH", "")])
    words = [str(ranks), str(folder / "store"), str(model), str(folder / "results.pt")]
    logs = [open(folder / f"rank{rank}.log", "wb") for rank in range(ranks)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), *words],
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        for rank, process in enumerate(processes):
            assert process.wait(350) == 0, (folder / f"rank{rank}.log").read_text(errors="replace")[-4000:]
    finally:
        for process, log in zip(processes, logs, strict=True):
            process.kill()
            log.close()
    return torch.load(folder / "results.pt", weights_only=False)


def flat(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradients[name].double().flatten() for name in sorted(gradients)])


def distance(ours: list[dict], theirs: list[dict]) -> float:
    """Largest relative distance of a mini-batch's gradient."""
    assert len(ours) == len(theirs) == 2
    return max(float((flat(a) - flat(b)).norm() / flat(b).norm()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_loss_and_gradient_are_those_of_verls_own_path(model, tmp_path, ranks, record_property):
    results = ranks_results(model, tmp_path, ranks)
    plain = results.pop("none")
    assert distance(plain["ours"]["gradients"], plain["verls"]["gradients"]) < 1e-6
    for name, result in results.items():
        ours, verls = result["ours"], result["verls"]
        assert all(torch.isfinite(flat(gradient)).all() for gradient in ours["gradients"]), name
        far = distance(ours["gradients"], verls["gradients"])
        record_property(f"{name}: relative distance of the gradient", far)
        assert far < 1e-6, name
        assert distance(ours["gradients"], plain["ours"]["gradients"]) > 1e-3, f"{name} corrected nothing"
        assert ours["metrics"]["actor/pg_loss"] == pytest.approx(
            verls["metrics"]["actor/pg_loss"], rel=1e-6, abs=1e-9
        ), name
        corrected = {metric: value for metric, value in ours["metrics"].items() if metric.startswith("rollout_corr/")}
        assert "rollout_corr/k3_kl" in corrected
        for metric, value in corrected.items():
            assert value == [pytest.approx(result["metrics"][metric], rel=1e-5, abs=1e-6)], (name, metric)
