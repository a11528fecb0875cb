# SPDX-License-Identifier: Apache-2.0
"""The load plan: which rows of which tensor become which rows of which quantized weight.

The first, careful update runs through vLLM's own loaders and records what they asked the parameters for. Every later update
carries it out directly: no name is matched against mappings again, which takes a 30B mixture of experts a second an update, and
shards that lie behind each other both in the bucket and in the storage (an expert's gate and up projections, all experts of a
layer) become one kernel launch.
"""

import dataclasses
from collections.abc import Callable

import torch

from flashrl_verl.quantization.kernels import quantize_rows_into
from flashrl_verl.quantization.parameter import QuantizedStorage

NamedTensors = list[tuple[str, torch.Tensor]]


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """Rows of one tensor of an update, and where they go."""

    weight: QuantizedStorage
    source_row: int
    rows: int
    first_row: int
    """In ``weight.rows``."""
    first_column: int
    """Of the source; the storage holds as many columns from there as it is wide."""

    def scales(self) -> torch.Tensor:
        """[rows, 1] float32, as stored."""
        return self.weight.row_range(self.first_row, self.rows)[1]


ShardCallback = Callable[[str, Shard, torch.Tensor], None]
"""(name, shard, source rows [n, K]), after the shard was quantized or is certain to be."""


class LoadPlan:
    """Shards by the name of the tensor they come from."""

    def __init__(self):
        self._shards: dict[str, list[Shard]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._shards

    def __len__(self) -> int:
        return len(self._shards)

    def shards(self, name: str) -> list[Shard]:
        return self._shards[name]

    def record(
        self, name: str, tensor: torch.Tensor, weight: QuantizedStorage, source: torch.Tensor, first_row: int, column: int
    ) -> bool:
        """Note that ``source``, as vLLM's loader passed it, became rows ``first_row`` and following of ``weight``.

        Returns:
            Whether ``source`` is a range of rows of ``tensor``; if it is not (a model that transforms its tensors first),
            nothing is noted, and vLLM's loader has to be asked every time.
        """
        if (
            tensor.dim() != 2
            or not tensor.is_contiguous()
            or source.stride() != tensor.stride()
            or source.shape[1] != tensor.shape[1]
        ):
            return False
        row, rest = divmod(source.data_ptr() - tensor.data_ptr(), tensor.shape[1] * tensor.element_size())
        if rest or not 0 <= row <= tensor.shape[0] - source.shape[0] or source.dtype != tensor.dtype:
            return False
        self._shards.setdefault(name, []).append(Shard(weight, row, source.shape[0], first_row, column))
        return True

    def forget(self, names: set[str]) -> None:
        """Drop what was recorded for ``names``."""
        for name in names:
            self._shards.pop(name, None)

    def run(self, weights: NamedTensors, flag: torch.Tensor, on_shard: ShardCallback) -> None:
        """Quantize the shards of ``weights``, all of which are in the plan, in as few launches as their places allow.

        Args:
            weights: (name, contiguous [N, K] tensor) pairs of recorded shapes.
            flag: [1] int32, set to 1 when a tensor holds NaN or Inf.
            on_shard: called for every shard.
        """
        pending = _Launch()
        for name, tensor in weights:
            for shard in self._shards[name]:
                if not pending.extend(tensor, shard):
                    pending.launch(flag)
                    pending = _Launch()
                    pending.extend(tensor, shard)
                on_shard(name, shard, tensor)
        pending.launch(flag)


class _Launch:
    """Shards that one kernel can take: adjacent in memory on both sides."""

    def __init__(self):
        self._tensor: torch.Tensor | None = None
        self._rows = 0

    def extend(self, tensor: torch.Tensor, shard: Shard) -> bool:
        start = tensor.data_ptr() + shard.source_row * tensor.shape[1] * tensor.element_size()
        if self._tensor is None:
            self._tensor, self._shard, self._storage = tensor, shard, None
            self._end, self._row_bytes = start, tensor.shape[1] * tensor.element_size()
        else:
            first = self._shard
            if (
                start != self._end
                or shard.weight is not first.weight
                or shard.first_row != first.first_row + self._rows
                or shard.first_column != first.first_column
                or tensor.dtype != self._tensor.dtype
                or tensor.shape[1] != self._tensor.shape[1]
                # Adjacent by accident, as neighbours of an allocator: one view cannot span two storages.
                or tensor.untyped_storage().data_ptr() != self._tensor.untyped_storage().data_ptr()
            ):
                return False
        self._rows += shard.rows
        self._end += shard.rows * self._row_bytes
        return True

    def launch(self, flag: torch.Tensor) -> None:
        if self._tensor is None:
            return
        tensor, shard, weight = self._tensor, self._shard, self._shard.weight
        k = tensor.shape[1]
        if self._rows == tensor.shape[0]:
            source = tensor
        else:
            source = tensor.as_strided((self._rows, k), (k, 1), tensor.storage_offset() + shard.source_row * k)
        source = source.to(weight.data.device, non_blocking=True)
        codes, scales = weight.row_range(shard.first_row, self._rows)
        quantize_rows_into(source, codes, scales, weight.format, shard.first_column, flag)
        weight.loaded_elements += codes.numel()
