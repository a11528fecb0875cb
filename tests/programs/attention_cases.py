# SPDX-License-Identifier: Apache-2.0
"""The kernels of ``flashrl_verl.attention`` against float64 by hand. As a program: all of it, in Triton's interpreter.

The pages' layout is written out here again, byte by byte, so that a mistake in the code's own views shows.
"""

import struct
from dataclasses import dataclass

import torch

from flashrl_verl.attention import kernels, pages


@dataclass
class Case:
    """Sequences of several lengths in pages that are scattered."""

    heads: int
    kv_heads: int
    size: int = 64
    slots: int = 16
    lengths: tuple[int, ...] = (1, 16, 17, 100)
    dtype: torch.dtype = torch.bfloat16
    spread: float = 1.0
    """Standard deviation of keys, values and queries; of each token's another one, up to a thousand times larger."""


_SHORT = 10
"""Tokens; more take minutes in Triton's interpreter."""

CASES = {
    "grouped": Case(heads=10, kv_heads=2),
    "seven share": Case(heads=14, kv_heads=2, lengths=(129, 5)),
    "one head": Case(heads=1, kv_heads=1, lengths=(300,)),
    "each its own": Case(heads=4, kv_heads=4, lengths=(33, 256, 1)),
    "sixteen share": Case(heads=16, kv_heads=1, lengths=(40, 41)),
    "long pages": Case(heads=4, kv_heads=2, slots=32, lengths=(31, 32, 33, 290)),
    "blocks of a tile": Case(heads=4, kv_heads=2, slots=64, lengths=(63, 64, 65, 200)),
    "blocks of two tiles": Case(heads=4, kv_heads=2, slots=128, lengths=(50, 128, 130, 300)),
    "float16": Case(heads=4, kv_heads=2, dtype=torch.float16),
    "large": Case(heads=8, kv_heads=2, lengths=(200, 77), spread=30.0),
    "small": Case(heads=8, kv_heads=2, lengths=(200, 77), spread=1e-3),
    "an empty row": Case(heads=8, kv_heads=2, lengths=(9, 0, 50)),
}
ON_GPU = {
    "head of 128": Case(heads=40, kv_heads=8, size=128, lengths=(8287, 1, 700, 3000)),
    "head of 256": Case(heads=8, kv_heads=4, size=256, lengths=(500, 1000)),
    "many": Case(heads=28, kv_heads=4, size=128, lengths=tuple(range(1, 2000, 9))),
    "not cut": Case(heads=40, kv_heads=8, size=128, lengths=tuple(range(50, 562))),
}


class Filled:
    """A cache that the write kernel has filled, and what was written."""

    def __init__(self, case: Case, device: str, seed: int):
        self.case, self.device = case, device
        self.generator = torch.Generator().manual_seed(seed)
        counts = [-(-length // case.slots) for length in case.lengths]
        order = torch.randperm(sum(counts) + 3, generator=self.generator).tolist()
        self.cache = torch.randint(
            -128, 128, pages.shape(len(order), case.slots, case.kv_heads, case.size), generator=self.generator
        )  # what was there before is anything, NaN among its scales
        self.cache = self.cache.to(torch.int8).to(device)
        self.pages = pages.pages_of(self.cache)
        self.table = torch.zeros(len(counts), max(max(counts), 1), dtype=torch.int32)
        for row, count in enumerate(counts):
            self.table[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        self.keys, self.values = ([self._draw(length) for length in case.lengths] for _ in range(2))
        slots = torch.cat([self.slots(row, torch.arange(length)) for row, length in enumerate(case.lengths)])
        mixed = torch.randperm(len(slots), generator=self.generator)
        both = [torch.cat(parts)[mixed].to(device) for parts in (self.keys, self.values)]
        self.left_out = len(slots) // 3
        both = [torch.cat([part, part[: self.left_out] * 2]) for part in both]
        places = torch.cat([slots[mixed], torch.full([self.left_out], -1)]).to(device)
        kernels.write(*both, self.pages, places)
        self.table, self.lengths = self.table.to(device), torch.tensor(case.lengths, dtype=torch.int32, device=device)

    def _draw(self, tokens: int) -> torch.Tensor:
        case = self.case
        size = torch.rand(tokens, case.kv_heads, 1, generator=self.generator) * 999 + 1 if case.spread != 1.0 else 1.0
        drawn = torch.randn(tokens, case.kv_heads, case.size, generator=self.generator) * size * case.spread
        return drawn.to(case.dtype)

    def slots(self, row: int, at: torch.Tensor) -> torch.Tensor:
        at = at.to(self.table.device)
        return self.table[row, at // self.case.slots].long() * self.case.slots + at % self.case.slots

    def slot(self, row: int, at: int) -> int:
        return int(self.slots(row, torch.tensor(at)))

    def query(self) -> torch.Tensor:
        case = self.case
        drawn = torch.randn(len(case.lengths), case.heads, case.size, generator=self.generator)
        return (drawn / case.spread).to(case.dtype).to(self.device)


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


def check_pages(case: Case, device: str) -> None:
    """Codes and scales lie where the layout says and are what rounding by hand gives: all of short sequences, of a long
    one those of three tokens."""
    filled = Filled(case, device, seed=1)
    raw = filled.cache.cpu().numpy().tobytes()
    kv, size, slots = case.kv_heads, case.size, case.slots
    half = kv * slots * (size + 4)
    generator = torch.Generator().manual_seed(2)
    for row, length in enumerate(case.lengths):
        some = torch.randint(max(length, 1), (3,), generator=generator).tolist()
        for at in range(length) if length <= _SHORT else some:
            page, slot = divmod(filled.slot(row, at), slots)
            for head in range(kv):
                for part, (x, start) in enumerate(
                    ((filled.keys[row][at, head], 0), (filled.values[row][at, head], half))
                ):
                    base = page * 2 * half + start
                    (scale,) = struct.unpack_from("f", raw, base + kv * slots * size + (head * slots + slot) * 4)
                    places = [
                        base + head * slots * size + (slot * size + d if part == 0 else d * slots + slot)
                        for d in range(size)
                    ]
                    codes = torch.tensor([struct.unpack_from("b", raw, place)[0] for place in places]).double()
                    assert abs(scale - float(x.double().abs().max()) / 127) <= 1e-7 * scale
                    exact = x.double() / scale if scale else torch.zeros(size)
                    assert ((codes - exact).abs() <= 0.5 + 1e-5).all() and codes.abs().max() <= 127


def check_decode(case: Case, device: str) -> None:
    """As exact as the output's dtype, against attention over codes times scales."""
    filled = Filled(case, device, seed=3)
    query = filled.query()
    out = torch.full_like(query, float("nan"))
    scratch = kernels.Scratch.make(len(case.lengths), case.heads, case.kv_heads, case.size, query.device)
    kernels.decode(query, filled.pages, filled.table, filled.lengths, case.size**-0.5, out, scratch)
    assert out.isfinite().all()
    for row, length in enumerate(case.lengths):
        if length == 0:
            assert not out[row].any()
            continue
        expected = attention(query[row].cpu(), quantized(filled.keys[row]), quantized(filled.values[row]))
        difference = (out[row].cpu().double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
        assert difference.max() < 5e-3, (row, length, float(difference.max()))


def check_read(case: Case, device: str) -> None:
    """What is read back is codes times scales, rounded once."""
    filled = Filled(case, device, seed=4)
    starts = torch.tensor([0, *torch.tensor(case.lengths).cumsum(0)], dtype=torch.int32, device=device)
    total, longest = sum(case.lengths), max(case.lengths)
    bf16 = 2.0**-8 if device == "cuda" else 2.0**-7  # Triton's interpreter cuts off where a GPU rounds
    for dtype in (torch.float32, torch.bfloat16):
        found = kernels.read(filled.pages, filled.table, starts, longest, total, dtype)
        for got, written in zip(found, (filled.keys, filled.values), strict=True):
            expected = quantized(torch.cat(written))
            assert torch.allclose(got.cpu().double(), expected, rtol=bf16 if dtype is torch.bfloat16 else 1e-6, atol=0)


def check_what_is_not_finite(device: str) -> None:
    """NaN and infinity of one token reach the output of the heads that read it, and no other."""
    case = Case(heads=4, kv_heads=2, lengths=(40, 40))
    for bad in (float("nan"), float("inf")):
        for part in ("key", "value"):
            filled = Filled(case, device, seed=5)
            key, value = filled.keys[0][7:8].clone(), filled.values[0][7:8].clone()
            (key if part == "key" else value)[0, 1, 5] = bad
            kernels.write(
                key.to(device), value.to(device), filled.pages, torch.tensor([filled.slot(0, 7)], device=device)
            )
            query = filled.query()
            out = torch.zeros_like(query)
            scratch = kernels.Scratch.make(2, 4, 2, case.size, query.device)
            kernels.decode(query, filled.pages, filled.table, filled.lengths, case.size**-0.5, out, scratch)
            assert out[0, 2:].isnan().all() and out[0, :2].isfinite().all() and out[1].isfinite().all(), (bad, part)


if __name__ == "__main__":
    for name, chosen in CASES.items():
        for check in (check_pages, check_decode, check_read):
            check(chosen, "cpu")
            print(name, check.__name__, flush=True)
    check_what_is_not_finite("cpu")
    print("SAME")
