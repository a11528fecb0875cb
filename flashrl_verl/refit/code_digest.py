# SPDX-License-Identifier: Apache-2.0
"""Whether trainer and engines compute with the same codes: a digest of a quantized weight that adds up over its parts.

An engine's worker holds parts of a checkpoint's weight, by tensor parallelism and inside fused layers; the trainer
computes with the whole of it (``trainer/forward_8bit.py``).
"""

from collections.abc import Iterable, Sequence

import torch

from flashrl_verl.errors import RefitError, listed
from flashrl_verl.quantization.numerics import as_bytes

_PERIOD = 8191
"""A prime that divides no layer's width: rows or columns that changed places differ."""
_SCALE = 8209
"""Weight of a row's scale beside its codes; a prime."""
_CHUNK = 1 << 22
"""Codes at a time: as int64 they take eight times the memory."""


def code_digest(codes: torch.Tensor, scales: torch.Tensor, row: int = 0, column: int = 0) -> torch.Tensor:
    """``sum_r (1 + r mod 8191) (sum_c (1 + c mod 8191) code[r, c] + 8209 scale[r])``, codes and scales as the integers
    that their bits are, modulo 2^64.

    Args:
        codes: [n, k], a part of the weight's codes.
        scales: [n, 1] float32 of its rows. They count in the part that has column 0.
        row: of the weight, where the part begins.
        column: likewise.

    Returns:
        int64 on the codes' device.
    """
    count, width = codes.shape
    factors = 1 + (torch.arange(column, column + width, device=codes.device) % _PERIOD)
    total = torch.zeros((), dtype=torch.int64, device=codes.device)
    step = max(1, _CHUNK // max(1, width))
    for first in range(0, count, step):
        part = as_bytes(codes[first : first + step]).to(torch.int64)
        of_rows = (part * factors).sum(1)
        if column == 0:
            of_rows += _SCALE * scales[first : first + step, 0].view(torch.int32).to(torch.int64)
        rows = torch.arange(row + first, row + first + len(part), device=codes.device)
        total += (of_rows * (1 + rows % _PERIOD)).sum()
    return total


Digests = Sequence[tuple[str, int, int, int]]
"""Of an engine's worker: name, row and column of a part, and its digest."""


def require_same_codes(trainer: Iterable[dict[str, int]], engines: Iterable[Iterable[Digests]], step: int) -> int:
    """Compare what the trainer's ranks computed with, and what the engines hold.

    Args:
        trainer: of every rank, ``noted_codes``.
        engines: of every replica its workers' digests. Replicas without quantized weights are left out.
        step: the trainer's global step.

    Returns:
        The number of weights compared, of all ranks and replicas.

    Raises:
        RefitError: they differ, or there is nothing to compare.
    """
    compared, trainer = 0, list(trainer)
    for replica, workers in enumerate(engines):
        # Ranks hold the same part where there are fewer KV heads than ranks.
        parts = {part[:3]: part[3] for digests in workers for part in map(tuple, digests)}
        held: dict[str, int] = {}
        for (name, _, _), digest in parts.items():
            held[name] = (held.get(name, 0) + digest) % 2**64
        for rank, noted in enumerate(trainer if held else ()):
            computed = {name: digest % 2**64 for name, digest in noted.items()}
            if wrong := [name for name in {**held, **computed} if held.get(name) != computed.get(name)]:
                raise RefitError(
                    f"step {step}: rank {rank} of the trainer and rollout replica {replica} compute with different "
                    f"8-bit codes of {len(wrong)} of {len(held)} weights: {listed(wrong)}. Set "
                    "flashrl.trainer_forward=bf16"
                )
            compared += len(held)
    if not compared:
        raise RefitError(f"step {step}: no quantized weight of the rollout is one of the trainer's 8-bit forward pass")
    return compared
