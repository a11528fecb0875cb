# SPDX-License-Identifier: Apache-2.0
"""Which INT8 GEMM a device gets. Both quantize activations per token, dynamically, then multiply W8A8.

vLLM's own kernel classes (``vllm/model_executor/kernels/linear/scaled_mm``) transpose, repack or drop the weight parameter
after loading, which an in-place refit cannot have; the custom ops underneath are called here instead.
"""

from typing import Protocol

import torch
from vllm import _custom_ops as ops

from flashrl_verl.compat import cuda_capability, vllm_device
from flashrl_verl.errors import ConfigError

_PRIMITIVE_CACHE_SIZE = 32
"""oneDNN primitives a handle keeps, one per batch size seen; vLLM's own CPU kernel uses the same number."""


class Int8Gemm(Protocol):
    """``y = x @ (codes * scales)^T + bias`` with int8 activations."""

    def weights_changed(self, layer: torch.nn.Module) -> None:
        """Called after every load, when ``layer.weight`` and ``layer.weight_scale`` are whole."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Args: x [..., K] bfloat16 or float16, bias [N] or None. Returns [..., N] in x's dtype."""


class CutlassGemm:
    """CUDA, SM75 to SM90: reads ``layer.weight`` where it lies, so nothing needs to follow a refit.

    vLLM's op uses its Triton kernel instead of CUTLASS, and more slowly, when N or K is no multiple of 16.
    """

    def weights_changed(self, layer: torch.nn.Module) -> None:
        pass

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        x_codes, x_scales, _ = ops.scaled_int8_quant(x.contiguous(), None, None, symmetric=True)
        return ops.cutlass_scaled_mm(
            x_codes, layer.weight.t(), scale_a=x_scales, scale_b=layer.weight_scale, out_dtype=x.dtype, bias=bias
        )


class OneDnnGemm:
    """CPU: oneDNN packs the weight into a handle of its own, which is rebuilt after every load.

    The handle keeps a raw pointer to the scales, so it is built on ``layer.weight_scale``'s storage, which lives as long
    as the layer.
    """

    def weights_changed(self, layer: torch.nn.Module) -> None:
        layer.onednn_handle = None  # free the old packed copy before the new one is made
        layer.onednn_handle = ops.create_onednn_scaled_mm(
            layer.weight.data.t(),
            layer.weight_scale.data,
            layer.flashrl_dtype,
            dynamic_quant=True,
            use_azp=False,
            primitive_cache_size=_PRIMITIVE_CACHE_SIZE,
        )

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        x_codes, x_scales, x_zero_points = ops.onednn_scaled_int8_quant(flat, None, None, True)
        out = torch.empty((flat.shape[0], layer.weight.shape[0]), dtype=x.dtype)
        ops.onednn_scaled_mm(layer.onednn_handle, x_codes, out, x_scales, x_zero_points, None, bias)
        return out.reshape(*x.shape[:-1], -1)


def select_int8_gemm() -> Int8Gemm:
    """Return the GEMM for the device this process runs on.

    Raises:
        ConfigError: no INT8 kernel for it.
    """
    if vllm_device() == "cpu":
        return OneDnnGemm()
    capability = cuda_capability()
    if 75 <= capability < 100:
        return CutlassGemm()
    raise ConfigError(
        f"flashrl.precision=int8 has no kernel for compute capability {capability / 10:.1f} "
        "(INT8 CUTLASS covers 7.5 to 9.0); set flashrl.precision=bf16"
    )
