# SPDX-License-Identifier: Apache-2.0
"""Kernels of the INT8 KV cache against float64 by hand."""

from dataclasses import dataclass

import pytest
import torch

pytestmark = pytest.mark.gpu


@dataclass
class Case:
    """Sequences of several lengths in pages that are scattered."""

    heads: int
    kv_heads: int
    size: int = 64
    slots: int = 16
    lengths: tuple[int, ...] = (1, 16, 17, 100)
    spread: float = 1.0
    """Standard deviation of keys, values and queries; of each token's another one, up to a thousand times larger."""


CASES = {
    "five share": Case(heads=10, kv_heads=2),
    "one head": Case(heads=1, kv_heads=1, lengths=(300,)),
    "sixteen share": Case(heads=16, kv_heads=1, lengths=(40, 41)),
    "long pages": Case(heads=4, kv_heads=2, slots=32, lengths=(31, 32, 33, 290)),
    "pages of a tile": Case(heads=4, kv_heads=2, slots=64, lengths=(63, 64, 65, 200)),
    "pages of two tiles": Case(heads=4, kv_heads=2, slots=128, lengths=(50, 128, 130, 300)),
    "large": Case(heads=8, kv_heads=2, lengths=(200, 77), spread=30.0),
    "small": Case(heads=8, kv_heads=2, lengths=(200, 77), spread=1e-3),
    "an empty row": Case(heads=8, kv_heads=2, lengths=(9, 0, 50)),
    "head of 128": Case(heads=40, kv_heads=8, size=128, lengths=(8287, 1, 700, 3000)),
    "head of 256": Case(heads=8, kv_heads=4, size=256, lengths=(500, 1000)),
    "many": Case(heads=28, kv_heads=4, size=128, lengths=tuple(range(1, 2000, 9))),
}


class Filled:
    """A cache that the write kernel has filled, and what was written."""

    def __init__(self, case: Case, seed: int):
        from flashrl_verl.attention import kernels, pages

        self.case = case
        self.generator = torch.Generator().manual_seed(seed)
        counts = [-(-length // case.slots) for length in case.lengths]
        order = torch.randperm(sum(counts) + 3, generator=self.generator).int()
        shape = pages.shape(len(order), case.slots, case.kv_heads, case.size)
        # What was there before is anything, NaN among its scales.
        self.cache = torch.randint(-128, 128, shape, generator=self.generator).to(torch.int8).cuda()
        self.table = torch.nn.utils.rnn.pad_sequence(order[: sum(counts)].split(counts), batch_first=True)
        self.keys, self.values = ([self._draw(length) for length in case.lengths] for _ in range(2))
        slots = torch.cat([self.slots(row, torch.arange(length)) for row, length in enumerate(case.lengths)])
        mixed = torch.randperm(len(slots), generator=self.generator)
        both = [torch.cat(parts)[mixed].cuda() for parts in (self.keys, self.values)]
        left_out = len(slots) // 3
        both = [torch.cat([part, part[:left_out] * 2]) for part in both]
        places = torch.cat([slots[mixed], torch.full([left_out], -1)]).cuda()
        kernels.write(*both, self.cache, places)
        self.table = self.table.cuda()

    def _draw(self, tokens: int) -> torch.Tensor:
        case = self.case
        size = torch.rand(tokens, case.kv_heads, 1, generator=self.generator) * 999 + 1 if case.spread != 1.0 else 1.0
        drawn = torch.randn(tokens, case.kv_heads, case.size, generator=self.generator) * size * case.spread
        return drawn.bfloat16()

    def slots(self, row: int, at: torch.Tensor) -> torch.Tensor:
        return self.table[row, at // self.case.slots].long() * self.case.slots + at % self.case.slots

    def decode(self, plan, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries, and what the kernel makes of them."""
        from flashrl_verl.attention import kernels

        case = self.case
        query = torch.randn(rows, case.heads, case.size, generator=self.generator)
        query = (query / case.spread).bfloat16().cuda()
        out = torch.full_like(query, float("nan"))
        kernels.decode(query, self.cache, self.table, plan, case.size**-0.5, out)
        return query.cpu(), out.cpu()


def planned(case: Case, new=(), padding=0):
    """Of a step with the last ``new`` tokens of each sequence, by default one, and rows that pad it; its rows."""
    from flashrl_verl.attention import kernels

    starts = [0, *torch.tensor(new or [1] * len(case.lengths)).cumsum(0).tolist()]
    rows = starts[-1] + padding
    starts, lengths = (  # behind the batch's sequences one that pads it
        torch.tensor(numbers, dtype=torch.int32, device="cuda")
        for numbers in (starts + starts[-1:], [*case.lengths, 0])
    )
    plan = kernels.Plan.make(rows + 3, case.heads, case.kv_heads, case.size, starts.device)
    # As after a larger step.
    plan.starts.fill_(1 << 20)
    plan.splits.fill_(-1)
    plan.sums.fill_(float("nan"))
    plan.state.fill_(float("nan"))
    plan.fill(starts, lengths, rows)
    return plan, rows


def quantized(x: torch.Tensor) -> torch.Tensor:
    """Codes times scales; x [..., size]. Quotients are float32, by IEEE: at a tie between two codes the last bit
    decides."""
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (x / scale).round(), 0.0).double() * scale.double()


def attention(query, keys, values) -> torch.Tensor:
    """One sequence in float64: query [heads, size], keys and values [tokens, kv_heads, size]."""
    heads, size = query.shape
    kv_heads = keys.shape[1]
    scores = torch.einsum("hgd,thd->hgt", query.double().view(kv_heads, heads // kv_heads, size), keys) / size**0.5
    return torch.einsum("hgt,thd->hgd", scores.softmax(-1), values).reshape(heads, size)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_read_and_decoded_equals_float64(case):
    """What is read back is codes times scales, rounded once; what is decoded is as exact as the output's dtype."""
    from flashrl_verl.attention import kernels

    filled = Filled(case, seed=3)
    starts = torch.tensor([0, *torch.tensor(case.lengths).cumsum(0)], dtype=torch.int32, device="cuda")
    coded = [quantized(torch.cat(written)) for written in (filled.keys, filled.values)]
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2.0**-8)):
        found = kernels.read(filled.cache, filled.table, starts, max(case.lengths), sum(case.lengths), dtype)
        for got, expected in zip(found, coded, strict=True):
            assert torch.allclose(got.cpu().double(), expected, rtol=tolerance, atol=0)

    query, out = filled.decode(*planned(case))
    for row, (keys, values) in enumerate(zip(*(part.split(case.lengths) for part in coded), strict=True)):
        if not len(keys):
            assert not out[row].any()
            continue
        expected = attention(query[row], keys, values)
        difference = (out[row].double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
        assert (difference < 5e-3).all(), (row, float(difference.max()))


@pytest.mark.parametrize(
    ("case", "new"),
    [
        ("five share", (1, 1, 1, 1)),
        ("five share", (1, 16, 3, 40)),
        ("an empty row", (4, 0, 50)),
        ("pages of two tiles", (1, 128, 129, 260)),
        ("head of 128", (300, 1, 200, 1)),
    ],
)
def test_a_row_sees_its_sequence_up_to_itself_and_padding_nothing(case, new):
    """Against a loop and float64; a sequence and rows behind all pad the batch."""
    case = CASES[case]
    filled = Filled(case, seed=4)
    expected = [(i, case.lengths[i] - n + at + 1) for i, n in enumerate(new) for at in range(n)]
    plan, rows = planned(case, new, padding=200)
    assert [(parts[0][0], parts[-1][2]) for parts in splits_by_row(plan)[: len(expected)]] == expected
    assert not any(splits_by_row(plan)[len(expected) :])

    query, out = filled.decode(plan, rows)
    assert not out[len(expected) :].any()
    for row, (sequence, length) in enumerate(expected):
        keys, values = (quantized(part[sequence][:length]) for part in (filled.keys, filled.values))
        wanted = attention(query[row], keys, values)
        difference = (out[row].double() - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-30)
        assert (difference < 5e-3).all(), (row, float(difference.max()))


def splits_by_row(plan) -> list[list[tuple[int, int, int]]]:
    """Of each row sequence, first token and end of its splits, which follow one another from 0."""
    starts, splits = plan.starts.tolist(), plan.splits.tolist()
    assert all(split == [-1] * 4 for split in splits[starts[-1] :]), "what no program would look at"
    rows = []
    for row, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
        parts = splits[start:stop]
        assert [part[2] for part in parts] == [0, *(part[3] for part in parts)][: len(parts)]
        assert all(part[0] == row and part[1] == parts[0][1] and part[3] > part[2] for part in parts)
        rows.append([tuple(part[1:]) for part in parts])
    return rows


@pytest.mark.parametrize("lengths", [(1,), (20_000,), (5,) * 300, (6_000, *range(1, 2_000, 8)), (9_000, 8_000, 1, 0)])
def test_no_split_is_longer_than_an_even_share(lengths):
    from flashrl_verl.attention import kernels

    plan, rows = planned(Case(heads=8, kv_heads=2, lengths=lengths))
    found = splits_by_row(plan)
    assert [parts[-1][2] if parts else 0 for parts in found[:rows]] == list(lengths)
    share = -(-sum(-(-length // kernels._TILE) for length in lengths) // plan.budget)
    longest = max(end - first for parts in found for _, first, end in parts)
    assert longest <= kernels._TILE * max(kernels._LEAST_TILES, share)
    assert sum(map(len, found)) <= rows + plan.budget


def test_what_is_not_finite_comes_out():
    """NaN and infinity of one token reach the output of the heads that read it, and no other."""
    from flashrl_verl.attention import kernels

    for bad in (float("nan"), float("inf")):
        for part in (0, 1):
            filled = Filled(Case(heads=4, kv_heads=2, lengths=(40, 40)), seed=5)
            token = [filled.keys[0][7:8].clone(), filled.values[0][7:8].clone()]
            token[part][0, 1, 5] = bad
            place = filled.slots(0, torch.tensor([7], device="cuda"))
            kernels.write(*(half.cuda() for half in token), filled.cache, place)
            _, out = filled.decode(*planned(filled.case))
            assert out[0, 2:].isnan().all() and out[0, :2].isfinite().all() and out[1].isfinite().all(), (bad, part)
