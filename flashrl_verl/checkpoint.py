# SPDX-License-Identifier: Apache-2.0
"""Resume on another number of ranks: an FSDP2 checkpoint of verl's is cut anew while it is loaded.

verl writes one file a rank, ``model_world_size_<N>_rank_<r>.pt`` and ``optim_...``, whose DTensors are rows of the parameters
and of Adam's moments, and looks for its own N when it loads. Here every rank maps all files of the other N into memory and
copies the rows that are its own now: nothing is written, and no rank holds more than its share, twice while it loads.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.fsdp_utils import fsdp_version

from flashrl_verl.errors import FlashRLError

log = logging.getLogger("verl.flashrl")

CONFIG_FILE = "fsdp_config.json"
"""verl's record beside the shards: FSDP's version and the number of ranks."""


class ElasticCheckpointManager(FSDPCheckpointManager):
    """verl's checkpoints, loadable by any number of FSDP2 ranks. Saving is verl's, unchanged."""

    @classmethod
    def of(cls, manager: FSDPCheckpointManager) -> ElasticCheckpointManager:
        """The same model, optimizer and settings as ``manager``'s."""
        return cls(
            model=manager.model,
            optimizer=manager.optimizer,
            lr_scheduler=manager.lr_scheduler,
            processing_class=manager.processing_class,
            checkpoint_config=manager.checkpoint_config,
            trust_remote_code=manager.trust_remote_code,
        )

    def load_checkpoint(self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False) -> None:
        """verl's; a checkpoint of another number of ranks is resharded.

        Args:
            local_path: folder of the shards, on storage that every rank reads; None loads nothing.
            hdfs_path: as verl's, not used.
            del_local_after_load: as verl's; does nothing to resharded files.

        Raises:
            FlashRLError: the run is not FSDP2's or shards are missing, and nothing was loaded; or they do not fit the model.
        """
        ranks = None if local_path is None else saved_ranks(Path(local_path))
        if ranks is None or ranks == self.world_size:
            super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
            return
        folder = Path(local_path)
        if fsdp_version(self.model) != 2:
            raise FlashRLError(
                f"{folder} was saved by {ranks} ranks and this run has {self.world_size}: only FSDP2's checkpoints are cut "
                "anew. Remedy: actor_rollout_ref.actor.strategy=fsdp2 from the start, or the same trainer.nnodes and "
                "trainer.n_gpus_per_node as before"
            )
        if self.rank == 0:
            log.warning(
                "%s was saved by %d ranks and is cut anew for %d; random states start anew", folder, ranks, self.world_size
            )
        wanted = {"model": self.should_load_model, "optim": self.should_load_optimizer, "extra_state": self.should_load_extra}
        # All of them, before anything is loaded.
        shards = {kind: Shards(folder, kind, ranks) for kind, wants in wanted.items() if wants}
        if "model" in shards:
            self._load_model(shards["model"])
        if "optim" in shards:
            self._load_optimizer(shards["optim"])
        if "extra_state" in shards and self.lr_scheduler is not None:
            # The same on every rank. Random states are not: there are more or fewer of them now.
            extra = shards["extra_state"].load(0)
            if extra["lr_scheduler"] is not None:
                self.lr_scheduler.load_state_dict(extra["lr_scheduler"])
        torch.distributed.barrier()

    def _load_model(self, shards: Shards) -> None:
        states = shards.load_all()
        mine = self.model.state_dict()
        if states[0].keys() != mine.keys():
            differing = sorted(states[0].keys() ^ mine.keys())
            raise FlashRLError(
                f"{shards.folder} is of another model: {len(differing)} names differ ({', '.join(differing[:4])}). Set "
                "actor_rollout_ref.model.path to the model that was trained, or trainer.resume_mode=disable"
            )
        self.model.load_state_dict({name: reshard([s[name] for s in states], mine[name], name) for name in mine})

    def _load_optimizer(self, shards: Shards) -> None:
        states = shards.load_all()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        first = states[0]
        if "state" not in first or len(parameters) != sum(len(group["params"]) for group in first["param_groups"]):
            raise FlashRLError(
                f"{shards.folder}: the optimizer's state is not of this run's {len(parameters)} parameters, and cannot be cut "
                "anew. Set actor_rollout_ref.actor.checkpoint.load_contents=[model,extra] to go on without it"
            )
        moments = {
            index: {
                key: reshard([s["state"][index][key] for s in states], parameters[index], f"{key} of parameter {index}")
                for key in entries
            }
            for index, entries in first["state"].items()
        }
        self.optimizer.load_state_dict({"state": moments, "param_groups": first["param_groups"]})


class Shards:
    """The files of one kind that the ranks of an earlier run wrote.

    Args:
        folder: where they lie.
        kind: model, optim or extra_state.
        ranks: how many there are.

    Raises:
        FlashRLError: one is missing here; what is there names the remedy.
    """

    def __init__(self, folder: Path, kind: str, ranks: int):
        self.folder = folder
        self.files = [folder / f"{kind}_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks)]
        missing = [file.name for file in self.files if not file.is_file()]
        if missing:
            raise FlashRLError(
                f"{folder} was saved by {ranks} ranks, and {len(missing)} of their files are not here ({missing[0]}). To "
                "resume on another number of GPUs every node has to read all of them: put trainer.default_local_dir on storage "
                "that the nodes share"
            )

    def load(self, rank: int) -> dict[str, Any]:
        """The file of one rank, its tensors mapped rather than read."""
        return torch.load(self.files[rank], map_location="cpu", mmap=True, weights_only=False)

    def load_all(self) -> list[dict[str, Any]]:
        """Those of all ranks, in their order."""
        return [self.load(rank) for rank in range(len(self.files))]


def saved_ranks(folder: Path) -> int | None:
    """How many ranks wrote the checkpoint in ``folder``; None where verl left no record."""
    try:
        return int(json.loads((folder / CONFIG_FILE).read_text())["world_size"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise FlashRLError(
            f"{folder / CONFIG_FILE} is damaged ({type(error).__name__}: {error}), so the checkpoint is not whole. Resume from "
            "an earlier one: trainer.resume_mode=resume_path, trainer.resume_from_path=<folder>/global_step_<N>"
        ) from None


def reshard(parts: Sequence[Any], like: torch.Tensor, name: str) -> Any:
    """One value of a state, cut as ``like`` is cut.

    Args:
        parts: the value on every earlier rank: DTensors with the same placements, or the same plain value everywhere.
        like: this run's tensor of that place.
        name: for the error.

    Returns:
        A DTensor with ``like``'s mesh and placements and ``parts``' dtype, on ``like``'s device; a plain value as it is.

    Raises:
        FlashRLError: the shapes differ, a placement is neither replicated nor by rows of one mesh dimension, or a plain value
            differs between ranks.
    """
    first = parts[0]
    if not isinstance(first, DTensor):  # Adam's step counts
        if not all(_same(part, first) for part in parts[1:]):
            raise FlashRLError(f"{name}: it is not cut by FSDP2 and differs between ranks, so it cannot be cut anew")
        return first.clone() if isinstance(first, torch.Tensor) else first  # no view of the mapped file
    if not isinstance(like, DTensor) or first.shape != like.shape:
        raise FlashRLError(f"{name}: {tuple(first.shape)} in the checkpoint, {tuple(like.shape)} in the model")
    old_dim, new_dim = sharded_dim(first.placements, name), sharded_dim(like.placements, name)
    local = like.to_local()
    if new_dim is None:
        mine = _rows(parts, old_dim, 0, first.shape[0] if first.dim() else 0)
    else:
        mesh_dim, dim = new_dim
        if old_dim is not None and old_dim[1] != dim:
            raise FlashRLError(f"{name}: cut along dimension {old_dim[1]} in the checkpoint, along {dim} in the model")
        mesh = like.device_mesh
        start, length = own_rows(like.shape[dim], mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim))
        assert length == local.shape[dim], f"{name}: FSDP2 gave this rank {local.shape[dim]} rows, not {length}"
        mine = _rows(parts, old_dim, start, length, dim)
    return DTensor.from_local(
        mine.to(local.device), like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def whole(parts: Sequence[Any], name: str) -> torch.Tensor:
    """One tensor of a state, uncut.

    Args:
        parts: the tensor on every rank that wrote the checkpoint, in their order.
        name: for the error.

    Returns:
        All of it, in ``parts``' dtype; a tensor that was not cut may be a view of the mapped file.

    Raises:
        FlashRLError: it is cut in a way that FSDP alone does not make, or ranks differ in what each has whole.
    """
    first = parts[0]
    if not isinstance(first, DTensor):
        if not all(_same(part, first) for part in parts[1:]):
            raise FlashRLError(f"{name}: it is not cut by FSDP and differs between ranks, so no rank's is the tensor")
        return first
    cut = sharded_dim(first.placements, name)
    if cut is None:
        return first.to_local()
    found = _rows(parts, cut, 0, first.shape[cut[1]], cut[1])
    if found.shape != first.shape:
        raise FlashRLError(f"{name}: the ranks' pieces make {tuple(found.shape)}, and the tensor has {tuple(first.shape)}")
    return found


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return one == other


def sharded_dim(placements: Iterable[Any], name: str) -> tuple[int, int] | None:
    """The mesh dimension that a tensor is cut over and its own dimension that is cut; None for replicated everywhere.

    Raises:
        FlashRLError: it is cut twice, or partial.
    """
    cut = [(i, p.dim) for i, p in enumerate(placements) if type(p) is Shard]
    if len(cut) > 1 or any(not p.is_replicate() and type(p) is not Shard for p in placements):
        raise FlashRLError(f"{name}: its placement {tuple(placements)} is not one that FSDP2 alone makes, and is not cut anew")
    return cut[0] if cut else None


def own_rows(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """First row and number of rows of a rank, cut as ``torch.chunk`` does and FSDP2 with it: the last ranks may have none."""
    chunk = -(-rows // ranks)
    start = min(rank * chunk, rows)
    return start, min(chunk, rows - start)


def _rows(parts: Sequence[DTensor], cut: tuple[int, int] | None, start: int, length: int, dim: int = 0) -> torch.Tensor:
    """Rows ``start`` to ``start + length`` along ``dim`` of the tensor whose pieces are ``parts``."""
    if cut is None:
        return parts[0].to_local().narrow(dim, start, length).clone()
    mesh_dim, _ = cut
    taken, at = [], 0
    for part in _one_copy(parts, mesh_dim):
        size = part.shape[dim]
        low, high = max(start, at), min(start + length, at + size)
        if low < high:
            taken.append(part.narrow(dim, low - at, high - low))
        at += size
    return torch.cat(taken, dim) if taken else parts[0].to_local().narrow(dim, 0, 0).clone()


def _one_copy(parts: Sequence[DTensor], mesh_dim: int) -> list[torch.Tensor]:
    """The local tensors along the mesh dimension that cuts: with hybrid sharding the ranks of the first replica alone."""
    mesh = parts[0].device_mesh.mesh
    lines = mesh.movedim(mesh_dim, 0).reshape(mesh.shape[mesh_dim], -1)
    return [parts[int(rank)].to_local() for rank in lines[:, 0]]
