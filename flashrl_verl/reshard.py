# SPDX-License-Identifier: Apache-2.0
"""One tensor of a checkpoint, cut as this run cuts it: DTensors in, a DTensor out, no communication.

FSDP2 cuts every parameter, and with it the optimizer's moments, along one dimension over one dimension of its mesh, as
``torch.chunk`` does; other dimensions of the mesh (hybrid sharding) hold copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from flashrl_verl.errors import FlashRLError


def reshard(parts: Sequence[Any], like: Any, name: str) -> Any:
    """One value of a state, cut as ``like`` is cut.

    Args:
        parts: the value on every earlier rank: DTensors with the same placements, or the same plain value everywhere.
        like: this run's value of that place.
        name: for the error.

    Returns:
        A DTensor with ``like``'s mesh and placements and ``parts``' dtype, on ``like``'s device; a plain value as it is.

    Raises:
        FlashRLError: the shapes differ, one side is not cut as FSDP2 cuts, or a plain value differs between ranks.
    """
    first = parts[0]
    if not isinstance(first, DTensor):  # Adam's step counts
        if not all(_same(part, first) for part in parts[1:]):
            raise FlashRLError(f"{name}: it is not cut by FSDP2 and differs between ranks, so it cannot be cut anew")
        return first.clone() if isinstance(first, torch.Tensor) else first  # no view of the mapped file
    if not isinstance(like, DTensor):
        raise FlashRLError(f"{name}: cut by FSDP2 in the checkpoint, and a {type(like).__name__} here")
    if first.shape != like.shape:
        raise FlashRLError(f"{name}: {tuple(first.shape)} in the checkpoint, {tuple(like.shape)} in the model")
    (old_mesh_dim, old_dim), (mesh_dim, dim) = cut_of(first.placements, name), cut_of(like.placements, name)
    if old_dim != dim:
        raise FlashRLError(f"{name}: cut along dimension {old_dim} in the checkpoint, along {dim} in the model")
    mesh, local = like.device_mesh, like.to_local()
    start, length = own_rows(like.shape[dim], mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim))
    assert length == local.shape[dim], f"{name}: FSDP2 gave this rank {local.shape[dim]} rows, not {length}"
    holders = one_replica(first.device_mesh, old_mesh_dim)
    mine = _rows([parts[rank] for rank in holders], dim, start, length)
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
        FlashRLError: it is cut in a way that FSDP2 alone does not make, or ranks differ in what each has whole.
    """
    first = parts[0]
    if not isinstance(first, DTensor):
        if not all(_same(part, first) for part in parts[1:]):
            raise FlashRLError(f"{name}: it is not cut by FSDP2 and differs between ranks, so no rank's is the tensor")
        return first
    mesh_dim, dim = cut_of(first.placements, name)
    pieces = [parts[rank] for rank in one_replica(first.device_mesh, mesh_dim)]
    return _rows(pieces, dim, 0, first.shape[dim])


def same_cut(one: DTensor, other: DTensor) -> bool:
    """Whether the same rank holds the same rows of two tensors of one shape."""
    return one.placements == other.placements and torch.equal(one.device_mesh.mesh, other.device_mesh.mesh)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return one == other


def cut_of(placements: Iterable[Any], name: str) -> tuple[int, int]:
    """The mesh dimension that a tensor is cut over, and its own dimension that is cut.

    Raises:
        FlashRLError: it is cut twice or not at all, or partial.
    """
    placements = tuple(placements)
    cut = [(i, p.dim) for i, p in enumerate(placements) if type(p) is Shard]
    if len(cut) != 1 or not all(p.is_replicate() or type(p) is Shard for p in placements):
        raise FlashRLError(f"{name}: its placement {placements} is not one that FSDP2 alone makes, and is not cut anew")
    return cut[0]


def own_rows(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """First row and number of rows of a rank, cut as ``torch.chunk`` does and FSDP2 with it: the last ranks may have none."""
    chunk = -(-rows // ranks)
    start = min(rank * chunk, rows)
    return start, min(chunk, rows - start)


def one_replica(mesh: DeviceMesh, mesh_dim: int) -> tuple[int, ...]:
    """The ranks along the mesh dimension that cuts, in order: with hybrid sharding those of the first replica alone."""
    lines = mesh.mesh.movedim(mesh_dim, 0).reshape(mesh.mesh.shape[mesh_dim], -1)
    return tuple(lines[:, 0].tolist())


def _rows(pieces: Sequence[DTensor], dim: int, start: int, length: int) -> torch.Tensor:
    """Rows ``start`` to ``start + length`` along ``dim`` of the tensor that ``pieces`` are.

    Only the pieces that hold them are touched: there are as many pieces as ranks, for each of thousands of values.
    """
    rows = pieces[0].shape[dim]
    if length == 0:
        return pieces[0].to_local().narrow(dim, 0, 0).clone()
    chunk = -(-rows // len(pieces))
    taken = []
    for rank in range(start // chunk, (start + length - 1) // chunk + 1):
        (at, size), piece = own_rows(rows, len(pieces), rank), pieces[rank].to_local()
        assert piece.shape[dim] == size, f"rank {rank} saved {piece.shape[dim]} rows, not {size}"
        low, high = max(start, at), min(start + length, at + size)
        taken.append(piece.narrow(dim, low - at, high - low))
    return torch.cat(taken, dim)
