# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that verl's FSDP ranks have saved, with the whole weights, and what an export holds of them."""

from pathlib import Path

import checkpoint_ranks
import torch
from safetensors.torch import load_file


def save(ranks: int, folder: Path, name: str = "qwen2.5", hybrid: bool = False) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of verl's FSDP2 ranks after two steps of training, and the whole FP32 weights."""
    checkpoint = folder / "global_step_2"
    arguments = (ranks, "save", str(folder), str(checkpoint / "actor"), hybrid, name)
    torch.multiprocessing.spawn(checkpoint_ranks.run, args=arguments, nprocs=ranks)
    return checkpoint, torch.load(folder / f"save-{ranks}.pt")[0]["weights"]


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
