# SPDX-License-Identifier: Apache-2.0
"""One rank that trains a tiny model under verl's FSDP2 wrapping for a step, and saves or loads a checkpoint of verl's."""

import os
from pathlib import Path
from typing import Any

import torch

LR, STEPS = 1e-2, 2


def build(
    ranks: int, hybrid: bool = False, family: str = "qwen2.5", intermediate: int = 6, device: str = "cpu"
) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    from tiny_models import make
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from verl.utils.fsdp_utils import apply_fsdp2

    shape, names = ((2, ranks // 2), ("ddp", "fsdp")) if hybrid else ((ranks,), ("fsdp",))
    mesh = torch.distributed.init_device_mesh(device, shape, mesh_dim_names=names)
    # Of 6 rows the last two of five ranks have none; three ranks have pieces of different sizes of the others' 128.
    model = make(family, seed=0, intermediate_size=intermediate).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    apply_fsdp2(model, {"mesh": mesh, "mp_policy": policy, "offload_policy": None, "reshard_after_forward": True}, {})
    # Two groups, so that a parameter's number in the optimizer is not its place in the model.
    groups = [[p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]]
    decay = [{"params": group, "weight_decay": weight} for group, weight in zip(groups, (0.1, 0.0), strict=True)]
    optimizer = torch.optim.AdamW(decay, lr=LR)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, step: int) -> None:
    """The same batch on every rank, so that the mean over ranks does not depend on how many there are."""
    ids = torch.randint(model.config.vocab_size, (2, 10), generator=torch.Generator().manual_seed(step)).to(model.device)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


def whole(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
    """Everything a checkpoint has, uncut."""
    full = lambda t: t.full_tensor().cpu().clone() if hasattr(t, "full_tensor") else t  # noqa: E731
    moments = {
        name: {key: full(value) for key, value in optimizer.state[parameter].items()}
        for name, parameter in model.named_parameters()
    }
    weights = {name: full(parameter.data) for name, parameter in model.named_parameters()}
    empty = sum(parameter.to_local().numel() == 0 for parameter in model.parameters())
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"weights": weights, "moments": moments, "groups": groups, "scheduler": scheduler.last_epoch, "empty": empty}


def refused(rank: int, ranks: int, folder: str, checkpoint: str, family: str = "qwen2.5") -> None:
    """What every rank raises that loads a checkpoint, or asks where the other one's answer is an error (an empty path): a file
    ``folder/refused-<rank>`` with its kind and text."""
    os.environ["VERL_PLATFORM"] = "cpu"
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    from flashrl_verl.checkpoint import ElasticCheckpointManager, together

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group-refused", rank=rank, world_size=ranks)
    told = "nothing"
    try:
        if checkpoint:
            model, optimizer, scheduler = build(ranks, family=family)
            manager = FSDPCheckpointManager(model=model, optimizer=optimizer, lr_scheduler=scheduler)
            ElasticCheckpointManager.of(manager).load_checkpoint(checkpoint)
        else:
            together(lambda: {}["weights"] if rank == 1 else rank)
    except Exception as error:  # noqa: BLE001 - it is the result
        told = f"{type(error).__name__}: {error}"
    (Path(folder) / f"refused-{rank}").write_text(told)


def run(
    rank: int,
    ranks: int,
    task: str,
    folder: str,
    checkpoint: str,
    hybrid: bool = False,
    family: str = "qwen2.5",
    intermediate: int = 6,
    device: str = "cpu",
) -> None:
    """``save``: two steps, a checkpoint, and one step more. ``load``: the checkpoint, and one step more.

    The model is ``tiny_models.CONFIGS[family]``, ``intermediate`` wide. With ``hybrid`` two replicas hold the shards of
    ``ranks`` / 2. The last rank writes the whole state, and how many of its own shards are empty, after the checkpoint and
    after the last step to ``folder/<task>-<ranks>.pt``. On ``device`` "cuda" each rank has a GPU of its own.
    """
    os.environ["VERL_PLATFORM"] = "nvidia" if device == "cuda" else "cpu"
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    from flashrl_verl.checkpoint import ElasticCheckpointManager

    torch.set_num_threads(1)
    torch.manual_seed(rank)
    group = f"file://{folder}/group-{task}-{ranks}"
    if device == "cuda":
        torch.cuda.set_device(rank)
    # verl's own choice for CUDA.
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, init_method=group, rank=rank, world_size=ranks)
    model, optimizer, scheduler = build(ranks, hybrid, family, intermediate, device)
    manager = FSDPCheckpointManager(model=model, optimizer=optimizer, lr_scheduler=scheduler)
    if task == "save":
        for step in range(STEPS):
            train(model, optimizer, scheduler, step)
        manager.save_checkpoint(checkpoint, global_step=STEPS)
    else:
        ElasticCheckpointManager.of(manager).load_checkpoint(checkpoint)
    states = [whole(model, optimizer, scheduler)]
    train(model, optimizer, scheduler, STEPS)
    states.append(whole(model, optimizer, scheduler))
    if rank == ranks - 1:
        torch.save(states, Path(folder) / f"{task}-{ranks}.pt")
    torch.distributed.destroy_process_group()
