# SPDX-License-Identifier: Apache-2.0
"""``flashrl.fp32_lm_head``: logits in FP32 from the BF16 operands that both sides already have, the same on both sides.

Without it trainer and rollout each round every logit to BF16: 8 bits, so a logit of 16 to 32 moves by up to 2^-4 and a
log-prob with it, in a direction that the last bit of a sum decides. Two kernels that agree to 1e-6 then give
probabilities that differ by percents. One side alone in FP32 is worse than none: the two no longer round to the same
grid (MiniMax-M1, arXiv 2506.13585, "Computational Precision Mismatch"; ScaleRL, arXiv 2510.13786; NVIDIA-NeMo/RL#3936).

The operands stay what they are: hidden states and head weight in the 16-bit dtype. The weight is the FP32 master,
rounded to nearest even, on the trainer (by FSDP's mixed precision) as on the rollout (by the wire's cast). The product
of two BF16 numbers of 8 bits has 16 and is exact in FP32's 24, as that of two FP16 numbers of 11 is with 22; so FP32
accumulation without the rounding at the end *is* the FP32 product of these operands, up to the order of summation.
Unrounded weights would match no better: they would be another policy's than those of all other layers, for 4 bytes a
weight in the engine (3.1 GB at 152064 x 5120) and a GEMM without tensor cores on both sides.

What it costs: the trainer's logits and their gradient take 4 bytes an entry instead of 2 (the rollout's sampler makes
FP32 of them anyway), and with tensor parallelism the rollout gathers twice the bytes.
"""

import torch
from torch import nn

from flashrl_verl.errors import ConfigError, FlashRLError

FP32 = "float32"
"""What a side says of a head that computes as here; any other says its own dtype."""

_KEY = "flashrl.fp32_lm_head"


def fp32_product(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``hidden @ weight^T``, accumulated and returned in FP32.

    Args:
        hidden: [T, H] bfloat16 or float16 (float32 is multiplied as it is).
        weight: [V, H] of the same dtype; read where it lies, nothing is kept.

    Returns:
        [T, V] float32.
    """
    if hidden.is_cuda and hidden.dtype != torch.float32:
        # The BF16 GEMM, whose tensor cores accumulate in FP32 anyway; only what it writes is not rounded.
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return torch.mm(hidden.float(), weight.float().t())


def fp32_logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Logits [..., V] float32 of hidden states [..., H], a head [V, H] and a bias [V] or None; differentiable.

    Hidden states in another dtype (a norm that autocast keeps in FP32) are rounded to the weight's first, as autocast
    and the rollout do.
    """
    flat = hidden.reshape(-1, hidden.shape[-1]).to(weight.dtype)
    with torch.autocast(hidden.device.type, enabled=False):  # it would turn the operands, and the result, into BF16
        logits = _Fp32Product.apply(flat, weight) if torch.is_grad_enabled() else fp32_product(flat, weight)
        if bias is not None:
            logits = logits + bias.float()
    return logits.reshape(*hidden.shape[:-1], -1)


class _Fp32Product(torch.autograd.Function):
    """``fp32_product`` with the backward of a 16-bit linear layer.

    The logits' gradient is rounded to the operands' dtype, as it always is when logits are BF16, and the two products
    are BF16 GEMMs that accumulate in FP32: their results are rounded to BF16 by FSDP's parameters anyway. Casting the
    operands to FP32 instead would keep a second head of 4 bytes a weight until the backward.
    """

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return fp32_product(hidden, weight)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        hidden, weight = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            grad = grad.to(weight.dtype)
            return (
                torch.mm(grad, weight) if ctx.needs_input_grad[0] else None,
                torch.mm(grad.t(), hidden) if ctx.needs_input_grad[1] else None,
            )


class Fp32Head:
    """Mixed into the class of the trainer's ``lm_head``, in front of ``nn.Linear`` (or FSDP2's subclass of it)."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    flashrl_calls: int = 0
    """Forward passes so far."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.flashrl_calls += 1
        return fp32_logits(hidden, self.weight, self.bias)


def compute_head_in_fp32(model: nn.Module) -> None:
    """Make a trainer's model compute its logits in FP32, and stop it when a forward pass went another way.

    Args:
        model: a Hugging Face causal language model, wrapped by FSDP1 or FSDP2 (or not).

    Raises:
        ConfigError: its head is not a plain linear layer.
    """
    head = model.get_output_embeddings()
    if isinstance(head, Fp32Head):
        return
    # FSDP2 gives a wrapped module a subclass of its class; an adapter's or a quantized layer has a forward of its own.
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise ConfigError(
            f"{_KEY}=true is refused: the trainer's head of {type(model).__name__} is a {type(head).__name__} with a "
            f"forward other than torch.nn.Linear's, which is the one that is replaced. Set {_KEY}=false, or, if it is "
            "a LoRA layer, take lm_head out of actor_rollout_ref.model.target_modules"
        )
    head.__class__ = type(f"Fp32{type(head).__name__}", (Fp32Head, type(head)), {})
    model.register_forward_hook(_Watch(head))


class _Watch:
    """Forward hook of the whole model: the logits it returns are FP32 and the head was asked for them."""

    def __init__(self, head: Fp32Head):
        self._head, self._calls = head, head.flashrl_calls

    def __call__(self, model: nn.Module, inputs: tuple, output: object) -> None:
        calls, self._calls = self._calls, self._head.flashrl_calls
        logits = getattr(output, "logits", None)
        if calls == self._calls or logits is None or logits.dtype != torch.float32:
            found = "no logits" if logits is None else f"logits in {logits.dtype}"
            raise FlashRLError(
                f"{_KEY}=true, but a forward pass of the trainer gave {found} and asked its FP32 head "
                f"{self._calls - calls} times: something computes log-probs past lm_head (a fused kernel?). Set "
                f"{_KEY}=false"
            )
