# SPDX-License-Identifier: Apache-2.0
"""The shards that verl's FSDP2 ranks saved, and one of their tensors put together.

verl writes one file a rank, ``model_world_size_<N>_rank_<r>.pt``, whose DTensors are rows of the parameters. FSDP2 cuts
every parameter along one dimension over one dimension of its mesh, as ``torch.chunk`` does; other dimensions of the
mesh (hybrid sharding) hold copies.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from flashrl_verl.errors import FlashRLError

CONFIG_FILE = "fsdp_config.json"
"""verl's record beside the shards: FSDP's version and the number of ranks."""

_MODEL_SHARD = re.compile(r"model_world_size_(\d+)_rank_\d+\.pt")


@dataclass(frozen=True)
class Saved:
    """Who saved a checkpoint."""

    ranks: int
    fsdp: int | None
    """FSDP's version; None where only the names of the files were there to tell."""


def saved_by(folder: Path) -> Saved | None:
    """Who saved the checkpoint in ``folder``: as verl's record says, else as the names of its files do; None for
    neither.

    Raises:
        FlashRLError: the record is damaged or not to be read, or there is none and the files are of several numbers of
            ranks.
    """
    try:
        record = json.loads((folder / CONFIG_FILE).read_text())
        return Saved(int(record["world_size"]), int(record["FSDP_version"]))
    except FileNotFoundError:
        names = folder.glob("model_world_size_*.pt")
        ranks = sorted({int(match[1]) for name in names if (match := _MODEL_SHARD.fullmatch(name.name))})
    except (ValueError, KeyError, TypeError) as error:
        raise FlashRLError(
            f"{folder / CONFIG_FILE} is damaged ({type(error).__name__}: {error}), so the checkpoint is not whole. "
            "Name an earlier one"
        ) from None
    except OSError as error:
        raise FlashRLError(
            f"{folder / CONFIG_FILE} cannot be read ({error.strerror}). Check its permissions"
        ) from error
    if len(ranks) > 1:
        raise FlashRLError(
            f"{folder} has shards of {' and of '.join(map(str, ranks))} ranks and no {CONFIG_FILE} that says which are "
            "the last. Name an earlier checkpoint"
        )
    return Saved(ranks[0], None) if ranks else None


def load_all(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """The model's states of all ranks, in their order, their tensors mapped rather than read.

    Raises:
        FlashRLError: a file is not there, cut off, or not to be read.
    """
    states = []
    for rank in range(ranks):
        file = folder / f"model_world_size_{ranks}_rank_{rank}.pt"
        try:
            states.append(torch.load(file, map_location="cpu", mmap=True, weights_only=False))
        except Exception as error:  # noqa: BLE001 - a damaged pickle may raise anything
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise FlashRLError(
                f"{file} cannot be read ({why}). Check its permissions; if it was cut off, the checkpoint is not "
                "whole: name an earlier one"
            ) from error
    return states


def whole(parts: Sequence[Any], name: str) -> torch.Tensor:
    """One tensor of a state, uncut.

    Args:
        parts: the tensor on every rank that wrote the checkpoint, in their order.
        name: for the error.

    Returns:
        All of it, in ``parts``' dtype; a tensor that was not cut may be a view of the mapped file.

    Raises:
        FlashRLError: it is cut in a way that FSDP2 alone does not make, or ranks differ in what each has whole.
    """
    first = parts[0]
    if not isinstance(first, DTensor):
        if not all(torch.equal(part, first) for part in parts[1:]):
            raise FlashRLError(f"{name}: it is not cut by FSDP2 and differs between ranks, so no rank's is the tensor")
        return first
    cut = [(mesh_dim, p.dim) for mesh_dim, p in enumerate(first.placements) if type(p) is Shard]
    if len(cut) != 1 or not all(p.is_replicate() or type(p) is Shard for p in first.placements):
        raise FlashRLError(f"{name}: its placement {first.placements} is not one that FSDP2 alone makes")
    [(mesh_dim, dim)] = cut
    mesh = first.device_mesh.mesh
    replicas = mesh.movedim(mesh_dim, 0).reshape(mesh.shape[mesh_dim], -1)
    return torch.cat([parts[rank].to_local() for rank in replicas[:, 0].tolist()], dim)
