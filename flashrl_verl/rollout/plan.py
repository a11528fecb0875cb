# SPDX-License-Identifier: Apache-2.0
"""The load plan: which rows of which tensor of an update become which rows of which parameter.

The first, careful update runs through vLLM's own loaders and records what they did. Every later update carries it out directly:
no name is matched against mappings again, no model is walked (a call of ``load_weights`` costs milliseconds, whatever it
loads), and shards that lie behind each other both in the bucket and in the storage (an expert's gate and up projections, all
experts of a layer) become one kernel launch.
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


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """Rows of an unquantized parameter that are a copy of rows of one tensor of an update."""

    parameter: torch.nn.Parameter
    first_row: int
    rows: int
    source_row: int
    padding: int = 0
    """Rows after them that the loader sets to zero: vLLM pads vocabularies."""

    def destination(self) -> torch.Tensor:
        return self.parameter.data.narrow(0, self.first_row, self.rows)

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.narrow(0, self.source_row, self.rows)


ShardCallback = Callable[[str, Shard, torch.Tensor], None]
"""(name, shard, source rows [n, K]), after the shard was quantized or is certain to be."""


class LoadPlan:
    """Shards and copies by the name of the tensor they come from."""

    def __init__(self):
        self._shards: dict[str, list[Shard]] = {}
        self.copies: dict[str, Copy] = {}
        """Tensors that become a copy, by name."""

    def quantizes(self, name: str) -> bool:
        return name in self._shards

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
        """Quantize the shards of ``weights``, all of which the plan ``quantizes``, in as few launches as their places allow.

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

    def run_copies(self, weights: NamedTensors) -> None:
        """Copy ``weights``, all of which are in ``copies``, into their parameters: one kernel for many small ones."""
        destinations, sources = [], []
        for name, tensor in weights:
            copy = self.copies[name]
            if tensor.nbytes > _FUSED_COPY_BYTES:
                copy.destination().copy_(copy.source(tensor), non_blocking=True)
            else:
                destinations.append(copy.destination())
                sources.append(copy.source(tensor))
            if copy.padding:  # sleep level 2 throws it away too
                copy.parameter.data.narrow(0, copy.first_row + copy.rows, copy.padding).zero_()
        if destinations:
            torch._foreach_copy_(destinations, sources, non_blocking=True)


_FUSED_COPY_BYTES = 1 << 20
"""Tensors up to this size are copied by one kernel together; it is half as fast as a plain copy for large ones."""

_PROBE_BYTES = 512 << 20
"""Largest tensor that ``find_copy`` takes: it makes several of its size."""

_DIGIT = 128
"""Base in which a probe writes row numbers: every integer up to 256 is a BF16 value."""


def find_copy(parameter: torch.nn.Parameter, tensor: torch.Tensor, load: Callable[[torch.Tensor], object]) -> Copy | None:
    """Find out which rows of an unquantized parameter a loader fills with which rows of a tensor of another shape.

    Row numbers are loaded instead of the tensor, digit by digit, and read back: the values of weights could not tell (a bias
    that is still zero lies everywhere). Biases of fused projections and tensor-parallel slices of vectors are such tensors.

    Args:
        parameter: its contents are restored, and the tensor's rows loaded.
        tensor: [R, ...] floating point.
        load: the model's loader of such a tensor.

    Returns:
        The copy; None when the rows do not lie behind each other, or the tensor is too large to try.
    """
    if parameter.shape[1:] != tensor.shape[1:] or tensor.nbytes > _PROBE_BYTES:
        return None
    kept = parameter.data.clone()
    rows = torch.arange(tensor.shape[0], device=tensor.device)
    found = torch.zeros(parameter.shape[0], dtype=torch.int64, device=parameter.device)
    weight = 1
    try:
        while weight <= tensor.shape[0]:
            parameter.data.fill_(float("nan"))
            digit = rows // weight % _DIGIT
            load(digit.to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1)).expand_as(tensor).contiguous())
            read = parameter.data.flatten(1)[:, 0] if parameter.dim() > 1 else parameter.data
            found += torch.where(read.isnan(), torch.full_like(found, -1), read.nan_to_num().long() * weight)
            weight *= _DIGIT
    finally:
        parameter.data.copy_(kept)
    load(tensor)
    filled = (found >= 0).nonzero().flatten().tolist()
    if not filled or filled != list(range(filled[0], filled[-1] + 1)):
        return None
    sources = found[filled[0] : filled[-1] + 1].tolist()
    count = next((i for i, source in enumerate(sources) if source != sources[0] + i), len(sources))
    padding = len(sources) - count
    # Zeros read back as row 0 of the tensor.
    if any(sources[count:]) or parameter.data.narrow(0, filled[0] + count, padding).any():
        return None
    return Copy(parameter, filled[0], count, sources[0], padding)


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
        if self._rows == tensor.shape[0] and shard.source_row == 0:
            source = tensor
        else:
            source = tensor.as_strided((self._rows, k), (k, 1), tensor.storage_offset() + shard.source_row * k)
        source = source.to(weight.data.device, non_blocking=True)
        codes, scales = weight.row_range(shard.first_row, self._rows)
        quantize_rows_into(source, codes, scales, weight.format, shard.first_column, flag)
        weight.loaded_elements += codes.numel()
