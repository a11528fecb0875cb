# SPDX-License-Identifier: Apache-2.0
"""The fused row kernel: rotate, absmax, scale, round and store in one pass over a weight row, as ``numerics.py``
defines them.

One program a row, which lies in registers as two pieces (a power of two of columns, and the rest rounded up to one), so
that few lanes are idle. Three things make it as fast as memory allows:

- absmax is a maximum of integers: bit patterns of non-negative floats are ordered as their values are, Inf and NaN
  above all, so one maximum finds both the absmax and a row that is not finite;
- the IEEE quotient x / s takes one multiplication and four fused multiply-adds instead of a division. With r = RN(1 /
  s) and q = RN(x r), the remainder x - q s is exact in an FMA; q + r (x - q s) is within an ulp of the quotient, and
  the same step once more gives the correctly rounded one (P. Markstein, "Computation of elementary functions on the IBM
  RISC System/6000 processor", IBM J. Res. Dev. 34(1), 1990). It holds while nothing underflows, so a row with a scale
  outside [2^-80, 2^80] is divided;
- adding 1.5 * 2^23 rounds to an integer, half to even, and leaves it in the low bits: no conversion.
"""

import triton
import triton.language as tl

ROUND = tl.constexpr(12582912.0)
"""1.5 * 2^23: float32 has no fraction bits there. Codes are below 2^9, far from 2^22, where this would end."""

_LEAST, _MOST = tl.constexpr(2.0**-80), tl.constexpr(2.0**80)
"""Scales between which x, q s and the remainder are all normal: |x| <= 448 s, and a remainder is at least 2^-48 s."""


@triton.jit
def _magnitudes(x, WIDE: tl.constexpr):
    """Bits of |x| in the width of its dtype: 16-bit sources stay 16 bits wide in registers until the codes are
    computed."""
    if WIDE:
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        bits = x.to(tl.int16, bitcast=True) & 0x7FFF
    return bits


@triton.jit
def _absmax(bits, dtype: tl.constexpr, WIDE: tl.constexpr):
    """The float32 value of the largest magnitude; Inf or NaN where there was one."""
    if WIDE:
        value = bits.to(tl.float32, bitcast=True)
    else:
        value = bits.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return value


@triton.jit
def _rotate(x, SIZE: tl.constexpr, STAGES: tl.constexpr):
    """``numerics.rotate_weight`` of [SIZE] by blocks of 2^STAGES, float32; x itself without stages."""
    if STAGES > 0:
        x = x.to(tl.float32)
    for stage in tl.static_range(STAGES):
        pairs = tl.permute(tl.reshape(x, (SIZE >> (stage + 1), 2, 1 << stage)), (0, 2, 1))
        a, b = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (SIZE,))
    if STAGES > 0:
        x *= 1.0 / (1 << STAGES)
    return x


@triton.jit
def _codes(x, scale, inverse, EXACT: tl.constexpr, INTEGER: tl.constexpr, dtype: tl.constexpr):
    x = x.to(tl.float32)
    if EXACT:
        quotient = tl.div_rn(x, scale)
    else:
        quotient = x * inverse
        # The remainder with its sign turned, so that -0 stays -0, which E4M3 has a code for. Triton negates as 0 - x:
        # negating the remainder instead of the inverse would make it +0.
        quotient = tl.fma(tl.fma(quotient, scale, -x), -inverse, quotient)
        quotient = tl.fma(tl.fma(quotient, scale, -x), -inverse, quotient)
    # No clamp: |x| / scale exceeds the largest code by at most a rounding error, which both conversions round back.
    if INTEGER:
        return (quotient + ROUND).to(tl.int32, bitcast=True).to(dtype)
    return quotient.to(dtype)  # half to even


@triton.jit
def _store(q_ptr, q_col, x, offsets, first, k_local, scale, inverse, EXACT: tl.constexpr, INTEGER: tl.constexpr):
    keep = (offsets >= first) & (offsets < first + k_local)
    codes = _codes(x, scale, inverse, EXACT, INTEGER, q_ptr.dtype.element_ty)
    tl.store(q_ptr + (offsets - first) * q_col, codes, mask=keep)


@triton.jit
def _scale(bits, s_ptr, dtype: tl.constexpr, WIDE: tl.constexpr, CODE_MAX: tl.constexpr):
    """A row's scale from the bits of its absmax, stored."""
    scale = tl.div_rn(_absmax(bits, dtype, WIDE), CODE_MAX)
    scale = tl.where(scale == 0.0, 1.0, scale)
    tl.store(s_ptr, scale)
    return scale


@triton.jit
def quantize_rows_kernel(
    w_ptr, q_ptr, s_ptr, k, first, k_local, w_row, w_col, q_row, q_col, s_row,
    CODE_MAX: tl.constexpr, INTEGER: tl.constexpr, STAGES: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """One row of ``w_ptr`` [N, k], rotated by blocks of 2^STAGES (0: not), to codes of columns
    ``first : first + k_local`` and one scale.

    ``HEAD <= k <= HEAD + TAIL``: both pieces stay in registers.
    """
    dtype: tl.constexpr = w_ptr.dtype.element_ty if STAGES == 0 else tl.float32
    WIDE: tl.constexpr = dtype == tl.float32
    row = tl.program_id(0).to(tl.int64)
    w_ptr, q_ptr, s_ptr = w_ptr + row * w_row, q_ptr + row * q_row, s_ptr + row * s_row
    head = tl.arange(0, HEAD)
    x = _rotate(tl.load(w_ptr + head * w_col), HEAD, STAGES)
    bits = tl.max(_magnitudes(x, WIDE), 0)
    if TAIL > 0:
        tail = HEAD + tl.arange(0, TAIL)
        y = _rotate(tl.load(w_ptr + tail * w_col, mask=tail < k, other=0.0), TAIL, STAGES)
        bits = tl.maximum(bits, tl.max(_magnitudes(y, WIDE), 0))
    scale = _scale(bits, s_ptr, dtype, WIDE, CODE_MAX)
    inverse = tl.div_rn(1.0, scale)
    if (scale >= _LEAST) & (scale <= _MOST):
        _store(q_ptr, q_col, x, head, first, k_local, scale, inverse, False, INTEGER)
        if TAIL > 0:
            _store(q_ptr, q_col, y, tail, first, k_local, scale, inverse, False, INTEGER)
    else:
        _store(q_ptr, q_col, x, head, first, k_local, scale, inverse, True, INTEGER)
        if TAIL > 0:
            _store(q_ptr, q_col, y, tail, first, k_local, scale, inverse, True, INTEGER)


@triton.jit
def quantize_long_rows_kernel(
    w_ptr, q_ptr, s_ptr, k, first, k_local, w_row, w_col, q_row, q_col, s_row,
    CODE_MAX: tl.constexpr, INTEGER: tl.constexpr, STAGES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """As ``quantize_rows_kernel``, for rows that registers do not hold: read twice, chunk by chunk."""
    dtype: tl.constexpr = w_ptr.dtype.element_ty if STAGES == 0 else tl.float32
    WIDE: tl.constexpr = dtype == tl.float32
    row = tl.program_id(0).to(tl.int64)
    w_ptr, q_ptr, s_ptr = w_ptr + row * w_row, q_ptr + row * q_row, s_ptr + row * s_row
    offsets = tl.arange(0, CHUNK)
    x = _rotate(tl.load(w_ptr + offsets * w_col, mask=offsets < k, other=0.0), CHUNK, STAGES)
    magnitudes = _magnitudes(x, WIDE)
    for start in range(CHUNK, k, CHUNK):
        x = tl.load(w_ptr + (start + offsets) * w_col, mask=start + offsets < k, other=0.0)
        x = _rotate(x, CHUNK, STAGES)
        magnitudes = tl.maximum(magnitudes, _magnitudes(x, WIDE))
    scale = _scale(tl.max(magnitudes, 0), s_ptr, dtype, WIDE, CODE_MAX)
    inverse = tl.div_rn(1.0, scale)
    ordinary = (scale >= _LEAST) & (scale <= _MOST)
    for start in range(first, first + k_local, CHUNK):
        columns = start + offsets
        x = tl.load(w_ptr + columns * w_col, mask=columns < first + k_local, other=0.0)
        x = _rotate(x, CHUNK, STAGES)
        if ordinary:
            _store(q_ptr, q_col, x, columns, first, k_local, scale, inverse, False, INTEGER)
        else:
            _store(q_ptr, q_col, x, columns, first, k_local, scale, inverse, True, INTEGER)
