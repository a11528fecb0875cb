# SPDX-License-Identifier: Apache-2.0
"""Which layers a format with blocks can hold: those that every rank and every fused projection has whole blocks of.

Then no block spans two of the checkpoint's tensors, which arrive one after another, or two ranks, which would need each other's
absmax; and the codes do not depend on the tensor-parallel size. A head of 64 rows needs a second one beside it: two KV heads of
64 are one block on one rank and none on two, and where ranks share a KV head, each holds that head's rows alone.
"""

from collections.abc import Sequence

from flashrl_verl.errors import ConfigError
from flashrl_verl.quantization.numerics import WeightFormat


def require_whole_blocks(fmt: WeightFormat, name: str, parts: Sequence[int], columns: int) -> None:
    """Refuse a layer that is not made of whole blocks; formats with a scale a row take any.

    Args:
        fmt: format of the codes.
        name: vLLM's, of the layer.
        parts: output rows of each fused projection that this rank has.
        columns: input columns that it has.

    Raises:
        ConfigError: the block divides one of them not.
    """
    block = fmt.block or 1
    rows = next((rows for rows in parts if rows % block), parts[0])
    if rows % block == 0 and columns % block == 0:
        return
    raise ConfigError(
        f"{name}: flashrl.precision={fmt.name} has a scale for every {block} x {block} block of a weight, but of a "
        f"projection here a rank holds {rows} output rows x {columns} input columns, not whole blocks. Set "
        "flashrl.precision=fp8, which takes any shape, or another actor_rollout_ref.rollout.tensor_model_parallel_size, "
        "or name the layer in flashrl.ignore"
    )
