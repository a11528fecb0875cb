# SPDX-License-Identifier: Apache-2.0
"""A policy update of a real FSDP2 actor on two ranks: our correction on the shards is verl's on the driver, loss and
gradient.

Every variant is run twice on the same weights (the learning rate is 0, the step is taken all the same): by our worker,
from the rank's rows, and by verl's, with weights and mask that verl's driver has computed from the whole batch. verl is
imported in the rank's process, which chooses its platform.
"""

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from correction_cases import NODES, random_batch, verl_answer
from engines import in_own_process
from omegaconf import OmegaConf, open_dict
from recipe_runs import make_assets
from tensordict import TensorDict

pytestmark = [pytest.mark.timeout(1200)]

RANKS = 2
ROWS, MINI_BATCH = 16, 8
OVERRIDES = (
    "experiment=smoke",
    f"trainer.n_gpus_per_node={RANKS}",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.actor.optim.lr=0.0",
    "actor_rollout_ref.actor.optim.weight_decay=0.0",
)

NAMES = ("metrics only", "token TIS", "token TIS, two rejections", "sequence IcePop normalized, one bound")
"""Of each kind one; tests/unit/test_correction.py has all."""


def shard(columns: dict[str, list[torch.Tensor]], rank: int, temperature: float) -> TensorDict:
    """This rank's rows as the transfer queue delivers them."""
    from verl.utils import tensordict_utils as tu

    own = slice(rank * ROWS // RANKS, (rank + 1) * ROWS // RANKS)
    fields = {name: torch.nested.as_nested_tensor(rows[own], layout=torch.jagged) for name, rows in columns.items()}
    data = TensorDict(fields, batch_size=ROWS // RANKS)
    tu.assign_non_tensor(
        data, calculate_entropy=False, distillation_use_topk=False, distillation_only=False, epochs=1, seed=1,
        global_batch_size=MINI_BATCH, mini_batch_size=MINI_BATCH, dataloader_kwargs={"shuffle": True},
        temperature=temperature,
    )  # fmt: skip
    return data


def run(worker, update, data: TensorDict) -> dict:
    """Update, and return gradients of every mini-batch (whole, by parameter) and the metrics."""
    engine, gradients = worker.actor.engine, []
    step = engine.optimizer_step

    def recorded():
        parameters = engine.module.named_parameters()
        gradients.append({name: p.grad.full_tensor().clone() for name, p in parameters if p.grad is not None})
        return step()

    engine.optimizer_step = recorded
    try:
        output = update(data)
    finally:
        del engine.optimizer_step
    return {"gradients": gradients, "metrics": None if output is None else dict(output["metrics"])}


def on_a_rank(rank: int, folder: Path, model: Path) -> dict:
    """The results of all variants, with whole gradients."""
    torch.set_num_threads(1)
    os.environ.update(
        VERL_PLATFORM="cpu", RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0", DIST_INIT_METHOD=f"file://{folder}/store",
    )  # fmt: skip
    from torch.distributed import destroy_process_group
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from flashrl_verl.tools.recipe_process import compose
    from flashrl_verl.trainer.worker import FlashRLWorker

    config = compose([*OVERRIDES, f"actor_rollout_ref.model.path={model}"]).actor_rollout_ref
    worker = FlashRLWorker(config, role="actor")
    worker.init_model()

    # The same on every rank.
    batch, random = random_batch(11, ROWS, 12, scales=(0.01, 0.15, 1.5)), torch.Generator().manual_seed(11)
    lengths = batch.lengths.tolist()
    vocabulary = worker.actor.engine.module.config.vocab_size
    ids = [torch.randint(3, vocabulary, (2 + i % 4 + n,), generator=random) for i, n in enumerate(lengths)]
    columns = {
        "prompts": [row[:-n] for row, n in zip(ids, lengths, strict=True)],
        "responses": [row[-n:] for row, n in zip(ids, lengths, strict=True)],
        "input_ids": ids,
        "position_ids": [torch.arange(len(row)) for row in ids],
    }

    def cut(padded: torch.Tensor) -> list[torch.Tensor]:
        return [row[:n] for row, n in zip(padded, lengths, strict=True)]

    columns |= {"old_log_probs": cut(batch.old), "rollout_log_probs": cut(batch.rollout)}
    columns |= {"response_mask": cut(batch.mask), "loss_mask": cut(batch.mask)}
    columns["advantages"] = cut(torch.randn(ROWS, 1, generator=random) * batch.mask)
    results = {}
    for name in NAMES:
        node = NODES[name]
        with open_dict(worker.config):
            worker.config.actor.policy_loss.rollout_correction = OmegaConf.create(node)
        ours = run(worker, worker.update_actor, shard(columns, rank, config.rollout.temperature))
        answer = verl_answer(batch, node)
        corrected = columns | {"response_mask": cut(answer.mask)}
        if answer.weights is not None:
            corrected["rollout_is_weights"] = cut(answer.weights)
        update = functools.partial(ActorRolloutRefWorker.update_actor, worker)
        verls = run(worker, update, shard(corrected, rank, config.rollout.temperature))
        results[name] = {"ours": ours, "verls": verls, "metrics": answer.metrics}
    destroy_process_group()
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    """Every variant's."""
    folder = tmp_path_factory.mktemp("fsdp")
    model = make_assets(folder) / "model"
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(lambda rank: in_own_process(on_a_rank, rank, folder, model), range(RANKS)))[0]


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
