# SPDX-License-Identifier: Apache-2.0
"""What the load plan finds out about a loader, and how few launches it needs."""

import pytest
import torch

from flashrl_verl.quantization import numerics
from flashrl_verl.quantization.formats.int8 import FORMAT
from flashrl_verl.quantization.parameter import QuantizedExperts
from flashrl_verl.rollout import plan as plans
from flashrl_verl.rollout.plan import LoadPlan, find_copy


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape).bfloat16(), requires_grad=False)


@pytest.mark.parametrize("value", [None, 0.0], ids=["random", "all zero"])
@pytest.mark.parametrize("shape", [(), (5,)], ids=["vector", "matrix"])
@pytest.mark.parametrize("first, rows, source_row", [(0, 300, 0), (40, 300, 300), (460, 40, 560), (0, 500, 100)])
def test_the_rows_of_a_copy_are_found_and_the_rest_is_restored(first, rows, source_row, shape, value):
    target = parameter(500, *shape)
    tensor = torch.randn(600, *shape).bfloat16() if value is None else torch.full((600, *shape), value, dtype=torch.bfloat16)
    before = target.data.clone()

    def load(loaded: torch.Tensor) -> None:
        target.data[first : first + rows].copy_(loaded[source_row : source_row + rows])

    copy = find_copy(target, tensor, load)
    assert (copy.first_row, copy.rows, copy.source_row) == (first, rows, source_row)
    expected = before.clone()
    expected[first : first + rows] = tensor[source_row : source_row + rows]
    assert torch.equal(target.data, expected)


def test_zeros_behind_the_rows_are_padding_and_are_written_again_by_every_update():
    target, tensor = parameter(512, 3), torch.randn(500, 3).bfloat16()

    def load(loaded: torch.Tensor) -> None:
        target.data[:500].copy_(loaded)
        target.data[500:].zero_()

    copy = find_copy(target, tensor, load)
    assert (copy.first_row, copy.rows, copy.source_row, copy.padding) == (0, 500, 0, 12)
    plan = LoadPlan()
    plan.copies["embed"] = copy
    target.data.fill_(float("nan"))
    plan.run_copies([("embed", tensor)])
    assert torch.equal(target.data[:500], tensor) and not target.data[500:].any()


@pytest.mark.parametrize(
    "load",
    [
        lambda t, x: t[:50].copy_(x[:100:2]),  # every other row
        lambda t, x: t[::2].copy_(x[:50]),  # into every other row
        lambda t, x: t[:50].copy_(x[:50].flip(0)),
        lambda t, x: None,
    ],
    ids=["strided source", "strided target", "reversed", "nothing"],
)
def test_anything_but_a_copy_of_consecutive_rows_is_left_to_the_loader(load):
    target = parameter(100)
    assert find_copy(target, torch.randn(100).bfloat16(), lambda tensor: load(target.data, tensor)) is None


def experts(count: int, rows: int, columns: int) -> QuantizedExperts:
    scales = torch.nn.Parameter(torch.full((count, rows, 1), float("nan")), requires_grad=False)
    return QuantizedExperts(
        data=torch.zeros((count, rows, columns), dtype=torch.int8), scales=scales, format=FORMAT, tp_rank=0, tp_size=1
    )


@pytest.fixture
def launches(monkeypatch) -> list[int]:
    """Rows of every launch."""
    rows: list[int] = []
    quantize = plans.quantize_rows_into

    def counted(weight, *rest):
        rows.append(len(weight))
        quantize(weight, *rest)

    monkeypatch.setattr(plans, "quantize_rows_into", counted)
    return rows


def test_shards_adjacent_in_bucket_and_storage_are_one_launch_and_others_are_not(launches):
    """Gate and up of four experts lie behind each other as verl sends them; a gap in the bucket ends a launch."""
    count, half, columns = 4, 6, 10
    weight = experts(count, 2 * half, columns)
    bucket = torch.randn(2 * count * half * columns + columns).bfloat16()
    plan, tensors = LoadPlan(), []
    for i in range(2 * count):
        gap = columns if i >= 5 else 0
        tensor = bucket[i * half * columns + gap : (i + 1) * half * columns + gap].view(half, columns)
        assert plan.record(f"t{i}", tensor, weight, tensor, i * half, 0)
        tensors.append((f"t{i}", tensor))
    flag, seen = torch.zeros(1, dtype=torch.int32), []
    plan.run(tensors, flag, lambda name, shard, tensor: seen.append((name, shard.first_row)))
    assert launches == [5 * half, 3 * half]
    assert seen == [(f"t{i}", i * half) for i in range(2 * count)]
    codes, scales = numerics.quantize_rows(torch.cat([tensor for _, tensor in tensors]), FORMAT)
    assert torch.equal(weight.rows, codes) and torch.equal(weight.row_scales, scales)
    assert weight.loaded_elements == weight.numel() and not flag.item()
    tensors[6][1][0, 0] = float("nan")
    plan.run(tensors, flag, lambda *_: None)
    assert flag.item() == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_shards_that_add_up_to_a_tensor_but_start_inside_it_are_not_taken_for_it(rank, launches):
    """Tensor parallelism 2 with one KV head: rank 1's half of q, then k and v, are as many rows as q has, and adjacent."""
    q, k, v, columns = 8, 2, 2, 6
    bucket = torch.randn((q + k + v) * columns).bfloat16()
    tensors = [
        (name, part.view(-1, columns))
        for name, part in zip("qkv", bucket.split([q * columns, k * columns, v * columns]), strict=True)
    ]
    weight, plan = experts(1, q // 2 + k + v, columns), LoadPlan()
    first = 0
    for name, tensor in tensors:
        source = tensor.narrow(0, rank * q // 2, q // 2) if name == "q" else tensor
        assert plan.record(name, tensor, weight, source, first, 0)
        first += len(source)
    plan.run(tensors, torch.zeros(1, dtype=torch.int32), lambda *_: None)
    own = torch.cat([tensors[0][1][rank * q // 2 : (rank + 1) * q // 2], tensors[1][1], tensors[2][1]])
    assert torch.equal(weight.rows, numerics.quantize_rows(own, FORMAT)[0])
    assert launches == ([8] if rank == 1 else [4, 4])


def test_tensors_of_another_storage_are_never_joined(launches):
    """Two allocations may lie behind each other by accident."""
    weight = experts(1, 8, 10)
    tensors = [("a", torch.randn(4, 10).bfloat16()), ("b", torch.randn(4, 10).bfloat16())]
    plan = LoadPlan()
    for i, (name, tensor) in enumerate(tensors):
        plan.record(name, tensor, weight, tensor, 4 * i, 0)
    plan.run(tensors, torch.zeros(1, dtype=torch.int32), lambda *_: None)
    assert launches == [4, 4]
    assert torch.equal(weight.rows, numerics.quantize_rows(torch.cat([t for _, t in tensors]), FORMAT)[0])


def test_a_source_that_is_no_range_of_rows_is_not_planned():
    weight, tensor = experts(1, 8, 10), torch.randn(8, 10).bfloat16()
    plan = LoadPlan()
    assert not plan.record("copy", tensor, weight, tensor.clone(), 0, 0)
    assert not plan.record("columns", tensor, weight, tensor[:, :5], 0, 0)
    assert not plan.record("transposed", torch.randn(10, 8).bfloat16().t(), weight, tensor, 0, 0)
    assert not plan.quantizes("copy")
    assert plan.record("rows", tensor, weight, tensor[2:6], 0, 0) and plan.shards("rows")[0].source_row == 2
