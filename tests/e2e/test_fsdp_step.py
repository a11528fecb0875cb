# SPDX-License-Identifier: Apache-2.0
"""A policy update of a real FSDP2 actor on two ranks: our correction on the shards is verl's on the driver, loss and
gradient."""

import fsdp_step
import pytest
import torch
from recipe_runs import make_assets

pytestmark = [pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    """Every variant's."""
    folder = tmp_path_factory.mktemp("fsdp")
    torch.multiprocessing.spawn(fsdp_step.on_a_rank, (folder, make_assets(folder) / "model"), fsdp_step.RANKS)
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
