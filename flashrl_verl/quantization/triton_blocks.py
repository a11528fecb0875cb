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
    w_ptr, q_ptr, s_ptr, flag_ptr, w_row, w_col, q_row, q_col, s_row, s_col,
    CODE_MAX: tl.constexpr, FLAG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Block (program 0, program 1) of ``w_ptr``, floating-point codes and one scale; all dimensions are whole blocks.

    ``FLAG`` stores 1 to ``flag_ptr`` when the block is not finite.
    """
    dtype: tl.constexpr = w_ptr.dtype.element_ty
    WIDE: tl.constexpr = dtype == tl.float32
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
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
