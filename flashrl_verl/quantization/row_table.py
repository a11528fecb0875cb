# SPDX-License-Identifier: Apache-2.0
"""Shards of a whole bucket quantized in one launch, each as ``quantize_into`` would."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from flashrl_verl.quantization.kernels import launch_blocks, launch_rows, require_fit
from flashrl_verl.quantization.numerics import WeightFormat

_ALIGNED_ELEMENTS = 16
"""Distances that are multiples of this let the kernel load and store vectors."""


@dataclass(frozen=True, slots=True)
class RowJob:
    """Arguments of one ``quantize_into``; the tensors have contiguous rows behind each other."""

    weight: torch.Tensor
    """[N, K] bfloat16, float16 or float32."""
    codes: torch.Tensor
    """[N, K_local]."""
    scales: torch.Tensor
    """[N, 1] float32, or with blocks [N / B, K_local / B]."""
    fmt: WeightFormat
    column_offset: int = 0

    def geometry(self) -> tuple:
        """Jobs of one geometry share a ``RowTable``."""
        k, k_local, step = self.weight.shape[1], self.codes.shape[1], _ALIGNED_ELEMENTS
        starts = self.weight.data_ptr() % (step * self.weight.element_size()), self.codes.data_ptr() % step
        aligned = not any((*starts, k % step, k_local % step))
        return self.fmt, self.weight.dtype, k, k_local, self.column_offset, aligned


class RowTable:
    """Jobs of one geometry on one GPU, in one launch.

    The places of codes and scales are fixed; those of the weights are relative to the first job's, so that a bucket may lie
    elsewhere in the next update.

    Args:
        jobs: at least one, all of one ``geometry``, with contiguous rows, at least one each.

    Raises:
        ValueError: a job's shapes or dtypes do not fit together, or the jobs not to one another.
    """

    def __init__(self, jobs: Sequence[RowJob]):
        first = jobs[0]
        for job in jobs:
            require_fit(job.weight, job.codes, job.scales, job.fmt, job.column_offset)
            if (
                not len(job.codes)
                or job.geometry() != first.geometry()
                or not all(t.is_contiguous() for t in (job.weight, job.codes, job.scales))
            ):
                raise ValueError(f"cannot quantize {job.geometry()} in one launch with {first.geometry()}")
        # Not the weights, which lie in shared memory that is taken away.
        self._places = [(job.codes, job.scales) for job in jobs]
        self._fmt, self._column_offset = first.fmt, first.column_offset
        self._rows = sum(job.codes.shape[0] for job in jobs)
        # Rows in a run, whose place the table has: as many as all jobs are whole runs of, or a row of blocks.
        self._granule = first.fmt.block or math.gcd(*(job.codes.shape[0] for job in jobs))
        starts = np.array([[_elements(getattr(first, f), getattr(job, f)) for f in _FIELDS] for job in jobs], np.int64)
        runs = np.array([job.codes.shape[0] // self._granule for job in jobs])
        inside = np.arange(runs.sum()) - np.repeat(runs.cumsum() - runs, runs)
        step = self._granule // first.fmt.rows_per_scale
        strides = np.array(
            [first.weight.shape[1] * self._granule, first.codes.shape[1] * self._granule, first.scales.shape[1] * step],
            np.int64,
        )
        table = np.repeat(starts, runs, axis=0) + inside[:, None] * strides
        self._aligned = first.geometry()[-1]
        self._table = torch.from_numpy(table).to(first.codes.device)

    def launch(self, weight: torch.Tensor, flag: torch.Tensor | None) -> None:
        """Quantize. Args: weight: the first job's, where it is now; flag: as ``quantize_rows_into``'s."""
        run = (self._rows, self._table, self._granule, self._aligned)
        launch = launch_rows if self._fmt.block is None else launch_blocks
        launch(weight, *self._places[0], self._fmt, self._column_offset, flag, *run)


_FIELDS = ("weight", "codes", "scales")


def _elements(first: torch.Tensor, tensor: torch.Tensor) -> int:
    """From one tensor's start to another's, in elements."""
    distance, rest = divmod(tensor.data_ptr() - first.data_ptr(), tensor.element_size())
    if rest:
        raise ValueError(f"tensors of {tensor.dtype} that are not whole elements apart")
    return distance
