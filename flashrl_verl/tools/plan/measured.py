# SPDX-License-Identifier: Apache-2.0
"""How many times BF16's tokens/s rollouts make in 8 bits, as measured on H200s: docs/results/throughput.md, and for
1.7B and the tail of 14B step.md beside it."""

import math
from typing import NamedTuple


class Row(NamedTuple):
    """A model of so many billion parameters in an engine of so many H200s with so many GiB each (None: it mattered
    little), and a workload, sequences x (prompt -> response tokens). Speed-ups are of INT8 weights, FP8 weights, and
    INT8 weights with the INT8 KV cache; None: not measured."""

    model: str
    billions: float
    gpus: int
    gib: int | None
    workload: str
    speed_ups: tuple[float | None, ...]


ROWS = [
    Row("qwen3-1.7b", 1.7, 1, None, "512 x (120 -> 690), tail", (None, None, 1.10)),
    Row("qwen2.5-7b", 7.6, 1, 126, "256 x (256 -> 384)", (1.26, 1.25, 1.38)),
    Row("qwen2.5-14b", 14.8, 1, 126, "256 x (256 -> 384)", (1.32, 1.27, 1.52)),
    Row("qwen2.5-32b", 32.8, 1, 126, "256 x (256 -> 384)", (1.49, 1.39, 1.64)),
    Row("qwen2.5-32b", 32.8, 1, 112, "384 x (256 -> 1024), tail", (1.33, None, 1.50)),
    Row("qwen2.5-7b", 7.6, 1, 126, "28 x (8192 -> 192)", (1.43, 1.34, 1.49)),
    Row("qwen2.5-14b", 14.8, 1, 126, "28 x (8192 -> 192)", (1.39, 1.30, 1.48)),
    Row("qwen2.5-32b", 32.8, 1, 126, "28 x (8192 -> 192)", (1.51, 1.42, 1.56)),
    Row("qwen2.5-7b", 7.6, 1, 71, "256 x (256 -> 384)", (1.21, 1.18, 1.26)),
    Row("qwen2.5-14b", 14.8, 1, 71, "256 x (256 -> 384)", (1.33, 1.27, 1.51)),
    Row("qwen2.5-14b", 14.8, 1, 77, "290 x (120 -> 2044), tail", (None, None, 1.34)),
    Row("qwen2.5-32b", 32.8, 1, 71, "256 x (256 -> 384)", (2.97, 2.77, 3.72)),
    Row("qwen2.5-32b", 32.8, 1, 73, "64 x (256 -> 1024)", (2.73, None, None)),
    Row("qwen2.5-7b", 7.6, 1, 71, "28 x (8192 -> 192)", (1.42, 1.34, 1.50)),
    Row("qwen2.5-14b", 14.8, 1, 71, "28 x (8192 -> 192)", (1.52, 1.42, 1.64)),
    Row("qwen2.5-32b", 32.8, 1, 71, "28 x (8192 -> 192)", (2.62, 2.46, 3.15)),
    Row("qwen2.5-32b", 32.8, 4, 112, "256 x (128 -> 256)", (1.05, None, 1.15)),
    Row("qwen2.5-32b", 32.8, 4, 112, "768 x (128 -> 256)", (1.21, None, 1.15)),
    Row("qwen2.5-32b", 32.8, 4, 112, "191-256 x (7424 -> 512)", (1.27, None, 1.52)),
]
"""Of each workload by size. Random weights; INT8 without rotation, but for one GPU with 77 or 112 GiB."""


def rows_for(billions: float, gpus: int, gib: float) -> list[Row]:
    """What was measured of the nearest models to one of so many parameters, in an engine of so many GPUs (two are taken
    for four) with so many GiB each: a row for each workload. Nothing where the nearest has more than four times or less
    than a quarter of the parameters."""
    there = [row for row in ROWS if (row.gpus > 1) == (gpus > 1)]
    # 94 is halfway between the smaller memories and the larger.
    alike = [row for row in there if row.gib is None or (row.gib > 94) == (gib > 94)] or there

    def off(row: Row) -> float:
        return abs(math.log(row.billions / billions))

    # The nearest of a workload comes last, and stays.
    nearest = {(row.gib, row.workload): row for row in sorted(alike, key=off, reverse=True)}.values()
    least = min(map(off, nearest))
    return [row for row in ROWS if row in nearest and off(row) <= min(least + 0.1, math.log(4))]
