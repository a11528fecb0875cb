# SPDX-License-Identifier: Apache-2.0
"""The load plan: which rows of which tensor of an update become which rows of which parameter.

The first, careful update runs through vLLM's own loaders and records what they did (``first_load.py``). Every later update
carries it out directly (``bucket_program.py``): no name is matched against mappings again, and no model is walked (a call of
``load_weights`` costs milliseconds, whatever it loads).
"""

import dataclasses
from collections.abc import Callable

import torch

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

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        """[rows, K] of the tensor."""
        return tensor.narrow(0, self.source_row, self.rows)

    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [rows, K_local] and their scales, float32 (``QuantizedStorage.row_range``)."""
        return self.weight.row_range(self.first_row, self.rows)


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """Rows of an unquantized parameter that are a copy of rows of one tensor of an update."""

    parameter: torch.nn.Parameter
    first_row: int
    rows: int
    source_row: int
    padding: int = 0
    """Rows after them that the loader sets to zero: vLLM pads vocabularies."""

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        """[rows, ...] of the tensor."""
        return tensor.narrow(0, self.source_row, self.rows)

    def destination(self) -> torch.Tensor:
        """[rows, ...] of the parameter."""
        return self.parameter.data.narrow(0, self.first_row, self.rows)

    def pad(self) -> None:
        """Set the padding, if there is any, to zero: sleep level 2 throws it away with the rest."""
        if self.padding:
            self.parameter.data.narrow(0, self.first_row + self.rows, self.padding).zero_()


class LoadPlan:
    """Shards and copies by the name of the tensor they come from."""

    def __init__(self):
        self._shards: dict[str, list[Shard]] = {}
        self.copies: dict[str, Copy] = {}
        """Tensors that become a copy, by name."""
        self.left_alone: set[str] = set()
        """Tensors that become nothing."""

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


_DIGIT = 128
"""Base in which a probe writes row numbers: every integer up to 256 is a BF16 value."""


def find_copy(parameter: torch.nn.Parameter, tensor: torch.Tensor, load: Callable[[torch.Tensor], object]) -> Copy | None:
    """Find out which rows of an unquantized parameter a loader fills with which rows of a tensor of another shape.

    Row numbers, from 1, are loaded instead of the tensor, digit by digit, and read back: the values of weights could not tell
    (a bias that is still zero lies everywhere). Biases of fused projections, and under tensor parallelism vectors and
    embeddings, are such tensors.

    Args:
        parameter: its contents are restored, and the tensor's rows loaded.
        tensor: [R, ...] floating point.
        load: the model's loader of such a tensor.

    Returns:
        The copy; None when the rows do not lie behind each other, or the loader does something else than copying.
    """
    if parameter.shape[1:] != tensor.shape[1:]:
        return None
    kept = parameter.data.clone()
    rows = torch.arange(1, tensor.shape[0] + 1, device=tensor.device)
    found = torch.zeros(parameter.shape[0], dtype=torch.int64, device=parameter.device)
    weight = 1
    try:
        while weight <= tensor.shape[0]:
            parameter.data.fill_(float("nan"))
            digit = rows // weight % _DIGIT
            load(digit.to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1)).expand_as(tensor))  # takes no memory
            read = parameter.data.flatten(1)[:, 0] if parameter.dim() > 1 else parameter.data
            found += torch.where(read.isnan(), torch.full_like(found, -1), read.nan_to_num().long() * weight)
            weight *= _DIGIT
    finally:
        parameter.data.copy_(kept)
    load(tensor)
    filled = (found >= 0).nonzero().flatten().tolist()
    if not filled or filled != list(range(filled[0], filled[-1] + 1)):
        return None
    sources = [number - 1 for number in found[filled[0] : filled[-1] + 1].tolist()]
    count = next((i for i, source in enumerate(sources) if source != sources[0] + i), len(sources))
    padding = len(sources) - count
    if sources[0] < 0 or sources[0] + count > tensor.shape[0]:
        return None
    if any(source != -1 for source in sources[count:]) or parameter.data.narrow(0, filled[0] + count, padding).any():
        return None
    return Copy(parameter, filled[0], count, sources[0], padding)
