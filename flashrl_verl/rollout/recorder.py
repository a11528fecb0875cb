# SPDX-License-Identifier: Apache-2.0
"""Watches vLLM's own loaders while they load an update, and writes the load plan from what they do.

vLLM's models load a whole bucket in one call, so nothing says which tensor a parameter's loader is given: the recorder hands
the tensors out one by one and compares addresses.
"""

from collections.abc import Callable, Iterator

import torch

from flashrl_verl.quantization.parameter import QuantizedStorage
from flashrl_verl.rollout.plan import LoadPlan, NamedTensors

LoadCallback = Callable[[str, QuantizedStorage, torch.Tensor, int, int], None]
"""(name, weight, source rows [n, K], first row in ``weight.rows``, first source column that is stored)."""


class LoadRecorder:
    """What ``parameter.observe_loads`` wants. ``written`` and ``plan`` grow with every shard until ``close``.

    Args:
        plan: written to.
        flag: [1] int32, raised by a shard with NaN or Inf.
        on_load: called after every shard.
    """

    def __init__(self, plan: LoadPlan, flag: torch.Tensor, on_load: LoadCallback):
        self.plan, self.flag, self._on_load = plan, flag, on_load
        self.written: dict[str, list[QuantizedStorage]] = {}
        """Name of each tensor that was quantized -> the parameters it went into."""
        self._unplanned: set[str] = set()
        self._closed = False
        self._current: tuple[str, torch.Tensor] | None = None
        self._bucket: NamedTensors = []
        self._counts: list[tuple[str, QuantizedStorage, int]] = []

    def watch(self, weights: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``weights``, noting which is being loaded."""
        self._bucket = weights
        for name, tensor in weights:
            self._current = (name, tensor)
            yield name, tensor

    def loaded(self, weight: QuantizedStorage, source: torch.Tensor, first_row: int, first_column: int) -> None:
        name, tensor = self._owner(source)
        if not self._closed:
            self.written.setdefault(name, []).append(weight)
            self._counts.append((name, weight, source.shape[0] * weight.data.shape[-1]))
            if not self.plan.record(name, tensor, weight, source, first_row, first_column):
                self._unplanned.add(name)
        self._on_load(name, weight, source, first_row, first_column)

    def release(self) -> None:
        """Forget the bucket: shared memory cannot be closed while a tensor in it is referred to."""
        self._current, self._bucket = None, []

    def close(self) -> None:
        """The first update is whole: the plan is final. Tensors it cannot hold are left to vLLM's loaders."""
        self._closed = True
        self.plan.forget(self._unplanned)

    def take_back(self, names: set[str]) -> None:
        """Uncount the shards of ``names``, which are going to be loaded again."""
        for name, weight, elements in self._counts:
            if name in names:
                weight.loaded_elements -= elements
        self._counts = [entry for entry in self._counts if entry[0] not in names]
        for name in names:
            self.written.pop(name, None)
        self.plan.forget(names)

    def _owner(self, source: torch.Tensor) -> tuple[str, torch.Tensor]:
        assert self._current is not None, "a shard was loaded outside `watch`"
        if _contains(self._current[1], source):
            return self._current
        # A model that looks ahead in its input; one that transforms a tensor first hands us memory that is in none of them.
        return next((pair for pair in self._bucket if _contains(pair[1], source)), self._current)


def _contains(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    start = tensor.data_ptr()
    return start <= view.data_ptr() < start + tensor.numel() * tensor.element_size()
