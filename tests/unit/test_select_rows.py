# SPDX-License-Identifier: Apache-2.0
"""Rows that our selection reads are those of verl's, of columns of every kind."""

import types

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils

from flashrl_verl.upstream.patches import patch_index_select

ROWS = 7


def ragged(generator: torch.Generator, *inner: int) -> torch.Tensor:
    lengths = torch.randint(0, 9, (ROWS,), generator=generator).tolist()
    rows = [torch.rand(length, *inner, generator=generator) for length in lengths]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


@pytest.mark.parametrize("indices", [[0], [6, 2, 2, 0], list(range(ROWS)), torch.tensor([3, 1])])
def test_selected_rows_are_verls(indices):
    generator = torch.Generator().manual_seed(0)
    columns = {"ids": ragged(generator), "experts": ragged(generator, 2, 3), "dense": torch.rand(ROWS, 4)}
    holes = torch.nested.nested_tensor_from_jagged(
        torch.rand(3 * ROWS), torch.arange(ROWS + 1) * 3, torch.arange(ROWS) % 3
    )
    batch = TensorDict(columns | {"holes": holes}, batch_size=ROWS)
    tensordict_utils.assign_non_tensor(batch, words=[f"{i}" for i in range(ROWS)], step=5)
    ours = types.SimpleNamespace(index_select_tensor_dict=tensordict_utils.index_select_tensor_dict)
    patch_index_select(ours)
    patched = ours.index_select_tensor_dict
    patch_index_select(ours)
    assert ours.index_select_tensor_dict is patched, "once"
    made, expected = patched(batch, indices), tensordict_utils.index_select_tensor_dict(batch, indices)
    assert set(made.keys()) == set(expected.keys()) and made.batch_size == expected.batch_size
    for key, column in expected.items():
        if isinstance(column, torch.Tensor) and column.is_nested:
            pairs = zip(made[key].unbind(), column.unbind(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs) and made[key]._ragged_idx == column._ragged_idx
        elif isinstance(column, torch.Tensor):
            assert torch.equal(made[key], column)
        else:
            assert tensordict_utils.get(made, key) == tensordict_utils.get(expected, key)
    assert patched(None, indices) is None
