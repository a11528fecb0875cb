# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that verl's FSDP2 ranks have saved, with the whole weights, and what an export holds of them."""

import os
from pathlib import Path

import torch
from safetensors.torch import load_file


def save(
    ranks: int, folder: Path, name: str = "qwen2.5", intermediate: int = 6
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of verl's FSDP2 ranks after two steps of training, and the whole FP32 weights.

    Args:
        ranks: processes on the CPU.
        folder: where ``global_step_2`` goes.
        name: of ``tiny_models.CONFIGS``, or glm4-moe.
        intermediate: width of the MLP.
    """
    checkpoint = folder / "global_step_2"
    arguments = (ranks, folder, checkpoint / "actor", name, intermediate)
    torch.multiprocessing.spawn(_train_and_save, args=arguments, nprocs=ranks)
    return checkpoint, torch.load(folder / "weights.pt")


def _model(name: str, intermediate: int) -> torch.nn.Module:
    import tiny_models
    from transformers import Glm4MoeConfig

    # Tied embeddings; experts beside a dense layer, and a bias that chooses them: values that BF16 makes one.
    sizes = dict(hidden_size=64, moe_intermediate_size=32, head_dim=16, n_routed_experts=8, num_experts_per_tok=2)
    common = {**tiny_models._COMMON, "tie_word_embeddings": True}
    moe = Glm4MoeConfig(**common, **sizes, intermediate_size=96, first_k_dense_replace=1)
    tiny_models.CONFIGS.setdefault("glm4-moe", moe)
    model = tiny_models.make(name, seed=0, intermediate_size=intermediate)
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.copy_(30 + 0.02 * torch.arange(buffer.numel()))
    return model


def _train_and_save(rank: int, ranks: int, folder: Path, actor: Path, name: str, intermediate: int) -> None:
    os.environ["VERL_PLATFORM"] = "cpu"
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
    from verl.utils.fsdp_utils import apply_fsdp2

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/group-{ranks}", rank=rank, world_size=ranks
    )
    mesh = torch.distributed.init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    model = _model(name, intermediate)
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
    from flashrl_verl.quickstart.tokenizer import build_tokenizer

    manager = FSDPCheckpointManager(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, processing_class=build_tokenizer()
    )
    manager.save_checkpoint(str(actor), global_step=2)
    weights = {name: parameter.full_tensor().clone() for name, parameter in model.named_parameters()}
    weights |= {name: buffer.clone() for name, buffer in model.named_buffers() if name in model.state_dict()}
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
