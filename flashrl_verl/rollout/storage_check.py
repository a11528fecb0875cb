# SPDX-License-Identifier: Apache-2.0
"""What the engine's storage must hold after an update, for a sample of its tensors, recomputed from what arrived.

A quantized weight must hold the codes ``numerics`` gives for the rows that arrived, whichever kernel wrote them; an unquantized
parameter must be a copy. Everything is compared at the end of the update, after all loads and vLLM's post-processing. Of a
format with blocks, a row of blocks is sampled: its scales, computed while all its rows are there, and codes of some rows of it.
"""

import dataclasses
import zlib

import torch

from flashrl_verl.quantization import numerics
from flashrl_verl.quantization.parameter import QuantizedStorage
from flashrl_verl.rollout.plan import Copy
from flashrl_verl.rollout.receipt import checksum, gather

_SPOT_ROWS = 2
"""Rows of each sampled quantized tensor that are compared."""

_METERED_WEIGHTS = 16
"""Quantized weights whose codes are compared with those of the update before."""

_METERED_ROWS = 4
"""Rows of each of them."""


@dataclasses.dataclass
class _Spot:
    name: str
    weight: QuantizedStorage
    row: int
    column: int
    source: torch.Tensor
    scales: torch.Tensor | None
    """[1, K / B] of the row of blocks that the rows lie in, for a format with blocks."""


@dataclasses.dataclass
class _Expected:
    name: str
    copy: Copy
    sum: torch.Tensor


class StorageCheck:
    """Collects expectations while an update is loaded; ``wrong_codes`` and ``stale_copies`` say which were not met."""

    def __init__(self, step: int):
        self._step = step
        self._spots: list[_Spot] = []
        self._copies: list[_Expected] = []
        self._row_names: list[str] = []
        self._rows_differ = self._copies_differ = torch.empty(0, dtype=torch.bool)

    def expect_codes(
        self, name: str, weight: QuantizedStorage, source: torch.Tensor, first_row: int, first_column: int
    ) -> None:
        """Remember some rows of ``source`` [n, K], which became rows ``first_row`` and following of ``weight``."""
        # Other rows every step.
        first, scales = zlib.crc32(f"{name} {self._step}".encode()), None
        fmt = weight.format
        if fmt.block is not None:
            start = first % (source.shape[0] // fmt.block) * fmt.block
            source, first_row = source.narrow(0, start, fmt.block), first_row + start
            scales = numerics.block_scales(source.narrow(1, first_column, weight.data.shape[-1]), fmt)
        n = min(_SPOT_ROWS, source.shape[0])
        first %= source.shape[0] - n + 1
        rows = source.narrow(0, first, n).clone()
        self._spots.append(_Spot(name, weight, first_row + first, first_column, rows, scales))

    def expect_copy(self, name: str, tensor: torch.Tensor, copy: Copy) -> None:
        """Remember rows of an unquantized parameter that must end up as a copy of rows of ``tensor``."""
        self._copies.append(_Expected(name, copy, checksum(copy.source(tensor).to(copy.parameter.dtype))))

    def compare(self) -> None:
        """Enqueue the comparisons, all of them, behind the loading: nothing waits."""
        groups: dict[tuple, list[_Spot]] = {}
        for spot in self._spots:
            key = (spot.weight.format.name, spot.source.dtype, spot.source.shape[1], spot.column, spot.weight.data.shape[-1])
            groups.setdefault(key, []).append(spot)
        rows_differ = [_differing_rows(spots, key[-2], key[-1]) for key, spots in groups.items()]
        self._row_names = [s.name for spots in groups.values() for s in spots for _ in range(len(s.source))]
        if rows_differ:
            self._rows_differ = torch.cat(rows_differ)
        self._copies_differ = gather([checksum(expected.copy.destination()) != expected.sum for expected in self._copies])

    def wrong_codes(self) -> list[str]:
        """Names of the tensors whose sampled rows are stored as something else, after ``compare`` (synchronizes)."""
        flags = zip(self._row_names, self._rows_differ.tolist(), strict=True)
        return list(dict.fromkeys(name for name, bad in flags if bad))

    def stale_copies(self) -> list[str]:
        """Names of the tensors that an unquantized parameter is no copy of, after ``compare`` (synchronizes)."""
        return [expected.name for expected, bad in zip(self._copies, self._copies_differ.tolist(), strict=True) if bad]


def _differing_rows(spots: list[_Spot], column: int, width: int) -> torch.Tensor:
    """Whether codes or scale of each row of spots of one geometry are not stored as they have to be: [rows] bool."""
    fmt = spots[0].weight.format
    rows = torch.cat([s.source for s in spots])
    local = rows.narrow(1, column, width)
    scales = numerics.row_scales(rows, fmt) if fmt.block is None else torch.cat([s.scales for s in spots])
    codes, _ = numerics.quantize_rows(local, fmt, numerics.spread(scales, local.shape))
    stored = torch.cat([s.weight.rows.narrow(0, s.row, len(s.source)) for s in spots])
    step = fmt.rows_per_scale
    stored_scales = torch.cat([s.weight.scale_rows.narrow(0, s.row // step, -(-len(s.source) // step)) for s in spots])
    scales_differ = (scales != stored_scales).any(1).repeat_interleave(len(rows) // len(scales))
    return (numerics.as_bytes(codes) != numerics.as_bytes(stored)).any(1) | scales_differ


class CodeChangeMeter:
    """Share of codes that an update changed, over the same sampled rows every time.

    At a learning rate below the quantization step the policy that samples stands still although the trainer's moves: the
    share says so.
    """

    def __init__(self, weights: list[QuantizedStorage]):
        stride = max(1, len(weights) // _METERED_WEIGHTS)
        self._rows = []
        for weight in weights[::stride]:
            count = weight.rows.shape[0]
            rows = torch.arange(0, count, max(1, count // _METERED_ROWS), device=weight.data.device)[:_METERED_ROWS]
            self._rows.append((weight, rows))
        self._last: torch.Tensor | None = None

    def measure(self) -> torch.Tensor | None:
        """Return the share since the last call: [] float32, 0 to 1, no synchronization; None at the first."""
        if not self._rows:
            return None
        # Bytes: index_select knows no FP8 dtypes.
        now = torch.cat([numerics.as_bytes(weight.rows).index_select(0, rows).flatten() for weight, rows in self._rows])
        last, self._last = self._last, now
        return None if last is None else (now != last).float().mean()
