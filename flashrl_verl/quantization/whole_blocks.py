# SPDX-License-Identifier: Apache-2.0
"""Which layers a precision with blocks can hold: those that every rank and every fused projection has whole blocks of.

Then no block spans two of the checkpoint's tensors, which arrive one after another, or two ranks, which would need each other's
absmax; and the codes do not depend on the tensor-parallel size. A head of 64 rows needs a second one beside it: two KV heads of
64 are one block on one rank and none on two, and where ranks share a KV head, each holds that head's rows alone.

Asked by the engine as it makes a layer, and where a run is composed or planned (``rank_layers.py``): without torch.
"""

from collections.abc import Sequence

from flashrl_verl.config import Precision
from flashrl_verl.errors import ConfigError


def require_whole_blocks(
    precision: Precision, name: str, parts: Sequence[int], columns: int, *, row_ranks: Sequence[int] = (), column_ranks: int = 1
) -> None:
    """Refuse a layer that is not made of whole blocks; precisions with a scale a row take any.

    Args:
        precision: of the codes.
        name: vLLM's, of the layer.
        parts: output rows of each fused projection that this rank has.
        columns: input columns that it has.
        row_ranks: of each projection, ranks among which tensor parallelism cuts the rows: where several hold the same KV head,
            fewer than there are. Without any they are not cut.
        column_ranks: and the columns.

    Raises:
        ConfigError: the block divides one of them not.
    """
    block = precision.block or 1
    rows = next((rows for rows in parts if rows % block), parts[0])
    if rows % block == 0 and columns % block == 0:
        return
    row_ranks = row_ranks or [1] * len(parts)
    cut = max(*row_ranks, column_ranks) > 1
    whole = [part * ranks for part, ranks in zip(parts, row_ranks, strict=True)]
    on_one_rank = cut and not any(rows % block for rows in whole) and columns * column_ranks % block == 0
    fewer = "or a smaller actor_rollout_ref.rollout.tensor_model_parallel_size, " if on_one_rank else ""
    raise ConfigError(
        f"{name}: flashrl.precision={precision.value} has a scale for every {block} x {block} block of a weight, but of a "
        f"projection here a rank holds {rows} output rows x {columns} input columns, not whole blocks. Set "
        f"flashrl.precision=fp8, which takes any shape, {fewer}or name the layer in flashrl.ignore (of a command: "
        "--precision and --ignore)"
    )
