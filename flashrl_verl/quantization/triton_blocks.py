# SPDX-License-Identifier: Apache-2.0
"""The fused block kernel: absmax, scale, round and store in one pass over a weight, as ``numerics.py`` defines them.

One program a block, which lies in registers. Absmax and quotient are the row kernel's (``triton_rows.py`` says why they are
exact), so codes and scales of both follow the same rules: IEEE quotients, half to even, a flag for what is not finite.
"""

import triton
import triton.language as tl

from flashrl_verl.quantization.triton_rows import _LEAST, _MOST, _codes, _magnitudes, _scale


@triton.jit
def quantize_blocks_kernel(
    w_ptr, q_ptr, s_ptr, flag_ptr, table_ptr, w_row, w_col, q_row, q_col, s_row, s_col,
    CODE_MAX: tl.constexpr, FLAG: tl.constexpr, TABLE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Block (program 0, program 1) of ``w_ptr``, floating-point codes and one scale; all dimensions are whole blocks.

    ``FLAG`` stores 1 to ``flag_ptr`` when the block is not finite. With ``TABLE`` the rows of blocks lie in many places:
    ``table_ptr`` [rows of blocks, 3] int64 has the elements from ``w_ptr``, ``q_ptr`` and ``s_ptr`` to the start of each;
    ``ALIGNED`` promises multiples of 16.
    """
    dtype: tl.constexpr = w_ptr.dtype.element_ty
    WIDE: tl.constexpr = dtype == tl.float32
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if TABLE:
        entry = table_ptr + row * 3
        w_at, q_at, s_at = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        if ALIGNED:  # what a pointer argument says by itself, and vector loads and stores need
            w_at, q_at = tl.multiple_of(w_at, 16), tl.multiple_of(q_at, 16)
        w_ptr += w_at
        q_ptr += q_at
        s_ptr += s_at
        row = row * 0
    rows = row * BLOCK + tl.arange(0, BLOCK)[:, None]
    columns = column * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(w_ptr + rows * w_row + columns * w_col)
    bits = tl.max(tl.max(_magnitudes(x, WIDE), 1), 0)
    scale = _scale(bits, s_ptr + row * s_row + column * s_col, flag_ptr, dtype, WIDE, CODE_MAX, FLAG)
    inverse = tl.div_rn(1.0, scale)
    places = q_ptr + rows * q_row + columns * q_col
    if (scale >= _LEAST) & (scale <= _MOST):
        tl.store(places, _codes(x, scale, inverse, False, False, q_ptr.dtype.element_ty))
    else:
        tl.store(places, _codes(x, scale, inverse, True, False, q_ptr.dtype.element_ty))
