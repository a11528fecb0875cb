# SPDX-License-Identifier: Apache-2.0
"""One data-parallel rank of a real FSDP2 actor on a CPU: a policy update with our correction and with verl's, side by
side.

    python fsdp_step.py RANK RANKS STORE MODEL OUTPUT

Every variant is run twice on the same weights (the learning rate is 0, the step is taken all the same): by our worker,
from the rank's rows, and by verl's, with weights and mask that verl's driver has computed from the whole batch.
"""

import functools
import os
import sys
from pathlib import Path

RANK, RANKS, STORE, MODEL, OUTPUT = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
os.environ.update(
    VERL_PLATFORM="cpu", RANK=str(RANK), WORLD_SIZE=str(RANKS), LOCAL_RANK="0", DIST_INIT_METHOD=f"file://{STORE}",
    MASTER_ADDR="127.0.0.1", MASTER_PORT="0",
)  # fmt: skip
import torch  # noqa: E402
from correction_cases import NODES, Batch, verl_answer  # noqa: E402
from hydra import compose, initialize_config_dir  # noqa: E402
from omegaconf import OmegaConf, open_dict  # noqa: E402
from tensordict import NonTensorData, TensorDict  # noqa: E402

import flashrl_verl.plugins.verl  # noqa: E402, F401 - the CPU platform, before verl picks one

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = [name for name in NODES if name != "metrics only"]
ROWS, MINI_BATCH, MICRO_BATCH = 16, 8, 2


def configuration():
    words = [
        "experiment=smoke",
        f"actor_rollout_ref.model.path={MODEL}",
        f"trainer.n_gpus_per_node={RANKS}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={MICRO_BATCH}",
        "actor_rollout_ref.actor.optim.lr=0.0",
        # A step later, weight decay and warm-up would tell nothing more.
        "actor_rollout_ref.actor.optim.weight_decay=0.0",
    ]
    with initialize_config_dir(str(ROOT / "recipe" / "flashrl" / "config"), version_base=None):
        return compose("flashrl_trainer", overrides=words).actor_rollout_ref


def whole_batch(vocabulary: int) -> tuple[dict[str, list[torch.Tensor]], Batch]:
    """Rows of tokens with advantages, and their log-probs padded: the same on every rank."""
    random = torch.Generator().manual_seed(11)
    lengths = torch.randint(1, 13, (ROWS,), generator=random)
    width = int(lengths.max())
    filled = torch.arange(width) < lengths.unsqueeze(-1)
    mask = filled & ((torch.rand(ROWS, width, generator=random) < 0.9) | (torch.arange(width) == 0))
    mask[3] = False  # a response that is not trained on
    old = (-3 * torch.rand(ROWS, width, generator=random) - 0.5) * filled
    scale = torch.tensor([0.01, 0.15, 1.5])[torch.randint(0, 3, (ROWS, 1), generator=random)]
    rollout = old - (2 * torch.rand(ROWS, width, generator=random) - 1) * scale * filled
    advantages = torch.randn(ROWS, 1, generator=random) * mask
    rows: dict[str, list[torch.Tensor]] = {}
    for row, length in enumerate(lengths.tolist()):
        prompt, response = (torch.randint(3, vocabulary, (n,), generator=random) for n in (int(row % 4) + 2, length))
        ids = torch.cat([prompt, response])
        fields = {"prompts": prompt, "responses": response, "input_ids": ids, "position_ids": torch.arange(len(ids))}
        padded = {
            "response_mask": mask.long(),
            "loss_mask": mask.long(),
            "old_log_probs": old,
            "advantages": advantages,
        }
        for name, value in {**padded, "rollout_log_probs": rollout}.items():
            fields[name] = value[row, :length]
        for name, value in fields.items():
            rows.setdefault(name, []).append(value)
    return rows, Batch(old, rollout, mask.long(), lengths)


def shard(rows: dict[str, list[torch.Tensor]], temperature: float) -> TensorDict:
    """This rank's rows as the transfer queue delivers them."""
    own = slice(RANK * ROWS // RANKS, (RANK + 1) * ROWS // RANKS)
    fields = {name: torch.nested.as_nested_tensor(values[own], layout=torch.jagged) for name, values in rows.items()}
    settings = {
        "calculate_entropy": False, "distillation_use_topk": False, "distillation_only": False, "epochs": 1, "seed": 1,
        "global_batch_size": MINI_BATCH, "mini_batch_size": MINI_BATCH, "dataloader_kwargs": {"shuffle": True},
        "temperature": temperature,
    }  # fmt: skip
    data = TensorDict(fields, batch_size=ROWS // RANKS)
    for name, value in settings.items():
        data.set_non_tensor(name, NonTensorData(value) if isinstance(value, dict) else value)
    return data


def run(worker, update, data: TensorDict) -> dict:
    """Update, and return gradients of every mini-batch (whole, by parameter) and the metrics."""
    engine, gradients = worker.actor.engine, []
    step = type(engine).optimizer_step

    @functools.wraps(step)
    def recorded():
        gradients.append(
            {name: p.grad.full_tensor().clone() for name, p in engine.module.named_parameters() if p.grad is not None}
        )
        return step(engine)

    engine.optimizer_step = recorded
    try:
        output = update(data)
    finally:
        del engine.optimizer_step
    return {"gradients": gradients, "metrics": None if output is None else dict(output["metrics"])}


def main() -> None:
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from flashrl_verl.trainer.worker import FlashRLWorker

    config = configuration()
    worker = FlashRLWorker(config, role="actor")
    worker.init_model()
    rows, batch = whole_batch(worker.actor.engine.module.config.vocab_size)
    results = {}
    for name in ["none", *VARIANTS]:
        node = {"rollout_is": None} if name == "none" else NODES[name]
        with open_dict(worker.config):
            worker.config.actor.policy_loss.rollout_correction = OmegaConf.create(node)
        ours = run(worker, worker.update_actor, shard(rows, config.rollout.temperature))
        answer = verl_answer(batch, node)
        corrected = dict(
            rows, response_mask=[m[:n].long() for m, n in zip(answer.mask, batch.lengths.tolist(), strict=True)]
        )
        if answer.weights is not None:
            corrected["rollout_is_weights"] = [
                w[:n] for w, n in zip(answer.weights, batch.lengths.tolist(), strict=True)
            ]
        update = functools.partial(ActorRolloutRefWorker.update_actor, worker)
        verls = run(worker, update, shard(corrected, config.rollout.temperature))
        results[name] = {"ours": ours, "verls": verls, "metrics": answer.metrics}
    if RANK == 0:
        torch.save(results, OUTPUT)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
