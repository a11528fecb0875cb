# SPDX-License-Identifier: Apache-2.0
"""BF16: verl's own merger, which puts the FSDP ranks' shards together, with the routers in the trainer's precision.

The merger reads every rank's shards into memory and rounds them all to BF16. MoE routers and the biases that choose
experts reach the rollout unrounded (``refit/wire.py``), so they are taken from the shards again.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from verl.model_merger.base_model_merger import ModelMergerConfig
from verl.model_merger.fsdp_model_merger import FSDPModelMerger

from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.refit.wire import wire_dtype
from flashrl_verl.tools.export.checkpoint import Checkpoint, new_folder


class _Merger(FSDPModelMerger):
    def _load_and_merge_state_dicts(self, world_size, total_shards, mesh_shape, mesh_dim_names):
        state = super()._load_and_merge_state_dicts(world_size, total_shards, mesh_shape, mesh_dim_names)
        if any("lora_" in name for name in state):
            raise ConfigError(
                f"{self.config.local_dir} holds LoRA adapters, which are not merged into the weights here. Use python "
                "-m verl.model_merger merge --backend fsdp, which writes model and adapter apart"
            )
        # A name keeps the dtype it has: FP32 where that is what the trainer holds.
        routers = [name for name in state if wire_dtype(name, torch.float32, torch.bfloat16) is torch.float32]
        if routers:
            files = (f"model_world_size_{world_size}_rank_{rank}.pt" for rank in range(total_shards))
            shards = [
                torch.load(Path(self.config.local_dir) / file, map_location="cpu", mmap=True, weights_only=False)
                for file in files
            ]
            for name in routers:
                parts = [shard[name] for shard in shards]
                if isinstance(parts[0], DTensor):
                    state[name] = self._merge_by_placement([p.to_local() for p in parts], parts[0].placements[-1])
                else:
                    state[name] = parts[0]
        return state


def merge(checkpoint: Checkpoint, output: Path) -> None:
    """Write a checkpoint as a Hugging Face folder in BF16; it appears whole or not at all.

    Args:
        checkpoint: a ``sharded`` one.
        output: does not exist, or is empty.

    Raises:
        ConfigError: the checkpoint holds LoRA adapters.
        FlashRLError: verl's merger failed: a rank's file is damaged or not there, the disk is full, ...
    """
    with new_folder(output) as scratch:
        try:
            config = ModelMergerConfig(
                operation="merge",
                backend="fsdp",
                local_dir=str(checkpoint.path),
                hf_model_config_path=str(checkpoint.path / "huggingface"),
                target_dir=str(scratch),
            )
            _Merger(config).merge_and_save()
            for file in scratch.glob("*.safetensors"):
                file.chmod(0o644)  # safetensors' 0600 would hide the weights from whoever serves them
        except FlashRLError:
            raise
        except Exception as error:  # noqa: BLE001 - a damaged file may raise anything
            raise FlashRLError(
                f"verl's merger cannot read {checkpoint.path}, or not write {output}: {type(error).__name__}: {error}. "
                "All ranks' files must be there, and of this torch: copy them from the nodes that wrote them, "
                "merge where they were written, or name an earlier step"
            ) from error
