# SPDX-License-Identifier: Apache-2.0
"""Which tensor of an update becomes which rows of which quantized weight, and whether it was finite.

vLLM's models load a whole bucket in one call, so nothing says which tensor a parameter's loader is given: the recorder hands
the tensors out one by one and compares addresses.
"""

from collections.abc import Callable, Iterator

import torch

from flashrl_verl.quantization.parameter import QuantizedStorage

NamedTensors = list[tuple[str, torch.Tensor]]

ShardCallback = Callable[[str, QuantizedStorage, torch.Tensor, int, int], None]
"""(name, weight, source rows [n, K], first row in ``weight.rows``, first source column that is stored)."""

_SLOTS = 4096
"""Flags allocated at a time; a 30B mixture of experts has 18 thousand quantized tensors."""


class UpdateRecorder:
    """A ``LoadRecorder`` for one update. One copy to the host per update: ``non_finite``."""

    def __init__(self, device: torch.device):
        self._device = device
        self._flags: list[torch.Tensor] = []
        self._slots: list[torch.Tensor] = []
        self.begin(lambda *_: None)

    def begin(self, on_shard: ShardCallback) -> None:
        """Forget the last update; ``on_shard`` is called after each quantized shard of the next."""
        for flags in self._flags:
            flags.zero_()
        self._on_shard = on_shard
        self._names: list[str] = []
        self._current: tuple[str, torch.Tensor] | None = None
        self.written: dict[str, list[QuantizedStorage]] = {}
        """Name of each tensor that was quantized -> the parameters it went into."""
        self._counts: list[tuple[str, QuantizedStorage, int]] = []

    def watch(self, weights: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``weights``, noting which is being loaded."""
        for name, tensor in weights:
            self._current = (name, tensor)
            self._bucket = weights
            yield name, tensor
        self._current = None

    def flag(self, source: torch.Tensor) -> torch.Tensor:
        slot = len(self._names)
        self._names.append(self._owner(source))
        if slot == len(self._slots):
            self._flags.append(torch.zeros(_SLOTS, dtype=torch.int32, device=self._device))
            self._slots.extend(self._flags[-1].split(1))
        return self._slots[slot]

    def loaded(self, weight: QuantizedStorage, source: torch.Tensor, first_row: int, first_column: int) -> None:
        name = self._names[-1]  # `flag` was called for this source just before
        self.written.setdefault(name, []).append(weight)
        self._counts.append((name, weight, source.shape[0] * weight.data.shape[-1]))
        self._on_shard(name, weight, source, first_row, first_column)

    def take_back(self, names: set[str]) -> None:
        """Uncount the shards of ``names``, which are going to be loaded again."""
        kept = []
        for name, weight, elements in self._counts:
            if name in names:
                weight.loaded_elements -= elements
                self.written.pop(name, None)
            else:
                kept.append((name, weight, elements))
        self._counts = kept

    def non_finite(self) -> list[str]:
        """Names of the quantized tensors that held NaN or Inf (synchronizes)."""
        if not self._names:
            return []
        raised = torch.cat(self._flags)[: len(self._names)].nonzero().flatten().tolist()
        return list(dict.fromkeys(self._names[slot] for slot in raised))

    def _owner(self, source: torch.Tensor) -> str:
        assert self._current is not None, "a shard was loaded outside `watch`"
        if _contains(self._current[1], source):
            return self._current[0]
        # A model that looks ahead in its input; one that transforms a tensor first hands us memory that is in none of them.
        return next((name for name, tensor in self._bucket if _contains(tensor, source)), self._current[0])


def _contains(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    start = tensor.data_ptr()
    return start <= view.data_ptr() < start + tensor.numel() * tensor.element_size()
