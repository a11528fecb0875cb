# SPDX-License-Identifier: Apache-2.0
"""Activations of rotated layers: rotate, absmax, scale, round and store in one kernel.

A token's row is a matrix of one block of channels a line, and its rotation the product with the constant matrix of 1
and -1, which BF16 and FP16 hold exactly: tensor cores multiply, and add in float32 in an order of their own.
"""

import triton
import triton.language as tl

from flashrl_verl.quantization.triton_rows import ROUND


@triton.jit
def _hadamard(BLOCK: tl.constexpr, dtype: tl.constexpr):
    """[BLOCK, BLOCK]: -1 where the binary digits that row and column share are odd in number, else 1."""
    lines = tl.arange(0, BLOCK)
    bits = lines[:, None] & lines[None, :]
    bits = bits ^ (bits >> 4)
    bits = bits ^ (bits >> 2)
    bits = bits ^ (bits >> 1)
    return (1 - 2 * (bits & 1)).to(dtype)


@triton.jit
def _rotated(x_ptr, first, k, hadamard, BLOCK: tl.constexpr, LINES: tl.constexpr):
    """Columns ``first : first + LINES * BLOCK`` of a row, rotated, [LINES, BLOCK] float32; zeros behind column k."""
    columns = first + tl.arange(0, LINES)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + columns, mask=columns < k, other=0.0)
    return tl.dot(x, hadamard), columns


@triton.jit
def rotate_quantize_kernel(x_ptr, q_ptr, s_ptr, k, x_row, BLOCK: tl.constexpr, LINES: tl.constexpr, ONE: tl.constexpr):
    """One token of ``x_ptr`` [T, k] bfloat16 or float16 to INT8 codes ``q_ptr`` [T, k] and a scale ``s_ptr`` [T].

    ``ONE``: LINES * BLOCK >= k, and the row stays in registers; else it is read and rotated twice.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr, q_ptr = x_ptr + row * x_row, q_ptr + row * k
    hadamard = _hadamard(BLOCK, x_ptr.dtype.element_ty)
    rotated, columns = _rotated(x_ptr, 0, k, hadamard, BLOCK, LINES)
    # As integers, whose order is that of magnitudes: a maximum of floats would pass over NaN.
    bits = tl.max(rotated.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    if not ONE:
        for first in range(LINES * BLOCK, k, LINES * BLOCK):
            more, _ = _rotated(x_ptr, first, k, hadamard, BLOCK, LINES)
            bits = tl.maximum(bits, tl.max(more.to(tl.int32, bitcast=True) & 0x7FFFFFFF))
    scale = tl.div_rn(bits.to(tl.float32, bitcast=True), 127.0)
    scale = tl.where(scale == 0.0, 1.0, scale)
    tl.store(s_ptr + row, scale)
    inverse = tl.div_rn(1.0, scale)
    codes = (rotated * inverse + ROUND).to(tl.int32, bitcast=True).to(tl.int8)
    tl.store(q_ptr + columns, codes, mask=columns < k)
    if not ONE:
        for first in range(LINES * BLOCK, k, LINES * BLOCK):
            more, columns = _rotated(x_ptr, first, k, hadamard, BLOCK, LINES)
            codes = (more * inverse + ROUND).to(tl.int32, bitcast=True).to(tl.int8)
            tl.store(q_ptr + columns, codes, mask=columns < k)
