# SPDX-License-Identifier: Apache-2.0
"""Which W8A8 kernel a device gets, and the linear ones. All quantize activations, dynamically, then multiply.

vLLM's own kernel classes (``vllm/model_executor/kernels/linear/scaled_mm``) transpose, repack or drop the weight
parameter after loading, which an in-place refit cannot have; the custom ops underneath are called here instead.
"""

from typing import Protocol

import torch
from vllm import _custom_ops as ops

from flashrl_verl.errors import ConfigError
from flashrl_verl.plugins.versions import cuda_capability, vllm_device
from flashrl_verl.quantization import numerics
from flashrl_verl.quantization.formats import KERNELS, Kernel, KernelChoice
from flashrl_verl.quantization.numerics import WeightFormat

_MIN_TOKEN_SCALE = 1.0 / (448.0 * 512.0)
"""Smallest activation scale of vLLM's per-token FP8 quantization (csrc/quantization/w8a8/fp8/common.cu), for its
emulation."""


def choose_kernel(fmt: WeightFormat, device: str, capability: int) -> KernelChoice:
    """Choose the kernels of a format: the one place that decides.

    Args:
        fmt: format of the codes.
        device: ``cuda`` or ``cpu``.
        capability: compute capability as 10 x major + minor; ignored on a CPU.

    Raises:
        ConfigError: no kernel multiplies this format there; the message says what to set instead.
    """
    choices = [choice for choice in KERNELS[fmt] if choice.device == device]
    for choice in choices:
        if device == "cpu" or choice.since <= capability < choice.before:
            return choice
    since = min(choice.since for choice in choices)
    other = "int8" if fmt.name != "int8" and capability >= 75 else "bf16"
    raise ConfigError(
        f"flashrl.precision={fmt.name} has no kernel for a GPU of compute capability {capability / 10:.1f}; it needs "
        f"at least {since / 10:.1f}. Set flashrl.precision={other}"
    )


def device_kernels(fmt: WeightFormat) -> KernelChoice:
    """``choose_kernel`` for the device this process's vLLM runs on."""
    device = vllm_device()
    return choose_kernel(fmt, device, cuda_capability() if device == "cuda" else 0)


class Gemm(Protocol):
    """``y = x @ (codes * scales)^T + bias`` with 8-bit activations. ``layer.weight`` is read where it lies, so that
    nothing needs to follow a refit."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Args: x [..., K] bfloat16 or float16, bias [N] or None. Returns [..., N] in x's dtype."""


class ScaledMmGemm:
    """CUDA.

    Args:
        fmt: format of the codes.
        kernel: CUTLASS, or vLLM's Triton kernel. vLLM's CUTLASS op uses the Triton one by itself, and more slowly, when
            N or K is no multiple of 16.
    """

    def __init__(self, fmt: WeightFormat, kernel: Kernel):
        self._quantize = _int8_tokens if fmt.rounds_to_integers else _fp8_tokens
        self._multiply = ops.cutlass_scaled_mm if kernel is Kernel.CUTLASS else _triton_scaled_mm()

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        codes, scales = self._quantize(flat)
        out = self._multiply(codes, layer.weight.t(), scales, layer.weight_scale, x.dtype, bias)
        return out.reshape(*x.shape[:-1], -1)


class EmulatedGemm:
    """CPU: the format's numbers in float32. Slow.

    oneDNN, which vLLM multiplies INT8 with on a CPU, is no replacement: it packs a copy of the weight, and without VNNI
    instructions it adds pairs of products in 16 bits, which saturate: of ones [1, 64] times ones [64, 1] it makes 0.5.
    """

    def __init__(self, fmt: WeightFormat):
        self._fmt = fmt

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = emulated_multiply(x, layer.weight, layer.weight_scale, self._fmt)
        return out if bias is None else out + bias


def emulated_multiply(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, fmt: WeightFormat) -> torch.Tensor:
    """Multiply x [..., K] by codes [N, K] x scales [N, 1] as the format would: [..., N] in x's dtype."""
    scale = numerics.row_scales(x, fmt)
    if not fmt.rounds_to_integers:
        scale = scale.clamp_(min=_MIN_TOKEN_SCALE)
    tokens = numerics.dequantize(*numerics.quantize_rows(x, fmt, scale))
    return (tokens @ numerics.dequantize(codes, scales).t()).to(x.dtype)


def linear_gemm(fmt: WeightFormat) -> Gemm:
    """Return the linear kernel for the device this process runs on.

    Raises:
        ConfigError: no kernel for it.
    """
    kernel = device_kernels(fmt).linear
    if kernel is Kernel.EMULATED:
        return EmulatedGemm(fmt)
    return ScaledMmGemm(fmt, kernel)


def _int8_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales, _ = ops.scaled_int8_quant(x, None, None, symmetric=True)
    return codes, scales


def _fp8_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)


def _triton_scaled_mm():
    from vllm.model_executor.layers.quantization.compressed_tensors.triton_scaled_mm import triton_scaled_mm

    return triton_scaled_mm
