# SPDX-License-Identifier: Apache-2.0
"""What the load plan finds out about a loader, and that a bucket's program carries it out."""

import weakref

import pytest
import torch

from flashrl_verl.quantization import numerics
from flashrl_verl.quantization.formats.int8 import FORMAT
from flashrl_verl.quantization.parameter import QuantizedExperts
from flashrl_verl.rollout.bucket_program import BucketProgram, BucketPrograms
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
    flag = torch.zeros(1, dtype=torch.int32)
    BucketProgram(plan, [("embed", tensor)]).run([("embed", tensor)], flag)
    assert not flag.item()
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


@pytest.mark.parametrize(
    "rows, load",
    [
        (1, lambda t, x: t[:1].copy_(x * 3)),
        (1, lambda t, x: t[:4].copy_(x.expand(4, *x.shape[1:]))),
        (64, lambda t, x: t[:64].copy_(x + 1)),
        (64, lambda t, x: t[:64].copy_(x * 2)),
        (64, lambda t, x: t[:64].copy_(x - 1)),
    ],
    ids=["scaled", "broadcast", "one more", "doubled", "one less"],
)
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_loader_that_computes_is_not_taken_for_a_copy(rows, load, value):
    """Zeros and ones, as in a fresh bias or norm, look like copies of themselves under many a computation."""
    target = parameter(100)
    assert find_copy(target, torch.full((rows,), value).bfloat16(), lambda tensor: load(target.data, tensor)) is None


def experts(count: int, rows: int, columns: int) -> QuantizedExperts:
    scales = torch.nn.Parameter(torch.full((count, rows, 1), float("nan")), requires_grad=False)
    return QuantizedExperts(
        data=torch.zeros((count, rows, columns), dtype=torch.int8), scales=scales, format=FORMAT, tp_rank=0, tp_size=1
    )


def carry_out(plan: LoadPlan, tensors: list[tuple[str, torch.Tensor]]) -> int:
    """Run the bucket's program once; returns its flag."""
    flag = torch.zeros(1, dtype=torch.int32)
    BucketProgram(plan, tensors).run(tensors, flag)
    return int(flag)


def test_shards_of_a_bucket_become_the_rows_the_plan_says():
    """Gate and up of four experts, with a gap in the bucket."""
    count, half, columns = 4, 6, 10
    weight = experts(count, 2 * half, columns)
    bucket = torch.randn(2 * count * half * columns + columns).bfloat16()
    plan, tensors = LoadPlan(), []
    for i in range(2 * count):
        gap = columns if i >= 5 else 0
        tensor = bucket[i * half * columns + gap : (i + 1) * half * columns + gap].view(half, columns)
        assert plan.record(f"t{i}", tensor, weight, tensor, i * half, 0)
        tensors.append((f"t{i}", tensor))
    assert carry_out(plan, tensors) == 0
    codes, scales = numerics.quantize_rows(torch.cat([tensor for _, tensor in tensors]), FORMAT)
    assert torch.equal(weight.rows, codes) and torch.equal(weight.scale_rows, scales)
    assert weight.loaded_elements == weight.numel()
    tensors[6][1][0, 0] = float("nan")
    assert carry_out(plan, tensors) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_shards_that_add_up_to_a_tensor_but_start_inside_it_are_not_taken_for_it(rank):
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
    carry_out(plan, tensors)
    own = torch.cat([tensors[0][1][rank * q // 2 : (rank + 1) * q // 2], tensors[1][1], tensors[2][1]])
    assert torch.equal(weight.rows, numerics.quantize_rows(own, FORMAT)[0])


def test_a_program_is_found_again_as_long_as_its_layout_is_the_same():
    weight, plan = experts(1, 8, 10), LoadPlan()
    tensors = [(name, torch.randn(4, 10).bfloat16()) for name in "ab"]
    for i, (name, tensor) in enumerate(tensors):
        plan.record(name, tensor, weight, tensor, 4 * i, 0)
    programs = BucketPrograms(plan)
    assert programs.find(tensors) is None
    first = programs.make(tensors)
    assert first.passed.shapes == {"a": (4, 10), "b": (4, 10)} and first.passed.num_bytes == 160 and first.unplanned == []
    programs.end_update()
    assert programs.find([(name, torch.randn(4, 10).bfloat16()) for name, _ in tensors]) is first
    for other in (
        [(name, tensor.float()) for name, tensor in tensors],
        [(name, tensor.view(5, 8)) for name, tensor in tensors],
        [(name, torch.randn(10, 4).bfloat16().T) for name, _ in tensors],
        tensors[::-1],
        tensors[:1],
    ):
        assert programs.find(other) is None
    programs.end_update()
    programs.make(tensors[:1])
    programs.end_update()
    assert programs.find(tensors) is None, "a program that an update did not use is forgotten"


def test_no_tensor_of_a_bucket_is_kept_by_its_program():
    weight, plan, tensor = experts(1, 8, 10), LoadPlan(), torch.randn(8, 10).bfloat16()
    plan.record("a", tensor, weight, tensor, 0, 0)
    program, gone = BucketProgram(plan, [("a", tensor)]), weakref.ref(tensor)
    del tensor
    assert gone() is None and program.passed.shapes


def test_a_source_that_is_no_range_of_rows_is_not_planned():
    weight, tensor = experts(1, 8, 10), torch.randn(8, 10).bfloat16()
    plan = LoadPlan()
    assert not plan.record("copy", tensor, weight, tensor.clone(), 0, 0)
    assert not plan.record("columns", tensor, weight, tensor[:, :5], 0, 0)
    assert not plan.record("transposed", torch.randn(10, 8).bfloat16().t(), weight, tensor, 0, 0)
    assert not plan.quantizes("copy")
    assert plan.record("rows", tensor, weight, tensor[2:6], 0, 0) and plan.shards("rows")[0].source_row == 2
