# SPDX-License-Identifier: Apache-2.0
"""The weight parameters that quantize every BF16 shard while vLLM loads it.

vLLM's linear layers hand each checkpoint shard to ``Parameter.load_{column_parallel,merged_column,qkv,row_parallel}_weight``
(``vllm/model_executor/parameter.py``), and its fused experts to ``Parameter.weight_loader``. Here those methods quantize
straight into the storage the GEMM reads, so the first load and the thousandth weight update are the same operation, no address
ever changes (CUDA graphs stay valid) and nothing BF16 is kept.
"""

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch
from vllm.model_executor.parameter import ModelWeightParameter

from flashrl_verl.quantization.kernels import quantize_into
from flashrl_verl.quantization.numerics import WeightFormat, as_bytes, storage_kind


class LoadObserver(Protocol):
    """Watches the shards that are quantized while it is active (``observe_loads``)."""

    flag: torch.Tensor
    """[1] int32, set to 1 by a shard that holds NaN or Inf."""

    def loaded(self, weight: "QuantizedStorage", source: torch.Tensor, first_row: int, first_column: int) -> None:
        """Called after ``source`` [n, K] became rows ``first_row : first_row + n`` of ``weight.rows``; the storage holds
        columns ``first_column`` and following of it."""


_observers: list[LoadObserver] = []


@contextlib.contextmanager
def observe_loads(observer: LoadObserver) -> Iterator[None]:
    """Tell ``observer`` of every shard quantized inside the ``with`` block (one process, one thread, not nested)."""
    assert not _observers, "loads are observed already"
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.clear()


class QuantizedStorage:
    """What both parameters share: codes in ``data``, scales beside them, and an account of what was written.

    Seen as a matrix (``rows``, ``scale_rows``), the storage is [R, K] codes and [R, 1] float32 scales (with blocks of B:
    [R / B, K / B]), where R counts this rank's output rows of all fused projections (and experts) together and K this rank's
    input columns.
    """

    data: torch.Tensor
    scales: torch.nn.Parameter
    format: WeightFormat
    loaded_elements: int
    """Codes written since ``reset_account``; equals ``numel()`` when every shard arrived exactly once."""
    _views: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]

    def _set_up(self, scales: torch.nn.Parameter, format: WeightFormat) -> None:
        self.scales, self.format, self.loaded_elements, self._views = scales, format, 0, {}

    @property
    def rows(self) -> torch.Tensor:
        return self.data.view(-1, self.data.shape[-1])

    @property
    def scale_rows(self) -> torch.Tensor:
        return self.scales.data.view(-1, self.scales.shape[-1])

    @property
    def kind(self) -> str:
        """Dtype of the codes, and the rows and columns that share a scale: read off the tensors, not off the format."""
        rows, columns = (whole // scales for whole, scales in zip(self.data.shape[-2:], self.scales.shape[-2:], strict=True))
        one_a_row = rows == 1 and self.scales.shape[-1] == 1
        return storage_kind(self.data.dtype, rows, None if one_a_row else columns)

    def reset_account(self) -> None:
        self.loaded_elements = 0

    def poison(self) -> None:
        """Overwrite the storage so that a row nobody writes cannot pass for a weight."""
        as_bytes(self.data).fill_(self.format.unwritten)
        self.scales.data.fill_(float("nan"))

    def unwritten(self) -> torch.Tensor:
        """Whether a poisoned element is left: [] bool, no synchronization."""
        return (as_bytes(self.data) == self.format.unwritten).any()

    def _require(self, loaded_weight: torch.Tensor, rows: int, columns: int) -> None:
        if tuple(loaded_weight.shape) != (rows, columns):
            raise ValueError(f"expected a shard of shape {(rows, columns)}, got {tuple(loaded_weight.shape)}")

    def row_range(self, first_row: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [rows, K] and their scales: [rows, 1], or with blocks, which both numbers must be whole ones of,
        [rows / B, K / B]. The views are kept: every update asks for the same ones, and storage that moves in between stops
        the run (``WeightRefit``)."""
        views = self._views.get((first_row, rows))
        if views is None:
            step = self.format.rows_per_scale
            if first_row % step or rows % step:
                raise ValueError(f"rows {first_row} to {first_row + rows} are not whole blocks of {step}")
            views = self.rows.narrow(0, first_row, rows), self.scale_rows.narrow(0, first_row // step, rows // step)
            self._views[first_row, rows] = views
        return views

    def _quantize(self, source: torch.Tensor, first_row: int, first_column: int) -> None:
        observer = _observers[0] if _observers else None
        codes, scales = self.row_range(first_row, source.shape[0])
        flag = None if observer is None else observer.flag
        quantize_into(source.to(self.data.device, non_blocking=True), codes, scales, self.format, first_column, flag)
        self.loaded_elements += codes.numel()
        if observer is not None:
            observer.loaded(self, source, first_row, first_column)


class QuantizedWeight(QuantizedStorage, ModelWeightParameter):
    """Codes of one vLLM linear layer: ``data`` is [N, K], its ``scales`` [N, 1] float32 (``layer.weight_scale``), with
    blocks [N / B, K / B]."""

    def __init__(self, *, scales: torch.nn.Parameter, format: WeightFormat, **kwargs):
        super().__init__(**kwargs)
        self._set_up(scales, format)

    def load_column_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        """Args: loaded_weight [N x tp_size, K] floating point. Raises ValueError for another shape, as all of these do."""
        rows = self.data.shape[0]
        self._require(loaded_weight, rows * self.tp_size, self.data.shape[1])
        self._quantize(loaded_weight.narrow(0, self.tp_rank * rows, rows), 0, 0)

    def load_merged_column_weight(self, loaded_weight: torch.Tensor, **kwargs) -> None:
        """Args: loaded_weight [shard_size x tp_size, K] of one projection, which starts at row ``shard_offset`` of ``data``."""
        offset, rows = kwargs["shard_offset"], kwargs["shard_size"]
        self._require(loaded_weight, rows * self.tp_size, self.data.shape[1])
        self._quantize(loaded_weight.narrow(0, self.tp_rank * rows, rows), offset, 0)

    def load_qkv_weight(self, loaded_weight: torch.Tensor, **kwargs) -> None:
        """Args: loaded_weight [rows of all heads, K] of ``shard_id`` q, k or v; the rest as above."""
        offset, rows = kwargs["shard_offset"], kwargs["shard_size"]
        # With fewer KV heads than ranks, `num_heads` ranks hold the same K and V rows.
        replicas = 1 if kwargs["shard_id"] == "q" else kwargs["num_heads"]
        self._require(loaded_weight, rows * self.tp_size // replicas, self.data.shape[1])
        self._quantize(loaded_weight.narrow(0, self.tp_rank // replicas * rows, rows), offset, 0)

    def load_row_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        """Args: loaded_weight [N, K x tp_size]; the scales are those of whole rows, or of this rank's blocks."""
        columns = self.data.shape[1]
        self._require(loaded_weight, self.data.shape[0], columns * self.tp_size)
        self._quantize(loaded_weight, 0, self.tp_rank * columns)


class QuantizedExperts(QuantizedStorage, torch.nn.Parameter):
    """Codes of one projection of all experts: ``data`` is [E, N, K], ``scales`` [E, N, 1] float32, with blocks
    [E, N / B, K / B].

    vLLM's own loader of fused experts ends in ``copy_``, which would truncate BF16 into 8-bit storage; this is a loader of our
    own, under the signature that vLLM's models call.

    Args:
        data: codes; gate over up projection for ``w13``, the down projection for ``w2``.
        scales: their scales.
        format: format of the codes.
        tp_rank: this rank among ``tp_size``, which cut the intermediate dimension.
        tp_size: tensor-parallel size.
    """

    def __new__(cls, *, data: torch.Tensor, **kwargs):
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, *, data: torch.Tensor, scales: torch.nn.Parameter, format: WeightFormat, tp_rank: int, tp_size: int):
        self._set_up(scales, format)
        self.tp_rank, self.tp_size = tp_rank, tp_size

    def weight_loader(
        self,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Quantize one projection of one expert.

        Args:
            param: this parameter; vLLM passes it along.
            loaded_weight: [N, K] of the whole projection, before tensor parallelism cuts it.
            weight_name: vLLM's name, for messages.
            shard_id: ``w1`` (gate), ``w3`` (up) or ``w2`` (down).
            expert_id: number of the expert; every rank holds all (expert parallelism is refused).
            return_success: whether to return True.

        Raises:
            ValueError: the shape is not that of the projection.
        """
        experts, rows, columns = self.data.shape
        if not 0 <= expert_id < experts:
            raise ValueError(f"{weight_name}: expert {expert_id} of {experts}")
        if shard_id == "w2":
            self._require(loaded_weight, rows, columns * self.tp_size)
            self._quantize(loaded_weight, expert_id * rows, self.tp_rank * columns)
        elif shard_id in ("w1", "w3"):
            half = rows // 2
            self._require(loaded_weight, half * self.tp_size, columns)
            first = expert_id * rows + (0 if shard_id == "w1" else half)
            self._quantize(loaded_weight.narrow(0, self.tp_rank * half, half), first, 0)
        else:
            raise ValueError(f"{weight_name}: unknown projection {shard_id!r} of an expert")
        return True if return_success else None
