# SPDX-License-Identifier: Apache-2.0
"""Outlier channels for the toy model: a few activations that are far larger than the others, in every layer.

Large language models have such channels from some 6.7 billion parameters on (Dettmers et al. 2022, LLM.int8(),
https://arxiv.org/abs/2208.07339). A token's INT8 scale is that of its largest activation, so that the others are left
with few codes; FP8's codes are floating-point numbers, which lose little. A model as small as the toy does not grow
any.

The function is unchanged: what one factor multiplies by ``s`` the next one's weights divide by (SmoothQuant's move,
https://arxiv.org/abs/2211.10438, the other way round), and with a power of two not a bit of the BF16 output changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashrl_verl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM


@dataclass(frozen=True, kw_only=True)
class OutlierConfig:
    """Which channels."""

    factor: int
    """How many times as large as before: a power of two."""
    channels: int = 2
    """Of the inputs of q, k and v; as many others of those of gate and up, and of down."""

    def __post_init__(self) -> None:
        if self.factor < 2 or self.factor & (self.factor - 1):
            raise ConfigError(
                f"--outliers {self.factor}: a power of two from 2 on; other factors change what the model computes in "
                "BF16"
            )

    def plant(self, model: Qwen2ForCausalLM, *, seed: int) -> None:
        """Multiply channels in place.

        Args:
            model: floating point; the smallest weights are ``factor`` times its smallest normal number or more.
            seed: of the channels' choice.
        """
        import torch

        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for layer in model.model.layers:
                attention, mlp = layer.self_attn, layer.mlp
                makers_and_readers = (
                    (layer.input_layernorm.weight, (attention.q_proj, attention.k_proj, attention.v_proj)),
                    (layer.post_attention_layernorm.weight, (mlp.gate_proj, mlp.up_proj)),
                    (mlp.up_proj.weight, (mlp.down_proj,)),
                )
                for maker, readers in makers_and_readers:
                    chosen = torch.randperm(maker.shape[0], generator=generator)[: self.channels].to(maker.device)
                    maker[chosen] *= self.factor
                    for reader in readers:
                        reader.weight[:, chosen] /= self.factor
