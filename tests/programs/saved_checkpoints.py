# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that verl's FSDP2 ranks have saved, with the whole weights, and what an export holds of them."""

import os
from pathlib import Path

import torch
from safetensors.torch import load_file


def save(
    ranks: int, folder: Path, name: str = "qwen2.5", hybrid: bool = False, intermediate: int = 6
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of verl's FSDP2 ranks after two steps of training, and the whole FP32 weights.

    Args:
        ranks: processes on the CPU.
        folder: where ``global_step_2`` goes.
        name: of ``tiny_models.CONFIGS``.
        hybrid: whether two replicas hold the shards of ``ranks`` / 2.
        intermediate: width of the MLP. Of 6 rows the last two of five ranks have none.
    """
    checkpoint = folder / "global_step_2"
    arguments = (ranks, folder, checkpoint / "actor", name, hybrid, intermediate)
    torch.multiprocessing.spawn(_train_and_save, args=arguments, nprocs=ranks)
    return checkpoint, torch.load(folder / "weights.pt")


def _train_and_save(
    rank: int, ranks: int, folder: Path, actor: Path, name: str, hybrid: bool, intermediate: int
) -> None:
    os.environ["VERL_PLATFORM"] = "cpu"
    from tiny_models import make
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
    from verl.utils.fsdp_utils import apply_fsdp2

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/group-{ranks}", rank=rank, world_size=ranks
    )
    shape, names = ((2, ranks // 2), ("ddp", "fsdp")) if hybrid else ((ranks,), ("fsdp",))
    mesh = torch.distributed.init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = make(name, seed=0, intermediate_size=intermediate)
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    apply_fsdp2(model, {"mesh": mesh, "mp_policy": policy, "offload_policy": None, "reshard_after_forward": True}, {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    for step in range(2):
        ids = torch.randint(model.config.vocab_size, (2, 10), generator=torch.Generator().manual_seed(step))
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    manager = FSDPCheckpointManager(model=model, optimizer=optimizer, lr_scheduler=scheduler)
    manager.save_checkpoint(str(actor), global_step=2)
    weights = {name: parameter.full_tensor().clone() for name, parameter in model.named_parameters()}
    if rank == 0:
        torch.save(weights, folder / "weights.pt")
    torch.distributed.destroy_process_group()


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_rounded(found: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name], weight.to(torch.bfloat16)), name
