# SPDX-License-Identifier: Apache-2.0
"""The fused row kernel: absmax, scale, round and store in one pass over a weight row, as ``numerics.py`` defines them.

One program a row. The divisions are ``div_rn``: Triton's ``/`` is an approximation, and one wrong bit in a scale changes
codes.
"""

import triton
import triton.language as tl

_ROUND = tl.constexpr(12582912.0)
"""1.5 * 2^23: float32 has no fraction bits there, so adding and subtracting it rounds to the nearest integer, ties to even, for
every magnitude below 2^22 (codes are below 2^9). Unlike ``libdevice.rint`` it also runs in Triton's interpreter."""


@triton.jit
def _codes(x, scale, CODE_MAX: tl.constexpr, INTEGER: tl.constexpr, dtype: tl.constexpr):
    code = tl.div_rn(x, scale)
    if INTEGER:
        code = (code + _ROUND) - _ROUND
    # The cast to E4M3 rounds half to even.
    return tl.minimum(tl.maximum(code, -CODE_MAX), CODE_MAX).to(dtype)


@triton.jit
def quantize_rows_kernel(
    w_ptr, q_ptr, s_ptr, flag_ptr, k, first, k_local, w_row, w_col, q_row, q_col, s_row,
    CODE_MAX: tl.constexpr, INTEGER: tl.constexpr, FLAG: tl.constexpr, BLOCK: tl.constexpr, ONE_PASS: tl.constexpr,
):  # fmt: skip
    """Row ``program_id(0)`` of ``w_ptr`` [N, k] to codes of columns ``first : first + k_local`` and one scale.

    ``ONE_PASS`` keeps the whole row in registers (``BLOCK >= k``); otherwise the row is read twice, block by block.
    ``FLAG`` stores 1 to ``flag_ptr`` when the row holds NaN or Inf.
    """
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    w_ptr += row * w_row
    q_ptr += row * q_row
    if ONE_PASS:
        x = tl.load(w_ptr + offsets * w_col, mask=offsets < k, other=0.0).to(tl.float32)
        magnitude = tl.abs(x)
    else:
        magnitude = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, k, BLOCK):
            cols = start + offsets
            y = tl.load(w_ptr + cols * w_col, mask=cols < k, other=0.0).to(tl.float32)
            magnitude = tl.maximum(magnitude, tl.abs(y), propagate_nan=tl.PropagateNan.ALL)
    # A maximum over a block drops NaN; a row that holds one must not get a finite scale.
    has_nan = tl.max((magnitude != magnitude).to(tl.int32), 0)
    absmax = tl.where(has_nan > 0, float("nan"), tl.max(magnitude, 0))
    scale = tl.div_rn(absmax, CODE_MAX)
    scale = tl.where(scale == 0.0, 1.0, scale)
    tl.store(s_ptr + row * s_row, scale)
    if FLAG:
        tl.store(flag_ptr, 1, mask=(has_nan > 0) | (absmax == float("inf")))
    if ONE_PASS:
        keep = (offsets >= first) & (offsets < first + k_local)
        tl.store(q_ptr + (offsets - first) * q_col, _codes(x, scale, CODE_MAX, INTEGER, dtype), mask=keep)
    else:
        for start in range(0, k_local, BLOCK):
            cols = start + offsets
            y = tl.load(w_ptr + (first + cols) * w_col, mask=cols < k_local, other=0.0).to(tl.float32)
            tl.store(q_ptr + cols * q_col, _codes(y, scale, CODE_MAX, INTEGER, dtype), mask=cols < k_local)
