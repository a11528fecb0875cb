# SPDX-License-Identifier: Apache-2.0
"""Which W8A8 kernel a device gets, and the linear ones. All quantize activations, dynamically, then multiply.

vLLM's own kernel classes (``vllm/model_executor/kernels/linear/scaled_mm``) transpose, repack or drop the weight
parameter after loading, which an in-place refit cannot have; the custom ops underneath are called here instead.
"""

from collections.abc import Callable
from functools import cache

import torch
from vllm import _custom_ops as ops
from vllm.utils.torch_utils import direct_register_custom_op

from flashrl_verl.errors import ConfigError
from flashrl_verl.quantization import numerics
from flashrl_verl.quantization.formats import Kernel
from flashrl_verl.quantization.numerics import WeightFormat
from flashrl_verl.quantization.rows import rotate_quantize_tokens
from flashrl_verl.upstream.versions import cuda_capability, vllm_device

_MIN_TOKEN_SCALE = 1.0 / (448.0 * 512.0)
"""Smallest activation scale of vLLM's per-token FP8 quantization (csrc/quantization/w8a8/fp8/common.cu), for its
emulation."""


LinearKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(x [..., K] bfloat16 or float16, codes [N, K], scales [N, 1], bias [N] or None) -> [..., N] in x's dtype. Codes are
read where they lie, so that nothing needs to follow a refit."""
TokenQuantizer = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""x [T, K] contiguous -> codes [T, K], scales [T, 1] float32."""


def choose_kernel(fmt: WeightFormat, device: str, capability: int) -> Kernel:
    """Choose the linear kernel of a format. Experts on a GPU always have vLLM's Triton kernel.

    Args:
        fmt: format of the codes.
        device: ``cuda`` or ``cpu``.
        capability: compute capability as 10 x major + minor; ignored on a CPU.

    Raises:
        ConfigError: no kernel multiplies this format there; the message says what to set instead.
    """
    if device == "cpu":
        return Kernel.EMULATED
    since = 80 if fmt.rounds_to_integers else 89  # Ampere, Ada
    if capability < since:
        other = "int8" if not fmt.rounds_to_integers and capability >= 80 else "bf16"
        raise ConfigError(
            f"flashrl.precision={fmt.name} has no kernel for a GPU of compute capability {capability / 10:.1f}; it "
            f"needs at least {since / 10:.1f}. Set flashrl.precision={other}"
        )
    # vLLM's CUTLASS has no INT8 from Blackwell on (vllm#54311).
    return Kernel.TRITON if fmt.rounds_to_integers and capability >= 100 else Kernel.CUTLASS


def device_kernel(fmt: WeightFormat) -> Kernel:
    """``choose_kernel`` for the device this process's vLLM runs on."""
    device = vllm_device()
    return choose_kernel(fmt, device, cuda_capability() if device == "cuda" else 0)


def linear_kernel(fmt: WeightFormat) -> LinearKernel:
    """Quantizes activations and multiplies, on the device this process runs on.

    Raises:
        ConfigError: no kernel for it.
    """
    kernel = device_kernel(fmt)
    if kernel is Kernel.EMULATED:
        return lambda x, codes, scales, bias: emulated_multiply(x, codes, scales, fmt, bias)
    quantize = token_quantizer(fmt)
    # vLLM's CUTLASS op uses the Triton one by itself, and more slowly, when N or K is no multiple of 16.
    multiply = ops.cutlass_scaled_mm if kernel is Kernel.CUTLASS else _triton_scaled_mm()

    def scaled_mm(
        x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        tokens, token_scales = quantize(x.reshape(-1, x.shape[-1]).contiguous())
        out = multiply(tokens, codes.t(), token_scales, scales, x.dtype, bias)
        return out.reshape(*x.shape[:-1], -1)

    return scaled_mm


def token_quantizer(fmt: WeightFormat) -> TokenQuantizer:
    """How tokens are quantized on CUDA."""
    if not fmt.rounds_to_integers:
        return lambda x: ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    rotate_quantize = _rotate_quantize() if fmt.rotated else None

    def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        block = fmt.block(x.shape[-1])
        return ops.scaled_int8_quant(x, None, None, symmetric=True)[:2] if block == 1 else rotate_quantize(x, block)

    return quantize


@cache  # an operator is registered once in a process
def _rotate_quantize() -> Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]:
    """``rows.rotate_quantize_tokens`` as an operator, which torch.compile takes as it is."""

    def shapes(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        return x.new_empty(x.shape, dtype=torch.int8), x.new_empty((x.shape[0], 1), dtype=torch.float32)

    direct_register_custom_op("flashrl_rotate_quantize", rotate_quantize_tokens, fake_impl=shapes)
    return torch.ops.vllm.flashrl_rotate_quantize


def emulated_multiply(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, fmt: WeightFormat, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``y = x @ (codes * scales)^T + bias`` as the format computes it, in float32: its numbers without its speed.

    oneDNN, which vLLM multiplies INT8 with on a CPU, is no replacement: it packs a copy of the weight, and without VNNI
    instructions it adds pairs of products in 16 bits, which saturate: of ones [1, 64] times ones [64, 1] it makes 0.5.

    Args:
        x: [..., K].
        codes: [N, K].
        scales: [N, 1] float32.
        fmt: format of the codes, and of x's.
        bias: [N].

    Returns:
        [..., N] in x's dtype.
    """
    dtype, x = x.dtype, numerics.rotate(x, fmt.block(x.shape[-1]))
    scale = numerics.row_scales(x, fmt)
    if not fmt.rounds_to_integers:
        scale = scale.clamp_(min=_MIN_TOKEN_SCALE)
    tokens, scale = numerics.quantize_rows(x, fmt, scale)
    out = (tokens.float() @ codes.float().t()) * (scale * scales.t())
    return (out if bias is None else out + bias).to(dtype)


def _triton_scaled_mm():
    from vllm.model_executor.layers.quantization.compressed_tensors.triton_scaled_mm import triton_scaled_mm

    return triton_scaled_mm
