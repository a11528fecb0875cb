# SPDX-License-Identifier: Apache-2.0
"""Many shards and copies in one launch on a GPU: each as if it were alone, wherever the bucket lies."""

import pytest
import torch

from flashrl_verl.quantization import numerics
from flashrl_verl.quantization.formats import fp8, fp8_block, int8
from flashrl_verl.quantization.row_table import RowJob, RowTable

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
CANARY = 64
"""Elements around the targets that nobody may write."""


def cut(bucket: torch.Tensor, sizes: list[int], gap: int) -> list[torch.Tensor]:
    parts, at = [], 0
    for size in sizes:
        parts.append(bucket[at : at + size])
        at += size + gap
    return parts


@pytest.mark.parametrize("fmt", [pytest.param(int8.FORMAT, id="int8"), pytest.param(fp8.FORMAT, id="fp8")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "columns, first, width, rows, gap",
    [
        (5120, 0, 5120, (1024, 512, 5120, 512), 0),
        (13824, 6912, 6912, (512, 1024), 0),
        (136, 0, 136, (7, 344, 1), 3),
        (344, 172, 172, (136, 17), 8),
        (768, 0, 768, (2048,) * 5, 16),
        (27648, 0, 13824, (64, 3), 0),
    ],
)
def test_every_shard_has_the_codes_and_scales_of_its_rows(columns, first, width, rows, gap, dtype, fmt):
    g = torch.Generator(device="cuda").manual_seed(columns + width)
    bucket = torch.empty((sum(rows) * columns) + gap * len(rows) + 512, dtype=dtype, device="cuda")
    shift = 0
    codes = torch.zeros(sum(rows) + 2, width, dtype=fmt.dtype, device="cuda")
    scales = torch.zeros(sum(rows) + 2, 1, device="cuda")
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    tables: list[tuple[int, RowTable]] = []
    for shift in (0, 256):  # the same layout elsewhere
        bucket.normal_(generator=g).mul_(torch.rand(1, device="cuda", generator=g) + 0.1)
        parts = [p.view(-1, columns) for p in cut(bucket[shift:], [n * columns for n in rows], gap)]
        ends = torch.tensor(rows).cumsum(0).tolist()
        jobs = [
            RowJob(p, codes[1 + e - n : 1 + e], scales[1 + e - n : 1 + e], fmt, first)
            for p, e, n in zip(parts, ends, rows, strict=True)
        ]
        if not tables:
            groups: dict[tuple, list[int]] = {}
            for i, job in enumerate(jobs):
                groups.setdefault(job.geometry(), []).append(i)
            tables = [(group[0], RowTable([jobs[i] for i in group])) for group in groups.values()]
        for i, table in tables:
            table.launch(parts[i], flag)
        whole = torch.cat([numerics.row_scales(p, fmt) for p in parts]).cpu()
        local = torch.cat([p[:, first : first + width] for p in parts]).cpu()
        expected = numerics.quantize_rows(local, fmt, whole)[0]
        assert torch.equal(scales[1:-1].cpu(), whole)
        assert torch.equal(numerics.as_bytes(codes[1:-1]).cpu(), numerics.as_bytes(expected))
        assert not flag.item()
    assert not numerics.as_bytes(codes)[[0, -1]].any() and not scales[[0, -1]].any()
    parts[-1][-1, -1] = float("nan")
    for i, table in tables:
        table.launch(parts[i], flag)
    assert flag.item() == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "columns, first, width, rows, gap",
    [
        (5120, 0, 5120, (1024, 512, 5120, 128), 0),
        (13824, 6912, 6912, (512, 1024), 0),
        (768, 384, 384, (256,) * 5, 16),
        (128, 0, 128, (128, 256), 3),
    ],
)
def test_every_shard_has_the_codes_and_scales_of_its_blocks(columns, first, width, rows, gap, dtype):
    fmt, g = fp8_block.FORMAT, torch.Generator(device="cuda").manual_seed(columns + width)
    bucket = torch.empty(sum(rows) * columns + gap * len(rows) + 512, dtype=dtype, device="cuda")
    codes = torch.zeros(sum(rows) + 2 * fmt.block, width, dtype=fmt.dtype, device="cuda")
    scales = torch.zeros(fmt.scale_shape(*codes.shape), device="cuda")
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    tables: list[tuple[int, RowTable]] = []
    for shift in (0, 256):  # the same layout elsewhere
        bucket.normal_(generator=g)
        parts = [p.view(-1, columns) for p in cut(bucket[shift:], [n * columns for n in rows], gap)]
        jobs, at = [], fmt.block
        for part in parts:
            there, blocks = slice(at, at + len(part)), slice(at // fmt.block, (at + len(part)) // fmt.block)
            jobs.append(RowJob(part, codes[there], scales[blocks], fmt, first))
            at += len(part)
        if not tables:
            groups: dict[tuple, list[int]] = {}
            for i, job in enumerate(jobs):
                groups.setdefault(job.geometry(), []).append(i)
            tables = [(group[0], RowTable([jobs[i] for i in group])) for group in groups.values()]
        for i, table in tables:
            table.launch(parts[i], flag)
        for part, job in zip(parts, jobs, strict=True):
            expected, expected_scales = numerics.quantize(part[:, first : first + width].cpu(), fmt)
            assert torch.equal(job.scales.cpu(), expected_scales)
            assert torch.equal(numerics.as_bytes(job.codes).cpu(), numerics.as_bytes(expected))
        assert not flag.item()
    assert not numerics.as_bytes(codes)[[0, -1]].any() and not scales[[0, -1]].any()
    parts[-1][-1, first + width - 1] = float("nan")
    for i, table in tables:
        table.launch(parts[i], flag)
    assert flag.item() == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes, gap", [((5120, 16, 2_000_000, 128, 1_048_576), 0), ((7, 1, 1000, 700_001), 1)])
def test_every_copy_is_one_and_nothing_else_is_written_or_looked_at(sizes, gap, dtype):
    from flashrl_verl.rollout.triton_scan import CopyTable

    bucket = torch.empty(sum(sizes) + gap * len(sizes) + 512, dtype=dtype, device="cuda")
    target = torch.zeros(sum(sizes) + CANARY * (len(sizes) + 1), dtype=dtype, device="cuda")
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    table = None
    for shift in (0, 256):
        bucket.normal_()
        sources = cut(bucket[shift:], list(sizes), gap)
        targets = cut(target[CANARY:], list(sizes), CANARY)
        table = table or CopyTable(list(zip(sources, targets, strict=True)))
        table.launch(sources[0], flag)
        expected = torch.zeros_like(target)
        for source, place in zip(sources, cut(expected[CANARY:], list(sizes), CANARY), strict=True):
            place.copy_(source)
        assert torch.equal(target, expected) and not flag.item()
    bucket[:shift] = float("nan")
    table.launch(sources[0], flag)
    assert not flag.item()
    for value in (float("nan"), float("inf"), float("-inf")):
        sources[-1][-1] = value
        table.launch(sources[0], flag)
        assert flag.item() == 1
        flag.zero_()
