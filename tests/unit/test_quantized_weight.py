# SPDX-License-Identifier: Apache-2.0
"""The parameter's four loaders at tensor-parallel sizes 1, 2 and 4: the ranks' codes and scales joined are one
rank's."""

import pytest
import torch

from flashrl_verl.quantization import numerics
from flashrl_verl.quantization.formats import INT8 as FORMAT
from flashrl_verl.quantization.parameter import QuantizedExperts, QuantizedWeight


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return numerics.quantize_rows(weight, FORMAT)


def shard(rows: int, columns: int, rank: int, size: int) -> QuantizedWeight:
    """One rank's parameter. Its base class asks vLLM for the process group, which a unit test has none of."""
    weight = QuantizedWeight.__new__(QuantizedWeight, data=torch.zeros(rows, columns, dtype=torch.int8))
    weight._set_up(torch.nn.Parameter(torch.full((rows, 1), float("nan")), requires_grad=False), FORMAT)
    weight.tp_rank, weight.tp_size = rank, size
    return weight


def random(rows: int, columns: int, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=g) * torch.rand(rows, 1, generator=g)).bfloat16()


def joined(weights: list[QuantizedWeight], dim: int) -> torch.Tensor:
    return torch.cat([w.data for w in weights], dim)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_column_parallel_rows_are_cut(size):
    source = random(24, 20, 1)
    ranks = [shard(24 // size, 20, rank, size) for rank in range(size)]
    for weight in ranks:
        weight.load_column_parallel_weight(source)
        assert weight.loaded_elements == weight.numel()
    codes, scales = quantize_rows(source)
    assert torch.equal(joined(ranks, 0), codes)
    assert torch.equal(torch.cat([w.scales.data for w in ranks]), scales)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_row_parallel_columns_are_cut_under_the_scale_of_the_whole_row(size):
    source = random(24, 40, 2)
    source[:, 0] *= 50  # the largest element of every row is on rank 0
    ranks = [shard(24, 40 // size, rank, size) for rank in range(size)]
    for weight in ranks:
        weight.load_row_parallel_weight(source)
    codes, scales = quantize_rows(source)
    assert torch.equal(joined(ranks, 1), codes)
    assert all(torch.equal(w.scales.data, scales) for w in ranks)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_merged_columns_lie_behind_each_other_on_every_rank(size):
    gate, up = random(16, 12, 3), random(16, 12, 4)
    rows = 16 // size
    for rank in range(size):
        weight = shard(2 * rows, 12, rank, size)
        weight.load_merged_column_weight(gate, shard_offset=0, shard_size=rows, shard_id=0)
        assert weight.loaded_elements < weight.numel()
        weight.load_merged_column_weight(up, shard_offset=rows, shard_size=rows, shard_id=1)
        assert weight.loaded_elements == weight.numel()
        mine = slice(rank * rows, (rank + 1) * rows)
        codes, scales = quantize_rows(torch.cat([gate[mine], up[mine]]))
        assert torch.equal(weight.data, codes) and torch.equal(weight.scales.data, scales)


@pytest.mark.parametrize(
    "size, kv_heads",
    [(1, 2), (2, 2), (4, 2), (1, 4), (2, 4)],
    ids=["TP 1", "TP 2", "TP 4 with KV replicas", "TP 1, as many KV heads", "TP 2, as many KV heads"],
)
def test_ranks_that_share_a_kv_head_hold_the_same_rows(size, kv_heads):
    heads, head_dim, columns = 4, 6, 10
    q = random(heads * head_dim, columns, 5)
    k, v = random(kv_heads * head_dim, columns, 6), random(kv_heads * head_dim, columns, 7)
    replicas = max(1, size // kv_heads)
    q_rows, kv_rows = heads * head_dim // size, max(1, kv_heads // size) * head_dim
    for rank in range(size):
        weight = shard(q_rows + 2 * kv_rows, columns, rank, size)
        for shard_id, source, offset, rows in (
            ("q", q, 0, q_rows), ("k", k, q_rows, kv_rows), ("v", v, q_rows + kv_rows, kv_rows),
        ):  # fmt: skip
            weight.load_qkv_weight(source, shard_id=shard_id, shard_offset=offset, shard_size=rows, num_heads=replicas)
        own_q = q[rank * q_rows : (rank + 1) * q_rows]
        first = rank // replicas * kv_rows
        codes, scales = quantize_rows(torch.cat([own_q, k[first : first + kv_rows], v[first : first + kv_rows]]))
        assert torch.equal(weight.data, codes) and torch.equal(weight.scales.data, scales)
        assert weight.loaded_elements == weight.numel()


@pytest.mark.parametrize("rows, columns", [(23, 20), (25, 20), (48, 20), (24, 19), (24, 40)])
def test_a_tensor_of_another_shape_is_refused_and_nothing_is_written(rows, columns):
    weight = shard(12, 20, 1, 2)
    with pytest.raises(ValueError, match=r"expected a shard of shape \(24, 20\)"):
        weight.load_column_parallel_weight(random(rows, columns, 8))
    assert not weight.data.any() and weight.loaded_elements == 0


def experts(shape: tuple[int, int, int], rank: int, size: int) -> QuantizedExperts:
    scales = torch.nn.Parameter(torch.full((*shape[:2], 1), float("nan")), requires_grad=False)
    return QuantizedExperts(
        data=torch.zeros(shape, dtype=torch.int8), scales=scales, format=FORMAT, tp_rank=rank, tp_size=size
    )


@pytest.mark.parametrize("size", [1, 2, 4])
def test_experts_are_cut_along_the_intermediate_dimension_and_keep_the_scales_of_whole_rows(size):
    count, hidden, intermediate = 3, 12, 16
    gate, up = ([random(intermediate, hidden, 10 * i + e) for e in range(count)] for i in (1, 2))
    down = [random(hidden, intermediate, 30 + e) for e in range(count)]
    part = intermediate // size
    for rank in range(size):
        w13 = experts((count, 2 * part, hidden), rank, size)
        w2 = experts((count, hidden, part), rank, size)
        mine = slice(rank * part, (rank + 1) * part)
        for e in range(count):
            for shard_id, source, weight in (("w1", gate, w13), ("w3", up, w13), ("w2", down, w2)):
                assert weight.weight_loader(weight, source[e], "w", shard_id, e, return_success=True)
        for e in range(count):
            codes, scales = quantize_rows(torch.cat([gate[e][mine], up[e][mine]]))
            assert torch.equal(w13.data[e], codes) and torch.equal(w13.scales.data[e], scales)
            codes, scales = quantize_rows(down[e])
            assert torch.equal(w2.data[e], codes[:, mine]) and torch.equal(w2.scales.data[e], scales)
        assert w13.loaded_elements == w13.numel() and w2.loaded_elements == w2.numel()


@pytest.mark.parametrize(
    "shape, shard_id, expert, message",
    [
        ((9, 12), "w1", 0, "expected a shard of shape"),
        ((12, 8), "w1", 0, "expected a shard of shape"),
        ((8, 12), "w1", 3, "expert 3 of 3"),
        ((8, 12), "w1", -1, "expert -1 of 3"),
        ((8, 12), "w9", 0, "unknown projection 'w9'"),
    ],
)
def test_a_misfitting_projection_of_an_expert_is_refused_and_nothing_is_written(shape, shard_id, expert, message):
    weight = experts((3, 16, 12), 0, 1)
    with pytest.raises(ValueError, match=message):
        weight.weight_loader(weight, random(*shape, 1), "w", shard_id, expert)
    assert not weight.data.any() and weight.loaded_elements == 0
