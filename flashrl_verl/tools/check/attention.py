# SPDX-License-Identifier: Apache-2.0
"""Our attention over INT8 keys and values (``flashrl.kv_cache=int8_per_token_head``): written to pages and decoded,
against float64 over codes times scales that are computed here again, and know nothing of how a page is laid out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from flashrl_verl.tools.check.devices import Gpu
from flashrl_verl.tools.check.findings import Finding, fail, ok, skipped
from flashrl_verl.tools.check.subjects import ATTENTION

_LIMIT = 5e-3
"""Largest relative error of a head's output, of its norm: BF16 rounds it to 2**-9 of a value, so 2e-3 at most, and
weights have FP16's bits (tests/numerics/test_attention.py has the same limit). A value's scale that is off by a
hundredth gives a hundredth."""

_CASES = ((14, 2, 64, (1, 17, 64, 300, 1025)), (40, 8, 128, (1, 16, 33, 100) * 50))
"""Query heads, KV heads and elements of a head, of Qwen2.5-0.5B and -32B, and tokens of the sequences: few long ones,
which are cut in splits for several programs each, and too many for that."""

_SLOTS = 16
"""Tokens of a page: vLLM's block size."""

_DECADES = 2.0
"""Each token's value has a size of its own, up to a hundred times the smallest: a scale that is read for another one
shows."""


def check_attention(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """Args: gpus: all that this process sees; those that the kernels do not take are told."""
    from flashrl_verl.attention.limits import CAPABILITY

    if not gpus:
        yield skipped(ATTENTION, "there is no GPU, and its kernels run on nothing else")
        return
    if old := [f"{g.name} ({g.capability / 10:.1f})" for g in gpus if g.capability < CAPABILITY]:
        yield skipped(
            ATTENTION, f"flashrl.kv_cache=int8_per_token_head needs {CAPABILITY / 10:.1f}, here is {', '.join(old)}"
        )
        return
    worst = 0.0
    for gpu in gpus:
        for heads, kv_heads, size, lengths in _CASES:
            error = largest_error(heads, kv_heads, size, lengths, torch.device("cuda", gpu.index))
            if not error < _LIMIT:  # NaN is not
                text = f"{heads} heads of {size} over {kv_heads} on GPU {gpu.index}: {error:.1e} from float64"
                remedy = (
                    "flashrl.kv_cache=auto; or `rm -r ~/.triton/cache`, tested versions of torch and Triton, another "
                    "GPU"
                )
                yield fail(ATTENTION, f"{text} in a head's output, more than {_LIMIT:g}", remedy)
                return
            worst = max(worst, error)
    yield ok(
        ATTENTION,
        f"keys and values through INT8 pages: {worst:.1e} from float64 (at most {_LIMIT:g}), on {len(gpus)} GPU(s)",
    )


def largest_error(heads: int, kv_heads: int, size: int, lengths: tuple[int, ...], device: torch.device) -> float:
    """Write sequences to scattered pages and decode one token of each.

    Args:
        heads: query heads.
        kv_heads: key and value heads.
        size: elements of a head.
        lengths: tokens of the sequences.
        device: a GPU.

    Returns:
        Largest relative error of a head's output; NaN if one is not finite.
    """
    from flashrl_verl.attention import kernels, pages

    generator = torch.Generator().manual_seed(size)
    counts = [-(-length // _SLOTS) for length in lengths]
    order = torch.randperm(sum(counts), generator=generator).int().split(counts)
    table = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)
    slots = torch.cat(
        [row.long().repeat_interleave(_SLOTS)[:n] * _SLOTS for row, n in zip(order, lengths, strict=True)]
    )
    slots += torch.cat([torch.arange(length) % _SLOTS for length in lengths])
    query = torch.randn(len(lengths), heads, size, generator=generator).bfloat16()
    keys, values = torch.randn(2, len(slots), kv_heads, size, generator=generator)
    values = values * 10 ** (_DECADES * torch.rand(len(slots), kv_heads, 1, generator=generator))
    keys, values = keys.bfloat16(), values.bfloat16()
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        cache = torch.full(
            pages.shape(sum(counts), _SLOTS, kv_heads, size), -1, dtype=torch.int8, device=device
        )  # NaN: scales
        views, out = pages.pages_of(cache), torch.full_like(query, float("nan"), device=device)
        kernels.write(keys.to(device), values.to(device), views, slots.to(device))
        scratch = kernels.Scratch.make(len(lengths), heads, kv_heads, size, device)
        tokens = torch.tensor(lengths, dtype=torch.int32, device=device)
        kernels.decode(query.to(device), views, table.to(device), tokens, size**-0.5, out, scratch)
    errors = []
    for row, (k, v) in enumerate(zip(_coded(keys).split(lengths), _coded(values).split(lengths), strict=True)):
        scores = torch.einsum("hgd,thd->hgt", query[row].double().unflatten(0, (kv_heads, -1)), k) * size**-0.5
        exact = torch.einsum("hgt,thd->hgd", scores.softmax(-1), v).flatten(0, 1)
        errors.append((out[row].cpu().double() - exact).norm(dim=-1) / exact.norm(dim=-1))
    worst = torch.cat(errors)
    return float(worst.max()) if worst.isfinite().all() else float("nan")


def _coded(x: torch.Tensor) -> torch.Tensor:
    """Codes times scales of keys or values [tokens, heads, size], in float64. Quotients are float32, as the kernel's:
    at a tie between two codes the last bit decides."""
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True) / torch.tensor(127.0)
    return (x / scale).round().double() * scale.double()
