# SPDX-License-Identifier: Apache-2.0
"""Our kernels on this machine, against float64: a linear layer's products have to be near those of the BF16 weights,
and attention over INT8 keys and values near that over codes times scales."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from flashrl_verl.attention import require_kv_kernel
from flashrl_verl.quantization.formats import INT8_UNROTATED
from flashrl_verl.quantization.gemm import LinearKernel, device_kernel, linear_kernel
from flashrl_verl.quantization.numerics import WeightFormat, quantize_rows
from flashrl_verl.quantization.rows import quantize_rows_into
from flashrl_verl.settings import KVCache
from flashrl_verl.tools.check import Finding

LIMITS = {"int8": 0.025, "fp8": 0.08}
"""Largest relative error of a product in any row or token (root mean square). A CPU has 1.4 % and 4.1 %."""

ATTENTION_LIMIT = 5e-3
"""Largest relative error of a head's output: BF16 rounds it to 2**-9 of a value, and weights have FP16's bits."""

_TOKENS = (1, 32, 257)
"""Tokens of a call: one sequence that is decoded, a small batch, a prefill of no round number. Kernels differ by it."""
_ROWS, _LENGTHS = 256, (384, 5120, 13824)
"""Rows of weights: short ones, and as long as in real models: one that stays in registers, one that is read twice
(``quantization/rows.py``)."""
_SLOTS = 16
"""Tokens of a page of the KV cache: vLLM's block size."""
_ATTENTION = ((14, 2, 64, (1, 17, 64, 300, 1025)), (40, 8, 128, (1, 16, 33, 100) * 50))
"""Query heads, KV heads, elements of a head (of Qwen2.5-0.5B and -32B), tokens of the sequences: some that
several programs share, and many short ones."""
_REMEDY = (
    "do not train with it; install tested versions (`flashrl version`), empty ~/.triton/cache, or try another GPU; "
    "then report it"
)


def check_format(fmt: WeightFormat, places: Sequence[torch.device]) -> Iterator[Finding]:
    """Quantize weights and multiply by them, on every GPU or on the CPU.

    Raises:
        ConfigError: there is no kernel for it here; the message says what to set instead.
    """
    multiply, limit, worst = linear_kernel(fmt), LIMITS[fmt.name], 0.0
    for place in places:
        with _current(place):
            errors = [product_error(fmt, place, multiply, length) for length in _LENGTHS]
        for error, length in zip(errors, _LENGTHS, strict=True):
            if not error <= limit:  # NaN is not
                text = f"products of {length} terms {error:.1%} from float64 in the worst row or token"
                yield Finding("error", fmt.name, f"on {place}: {text} (at most {limit:.1%})", _REMEDY)
                return
        worst = max(worst, *errors)
    yield Finding("ok", fmt.name, f"products ({device_kernel(fmt).value}) {worst:.1%} from float64")


def _current(place: torch.device) -> contextlib.AbstractContextManager:
    return torch.cuda.device(place) if place.type == "cuda" else contextlib.nullcontext()


def product_error(fmt: WeightFormat, place: torch.device, multiply: LinearKernel, length: int) -> float:
    """Largest root mean square over a row's tokens or a token's rows, in units of what such a sum is by chance: small
    rows count as large ones. NaN if an output is not finite."""
    generator, errors = torch.Generator().manual_seed(length), []
    # Rows have sizes of their own, up to a factor of 1000 apart: no scale passes for another's.
    weight = (torch.randn(_ROWS, length, generator=generator) * torch.logspace(-3, 0, _ROWS).unsqueeze(1)).bfloat16()
    codes, scales = torch.zeros(weight.shape, dtype=fmt.dtype, device=place), torch.zeros(_ROWS, 1, device=place)
    quantize_rows_into(weight.to(place), codes, scales, fmt)  # as a weight update does
    weight = weight.double()
    for count in _TOKENS:
        x = torch.randn(count, length, generator=generator).bfloat16()
        output, x = multiply(x.to(place), codes, scales, None).cpu().double(), x.double()
        errors.append((output - x @ weight.T) / (x.square() @ weight.square().T).sqrt())
    squares = torch.cat(errors).square()
    worst = torch.maximum(squares.mean(0).max(), squares.mean(1).max()).sqrt()
    return float(worst) if squares.isfinite().all() else float("nan")


# ---- attention ----


def check_attention(places: Sequence[torch.device]) -> Iterator[Finding]:
    """Write keys and values to pages and decode one token of each sequence, on every GPU.

    Raises:
        ConfigError: nothing computes with an INT8 KV cache here; the message says what to set instead.
    """
    require_kv_kernel(KVCache.INT8_PER_TOKEN_HEAD)
    for place in places:
        seen = [attention_error(*case, place) for case in _ATTENTION]
        text = f"a head's output is {max(seen):.1e} from float64 (at most {ATTENTION_LIMIT:g})"
        if not all(error <= ATTENTION_LIMIT for error in seen):  # NaN is not
            yield Finding("error", "int8 KV cache", f"on {place}: {text}", f"flashrl.kv_cache=auto; {_REMEDY}")
            return
    yield Finding("ok", "int8 KV cache", text)


def attention_error(heads: int, kv_heads: int, size: int, lengths: tuple[int, ...], place: torch.device) -> float:
    """Largest relative error of a head's output, NaN if one is not finite, for sequences of ``lengths`` tokens in
    scattered pages, on a GPU."""
    from flashrl_verl.attention import kernels, pages  # Triton is only where a GPU is

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
    # Each token's value has a size of its own: a scale that is read for another one shows.
    values = values * 10 ** (2 * torch.rand(len(slots), kv_heads, 1, generator=generator))
    keys, values = keys.bfloat16(), values.bfloat16()
    with _current(place):
        shape = pages.shape(sum(counts), _SLOTS, kv_heads, size)
        cache = torch.full(shape, -1, dtype=torch.int8, device=place)  # as scales NaN
        out = torch.full_like(query, float("nan"), device=place)
        kernels.write(keys.to(place), values.to(place), cache, slots.to(place))
        plan = kernels.Plan.make(len(lengths), heads, kv_heads, size, place)
        tokens = torch.tensor(lengths, dtype=torch.int32, device=place)
        plan.fill(torch.arange(len(lengths) + 1, dtype=torch.int32, device=place), tokens, len(lengths))
        kernels.decode(query.to(place), cache, table.to(place), plan, size**-0.5, out)
    keys, values = (
        codes.double() * s.double() for codes, s in (quantize_rows(x, INT8_UNROTATED) for x in (keys, values))
    )
    errors = []
    for row, (k, v) in enumerate(zip(keys.split(lengths), values.split(lengths), strict=True)):
        scores = torch.einsum("hgd,thd->hgt", query[row].double().unflatten(0, (kv_heads, -1)), k) * size**-0.5
        exact = torch.einsum("hgt,thd->hgd", scores.softmax(-1), v).flatten(0, 1)
        errors.append((out[row].cpu().double() - exact).norm(dim=-1) / exact.norm(dim=-1))
    worst = torch.cat(errors)
    return float(worst.max()) if worst.isfinite().all() else float("nan")
