# SPDX-License-Identifier: Apache-2.0
"""``flashrl.trainer_forward``: the trainer's linear layers compute in 8 bits, as the rollout's do.

A layer's weight is quantized by row from the same 16-bit values that the engine gets, activations by token, and the
same kernel multiplies (``quantization/gemm.py``). So both sides compute with the same codes, bit for bit, and the
trained policy is the one that samples. What stays of the mismatch is the order of sums, and what it does to the
rounding of activations. QaRL (arXiv 2604.07853) and Jet-RL (arXiv 2601.14243) train so.

The backward is straight through: with g = dL/dy and the dequantized weight W' and input X',

    dL/dx = g W'        dL/dW = g^T X'        dL/db = sum of g over tokens

in the parameters' dtype. For it the input's codes and scales are kept, half of what BF16 keeps. The weight is quantized
again: kept codes would outlive the weight that FSDP gathers for a layer and frees behind it.

That both sides have the same codes is checked, not assumed: a layer notes a digest of the codes that it computed with
(``refit/code_digest.py``), and the driver compares it with those in the engines' storage.
"""

from collections.abc import Collection
from typing import ClassVar

import torch
from torch import nn
from verl.utils.model import convert_weight_keys

from flashrl_verl.errors import ConfigError, FlashRLError, listed
from flashrl_verl.quantization.formats import weight_format
from flashrl_verl.quantization.gemm import w8a8
from flashrl_verl.quantization.kernels import dequantize_rows, quantize_rows_into
from flashrl_verl.quantization.numerics import WeightFormat
from flashrl_verl.refit.code_digest import code_digest
from flashrl_verl.settings import Precision

_KEY = "flashrl.trainer_forward"
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What FSDP1 and gradient checkpointing put into the names of modules."""


def quantize_weight(weight: torch.Tensor, fmt: WeightFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, K] and scales [N, 1] of a weight [N, K] of any strides."""
    codes = torch.empty(weight.shape, dtype=fmt.dtype, device=weight.device)
    scales = torch.empty(len(weight), 1, dtype=torch.float32, device=weight.device)
    quantize_rows_into(weight.detach(), codes, scales, fmt)
    return codes, scales


def quantize_tokens(x: torch.Tensor, flat: torch.Tensor, fmt: WeightFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [T, K] and scales [T, 1] of ``flat``, which is ``x`` by tokens. They stay with the tensor, for q, k and v
    have one input, and so have gate and up: it is quantized once, and kept once for their backward passes."""
    if x.is_inference():  # such a tensor does not tell that it has changed
        return w8a8(fmt)[0](flat.contiguous())
    key = fmt, flat.dtype, x._version
    if getattr(x, "flashrl_codes", (None,))[0] != key:
        x.flashrl_codes = key, w8a8(fmt)[0](flat.detach().contiguous())
    return x.flashrl_codes[1]


class _Gradients(torch.autograd.Function):
    """Of y = x W^T + b for tokens [T, K]; ``backward_fmt`` None: in 16 bits. The forward pass only keeps what they
    need, and returns a stub of y, [T, N] without storage: a repeated forward pass (gradient checkpointing) ends where
    the last tensor has been kept, which here is before a layer's last product."""

    @staticmethod
    def forward(ctx, x, weight, bias, tokens, token_scales, fmt, backward_fmt):
        ctx.save_for_backward(tokens, token_scales, weight)
        ctx.formats = fmt, backward_fmt
        return x.new_empty(()).expand(len(x), len(weight))

    @staticmethod
    def backward(ctx, grad):
        tokens, token_scales, weight = ctx.saved_tensors
        fmt, backward_fmt = ctx.formats
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        dtype, dx, dw = weight.dtype, None, None
        with torch.autocast(grad.device.type, enabled=False):
            grad = grad.to(dtype).contiguous()
            if of_x and backward_fmt is None:
                dx = grad @ dequantize_rows(*quantize_weight(weight, fmt), dtype)
            elif of_x:
                quantize, multiply = w8a8(backward_fmt)
                # A scale for each input, which g W' sums over.
                codes, scales = quantize_weight(weight.t().contiguous(), backward_fmt)
                grad_codes, grad_scales = quantize(grad)
                dx = multiply(grad_codes, codes.t(), grad_scales, scales, dtype, None)
            if of_weight:
                dw = grad.t() @ dequantize_rows(tokens, token_scales, dtype)
        return dx, dw, grad.sum(0) if of_bias else None, *[None] * 4


class _Product(torch.autograd.Function):
    """y, whose gradient is its stub's."""

    @staticmethod
    def forward(ctx, stub, multiply, *arguments):
        ctx.arguments = len(arguments)
        return multiply(*arguments)

    @staticmethod
    def backward(ctx, grad):
        return grad, *[None] * (1 + ctx.arguments)


class Linear8Bit:
    """Mixed into the class of a trainer's layer, in front of ``nn.Linear``."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    flashrl_formats: ClassVar[tuple[WeightFormat, WeightFormat | None]]
    """Of the forward pass, and of the backward pass (None: 16 bits)."""
    flashrl_calls: int = 0
    """Forward passes so far."""
    flashrl_digest: torch.Tensor | int | None = None
    """Of the codes of the first forward pass since ``note_codes``; None: there was none yet."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.flashrl_calls += 1
        fmt, backward_fmt = self.flashrl_formats
        with torch.autocast(x.device.type, enabled=False):
            # Rounded as autocast does, and as the rollout's activations are.
            flat = x.reshape(-1, x.shape[-1]).to(self.weight.dtype)
            tokens, token_scales = quantize_tokens(x, flat, fmt)
            stub = _Gradients.apply(flat, self.weight, self.bias, tokens, token_scales, fmt, backward_fmt)
            codes, scales = quantize_weight(self.weight, fmt)
            if self.flashrl_digest is None:
                self.flashrl_digest = code_digest(codes, scales)
            bias = None if self.bias is None else self.bias.detach()
            out = _Product.apply(stub, w8a8(fmt)[1], tokens, codes.t(), token_scales, scales, flat.dtype, bias)
        return out.reshape(*x.shape[:-1], -1)


def compute_in_8_bits(model: nn.Module, names: Collection[str], forward: Precision, backward: Precision) -> None:
    """Make layers of a trainer's model compute in 8 bits, and stop it when a forward pass went another way.

    Args:
        model: a Hugging Face causal language model, wrapped by FSDP1 or FSDP2 (or not).
        names: the weights that the engine quantized, as the trainer sends them (``...q_proj.weight``).
        forward: format of the forward pass.
        backward: format of the input's gradient; BF16: the parameters' dtype.

    Raises:
        ConfigError: one of them is not the weight of a plain linear layer.
    """
    formats = weight_format(forward), None if backward is Precision.BF16 else weight_format(backward)
    layers = linear_layers(model)
    wrong = [
        name
        for name in names
        if not isinstance(layer := layers.get(name), nn.Linear) or type(layer).forward is not nn.Linear.forward
    ]
    if wrong:
        raise ConfigError(
            f"{_KEY}={forward.value} is refused: the rollout quantizes {listed(wrong)}, and in the trainer's "
            f"{type(model).__name__} these are no plain linear layers (experts? an adapter?). Set {_KEY}=bf16, or name "
            "the layers in flashrl.ignore"
        )
    for name in names:
        layer = layers[name]
        kind = type(layer)
        layer.__class__ = type(f"{kind.__name__}8Bit", (Linear8Bit, kind), {"flashrl_formats": formats})
    model.register_forward_hook(_Watch({name: layers[name] for name in names}))


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Modules with a weight, by the name under which verl sends it."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(getattr(module, "weight", None), torch.Tensor):
            for wrapper in _WRAPPERS:
                name = name.replace(wrapper, "")
            found[f"{name}.weight"] = module
    return convert_weight_keys(found, getattr(model, "module", model))


def note_codes(model: nn.Module) -> None:
    """Have every layer note what it computes with the next time."""
    for layer in linear_layers(model).values():
        if isinstance(layer, Linear8Bit):
            layer.flashrl_digest = None


def noted_codes(model: nn.Module) -> dict[str, int]:
    """Digest by weight of the codes that were computed with; empty where no forward pass was made since
    ``note_codes``."""
    layers = {name: layer for name, layer in linear_layers(model).items() if isinstance(layer, Linear8Bit)}
    return {name: int(layer.flashrl_digest) for name, layer in layers.items() if layer.flashrl_digest is not None}


class _Watch:
    """Forward hook of the whole model: it has asked every layer that is to compute in 8 bits."""

    def __init__(self, layers: dict[str, nn.Module]):
        self._layers, self._calls = layers, {name: layer.flashrl_calls for name, layer in layers.items()}

    def __call__(self, model: nn.Module, inputs: tuple, output: object) -> None:
        before, self._calls = self._calls, {name: layer.flashrl_calls for name, layer in self._layers.items()}
        if idle := [name for name, calls in self._calls.items() if calls == before[name]]:
            raise FlashRLError(
                f"{_KEY}: a forward pass of the trainer went past {listed(idle)}: something computes with the weight "
                f"without the layer (a fused kernel?). Set {_KEY}=bf16"
            )
