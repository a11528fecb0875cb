# SPDX-License-Identifier: Apache-2.0
"""The weight parameter that quantizes every BF16 shard while vLLM loads it.

vLLM's linear layers hand each checkpoint shard to ``Parameter.load_{column_parallel,merged_column,qkv,row_parallel}_weight``
(``vllm/model_executor/parameter.py``). Here those methods quantize straight into the int8 storage the GEMM reads, so the
first load and the thousandth weight update are the same operation, no address ever changes (CUDA graphs stay valid) and
nothing BF16 is kept.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from vllm.model_executor.parameter import ModelWeightParameter

from flashrl_verl.quantization import numerics
from flashrl_verl.quantization.kernels import quantize_rows_into

LoadObserver = Callable[["QuantizedWeight", torch.Tensor, int, int], None]
"""Called after each shard: (parameter, source rows [n, K] as loaded, first row in the storage, first source column)."""

_observers: list[LoadObserver] = []


@contextlib.contextmanager
def observe_loads(observer: LoadObserver) -> Iterator[None]:
    """Call ``observer`` after every shard that is quantized inside the ``with`` block (one process, one thread)."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


class QuantizedWeight(ModelWeightParameter):
    """Codes of one vLLM linear layer: ``data`` is [N, K] int8, its ``scales`` [N, 1] float32 (``layer.weight_scale``).

    N counts this rank's output rows of all fused projections together, K this rank's input columns.
    """

    def __init__(self, *, scales: torch.nn.Parameter, **kwargs):
        super().__init__(**kwargs)
        self.scales = scales
        self.loaded_elements = 0
        """Codes written since ``reset_account``; equals ``numel()`` when every shard arrived exactly once."""

    def reset_account(self) -> None:
        self.loaded_elements = 0

    def poison(self) -> None:
        """Overwrite the storage so that a row nobody writes cannot pass for a weight."""
        self.data.fill_(numerics.UNWRITTEN_CODE)
        self.scales.data.fill_(float("nan"))

    def load_column_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        rows = self.data.shape[0]
        self._require(loaded_weight, rows * self.tp_size, self.data.shape[1])
        self._quantize(loaded_weight.narrow(0, self.tp_rank * rows, rows), 0, 0)

    def load_merged_column_weight(self, loaded_weight: torch.Tensor, **kwargs) -> None:
        offset, rows = kwargs["shard_offset"], kwargs["shard_size"]
        self._require(loaded_weight, rows * self.tp_size, self.data.shape[1])
        self._quantize(loaded_weight.narrow(0, self.tp_rank * rows, rows), offset, 0)

    def load_qkv_weight(self, loaded_weight: torch.Tensor, **kwargs) -> None:
        offset, rows = kwargs["shard_offset"], kwargs["shard_size"]
        # With fewer KV heads than ranks, `num_heads` ranks hold the same K and V rows.
        replicas = 1 if kwargs["shard_id"] == "q" else kwargs["num_heads"]
        self._require(loaded_weight, rows * self.tp_size // replicas, self.data.shape[1])
        self._quantize(loaded_weight.narrow(0, self.tp_rank // replicas * rows, rows), offset, 0)

    def load_row_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        columns = self.data.shape[1]
        self._require(loaded_weight, self.data.shape[0], columns * self.tp_size)
        self._quantize(loaded_weight, 0, self.tp_rank * columns)

    def _require(self, loaded_weight: torch.Tensor, rows: int, columns: int) -> None:
        if tuple(loaded_weight.shape) != (rows, columns):
            raise ValueError(f"expected a shard of shape {(rows, columns)}, got {tuple(loaded_weight.shape)}")

    def _quantize(self, source: torch.Tensor, row_offset: int, column_offset: int) -> None:
        rows = source.shape[0]
        source = source.to(self.data.device, non_blocking=True)
        codes = self.data.narrow(0, row_offset, rows)
        quantize_rows_into(source, codes, self.scales.data.narrow(0, row_offset, rows), column_offset)
        self.loaded_elements += codes.numel()
        for observer in _observers:
            observer(self, source, row_offset, column_offset)
