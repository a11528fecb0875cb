# SPDX-License-Identifier: Apache-2.0
"""The weight parameters that quantize every BF16 shard while vLLM loads it.

vLLM's linear layers hand each checkpoint shard to
``Parameter.load_{column_parallel,merged_column,qkv,row_parallel}_weight`` (``vllm/model_executor/parameter.py``), and
its fused experts to ``Parameter.weight_loader``. Here those methods quantize straight into the storage the GEMM reads,
so the first load and the thousandth weight update are the same operation, no address ever changes (CUDA graphs stay
valid) and nothing BF16 is kept.
"""

import torch
from vllm.model_executor.parameter import ModelWeightParameter

from flashrl_verl.quantization.numerics import WeightFormat
from flashrl_verl.quantization.rows import quantize_rows_into


class QuantizedStorage:
    """What both parameters share: codes in ``data``, scales beside them, and an account of what was written.

    Seen as a matrix (``rows``), the storage is [R, K] codes and [R, 1] float32 scales, where R counts this rank's
    output rows of all fused projections (and experts) together and K this rank's input columns.
    """

    data: torch.Tensor
    scales: torch.nn.Parameter
    format: WeightFormat
    loaded_elements: int
    """Codes written since the update began; equals ``numel()`` when every shard arrived exactly once."""

    def _set_up(self, scales: torch.nn.Parameter, format: WeightFormat) -> None:
        self.scales, self.format, self.loaded_elements = scales, format, 0

    @property
    def rows(self) -> torch.Tensor:
        return self.data.view(-1, self.data.shape[-1])

    @property
    def scale_rows(self) -> torch.Tensor:
        return self.scales.data.view(-1, 1)

    def _require(self, loaded_weight: torch.Tensor, rows: int, columns: int) -> None:
        if tuple(loaded_weight.shape) != (rows, columns):
            raise ValueError(f"expected a shard of shape {(rows, columns)}, got {tuple(loaded_weight.shape)}")

    def _quantize(self, source: torch.Tensor, first_row: int, first_column: int) -> None:
        """``source`` [n, K_whole] becomes rows ``first_row`` and following; the storage holds columns from
        ``first_column``."""
        source = source.detach().to(self.data.device, non_blocking=True)
        codes = self.rows.narrow(0, first_row, source.shape[0])
        quantize_rows_into(
            source, codes, self.scale_rows.narrow(0, first_row, source.shape[0]), self.format, first_column
        )
        self.loaded_elements += codes.numel()


class QuantizedWeight(QuantizedStorage, ModelWeightParameter):
    """Codes of one vLLM linear layer: ``data`` is [N, K], its ``scales`` [N, 1] float32 (``layer.weight_scale``)."""

    def __init__(self, *, scales: torch.nn.Parameter, format: WeightFormat, **kwargs):
        super().__init__(**kwargs)
        self._set_up(scales, format)

    def load_column_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        """Args: loaded_weight [N x tp_size, K] floating point. Raises ValueError for another shape, as all of these
        do."""
        rows = self.data.shape[0]
        self._require(loaded_weight, rows * self.tp_size, self.data.shape[1])
        self._quantize(loaded_weight.narrow(0, self.tp_rank * rows, rows), 0, 0)

    def load_merged_column_weight(self, loaded_weight: torch.Tensor, **kwargs) -> None:
        """Args: loaded_weight [shard_size x tp_size, K] of one projection, which starts at row ``shard_offset`` of
        ``data``."""
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
        """Args: loaded_weight [N, K x tp_size]; the scales are those of whole rows."""
        columns = self.data.shape[1]
        self._require(loaded_weight, self.data.shape[0], columns * self.tp_size)
        self._quantize(loaded_weight, 0, self.tp_rank * columns)


class QuantizedExperts(QuantizedStorage, torch.nn.Parameter):
    """Codes of one projection of all experts: ``data`` is [E, N, K], ``scales`` [E, N, 1] float32.

    vLLM's own loader of fused experts ends in ``copy_``, which would truncate BF16 into 8-bit storage; this is a loader
    of our own, under the signature that vLLM's models call.

    Args:
        data: codes; gate over up projection for ``w13``, the down projection for ``w2``.
        scales: their scales.
        format: format of the codes.
        tp_rank: this rank among ``tp_size``, which cut the intermediate dimension.
        tp_size: tensor-parallel size.
    """

    def __new__(cls, *, data: torch.Tensor, **kwargs):
        return super().__new__(cls, data, requires_grad=False)

    def __init__(
        self, *, data: torch.Tensor, scales: torch.nn.Parameter, format: WeightFormat, tp_rank: int, tp_size: int
    ):
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
            weight_name: vLLM's name of the tensor.
            shard_id: ``w1`` (gate), ``w3`` (up) or ``w2`` (down).
            expert_id: number of the expert; every rank holds all (expert parallelism is refused).
            return_success: whether to return True.

        Raises:
            ValueError: the shape is not that of the projection.
        """
        _, rows, columns = self.data.shape
        if shard_id == "w2":
            self._require(loaded_weight, rows, columns * self.tp_size)
            self._quantize(loaded_weight, expert_id * rows, self.tp_rank * columns)
        else:
            half = rows // 2
            self._require(loaded_weight, half * self.tp_size, columns)
            first = expert_id * rows + (0 if shard_id == "w1" else half)
            self._quantize(loaded_weight.narrow(0, self.tp_rank * half, half), first, 0)
        return True if return_success else None
