# SPDX-License-Identifier: Apache-2.0
"""The loaders of both parameters: every tensor-parallel rank holds its part of the codes and scales of whole rows.

Codes are recomputed and cut by ``references.py``, which shares no code with the package.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from references import Rank, block_of, quantize

from flashrl_verl.quantization.formats import INT8
from flashrl_verl.quantization.parameter import QuantizedExperts, QuantizedWeight

HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, EXPERTS = 4, 32, 48, 64, 3
"""Rotated by 16 (hidden), by 64 and on four ranks by 32 (o_proj), by 64, 32 and 16 (experts' down_proj)."""


def shard(rows: int, columns: int, rank: int, size: int) -> QuantizedWeight:
    """One rank's parameter. Its base class asks vLLM for the process group, which a unit test has none of."""
    weight = QuantizedWeight.__new__(QuantizedWeight, data=torch.zeros(rows, columns, dtype=torch.int8))
    weight._set_up(torch.nn.Parameter(torch.full((rows, 1), float("nan")), requires_grad=False), INT8)
    weight.tp_rank, weight.tp_size = rank, size
    return weight


def experts(rows: int, columns: int, rank: int, size: int) -> QuantizedExperts:
    scales = torch.nn.Parameter(torch.full((EXPERTS, rows, 1), float("nan")), requires_grad=False)
    data = torch.zeros(EXPERTS, rows, columns, dtype=torch.int8)
    return QuantizedExperts(data=data, scales=scales, format=INT8, tp_rank=rank, tp_size=size)


def random(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Rows of many sizes; the largest value of each is in a column of rank 0."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=g) * torch.rand(rows, 1, generator=g)
    weight[:, 0] *= 50
    return weight.bfloat16()


def assert_holds(weight: QuantizedWeight | QuantizedExperts, place: Rank, name: str, *wholes: torch.Tensor) -> None:
    """Its part of the whole weights, one of each expert, every element written once."""
    block = block_of(weight.data.shape[-1])
    found = [quantize(whole, "int8", block) for whole in wholes]
    codes, scales = (np.stack(parts) for parts in zip(*found, strict=True))
    if isinstance(weight, QuantizedWeight):
        codes, scales = codes[0], scales[0]
    np.testing.assert_array_equal(weight.data.double(), place.columns(name, place.rows(name, codes)))
    np.testing.assert_array_equal(weight.scales.data, place.rows(name, scales))
    assert weight.loaded_elements == weight.numel()


@pytest.mark.parametrize("size, kv_heads", [(1, 2), (1, 4), (2, 2), (2, 4), (4, 2), (4, 4), (4, 1)])
def test_every_rank_holds_its_part_of_the_whole_weights_codes(size, kv_heads):
    """With fewer KV heads than ranks, neighbours hold the same rows of K and V."""
    q, o = random(HEADS * HEAD_DIM, HIDDEN, 1), random(HIDDEN, HEADS * HEAD_DIM, 2)
    k, v = (random(kv_heads * HEAD_DIM, HIDDEN, seed) for seed in (3, 4))
    gate, up = (random(INTERMEDIATE, HIDDEN, seed) for seed in (5, 6))
    q_rows, kv_rows, rows = len(q) // size, max(1, kv_heads // size) * HEAD_DIM, INTERMEDIATE // size
    config = SimpleNamespace(num_attention_heads=HEADS, num_key_value_heads=kv_heads)
    for rank in range(size):
        place = Rank(config, rank, size)

        qkv, offset = shard(q_rows + 2 * kv_rows, HIDDEN, rank, size), 0
        for shard_id, source, count in (("q", q, q_rows), ("k", k, kv_rows), ("v", v, kv_rows)):
            assert qkv.loaded_elements < qkv.numel()
            words = dict(shard_id=shard_id, shard_offset=offset, shard_size=count, num_heads=max(1, size // kv_heads))
            qkv.load_qkv_weight(source, **words)
            offset += count
        assert_holds(qkv, place, "self_attn.qkv_proj.weight", torch.cat([q, k, v]))

        merged = shard(2 * rows, HIDDEN, rank, size)
        for shard_id, source in enumerate((gate, up)):
            merged.load_merged_column_weight(source, shard_offset=shard_id * rows, shard_size=rows, shard_id=shard_id)
        assert_holds(merged, place, "mlp.gate_up_proj.weight", torch.cat([gate, up]))

        row_parallel = shard(HIDDEN, len(q) // size, rank, size)
        row_parallel.load_row_parallel_weight(o)
        assert_holds(row_parallel, place, "self_attn.o_proj.weight", o)

        column_parallel = shard(rows, HIDDEN, rank, size)
        column_parallel.load_column_parallel_weight(gate)
        assert_holds(column_parallel, place, "mlp.fc.weight", gate.split(rows)[rank])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_holds_its_part_of_every_experts_codes(size):
    gates, ups = ([random(INTERMEDIATE, HIDDEN, 10 * i + e) for e in range(EXPERTS)] for i in (1, 2))
    downs = [random(HIDDEN, INTERMEDIATE, 30 + e) for e in range(EXPERTS)]
    for rank in range(size):
        w13 = experts(2 * INTERMEDIATE // size, HIDDEN, rank, size)
        w2 = experts(HIDDEN, INTERMEDIATE // size, rank, size)
        for shard_id, sources, weight in (("w3", ups, w13), ("w2", downs, w2), ("w1", gates, w13)):
            for e, source in enumerate(sources):
                assert weight.weight_loader(weight, source, "w", shard_id, e, return_success=True)
        place = Rank(None, rank, size)
        wholes = [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
        assert_holds(w13, place, "mlp.experts.w13_weight", *wholes)
        assert_holds(w2, place, "mlp.experts.w2_weight", *downs)
