# SPDX-License-Identifier: Apache-2.0
"""How long one decode step takes, and a prompt: bytes that have to be read, operations that have to be done, and fixed
parts.

The constants are fitted to profiles of decode steps of Qwen2.5-32B's shape on H200s (three machines), 128 and 256
sequences of some 450 tokens and 28 of 8300, with CUDA graphs in vLLM 0.24.0 (docs/results/throughput.md). They were
last revised when steps of 7B and 14B were known; docs/results/throughput.md says how far off they are. Other GPUs
are extrapolated by data sheet.
"""

import math
from dataclasses import dataclass

from flashrl_verl.settings import KVCache, Precision
from flashrl_verl.tools.plan.gpus import GPU
from flashrl_verl.tools.plan.memory import BF16, Choice
from flashrl_verl.tools.plan.shape import ModelShape

STREAM = 0.88
"""Share of the data sheet's memory bandwidth that a kernel reaches which only reads: 4.2 of 4.8 TB/s."""

WEIGHT_STREAM = {Precision.BF16: 0.81, Precision.INT8: 0.72, Precision.FP8: 0.59}
"""The same share of products with few sequences, which read weights and little else: 16.4, 9.5 and 11.7 ms at 28
sequences."""

COMPUTE = {Precision.BF16: 0.73, Precision.INT8: 0.62, Precision.FP8: 0.62}
"""Share of the data sheet's operations that the products of a decode step reach: 24.0, 14.2 and 15.0 ms at 256
sequences."""

TILE = 256
"""Rows that an 8-bit product of more than half as many takes at a time: 257 sequences take as long as 512. Two tiles of
128 in vLLM's CUTLASS kernels for Hopper. Seen in rollouts with long tails, in INT8; assumed of FP8 and of A100s."""

PREFILL = {Precision.BF16: 0.65, Precision.INT8: 0.54, Precision.FP8: 0.51}
"""The same share in a prefill, whose products are large, with the rest of a layer; of attention too, which is BF16's
whatever the weights are. Fitted to 128 x 256 (FP8: 256 x 256) and 28 x 8192 tokens."""

SHARPNESS = 4.0
"""Exponent p of (memory^p + compute^p)^(1/p), the time of a product between the two roofs: 10.1 ms in INT8 at 128
sequences."""

KV_STREAM = {KVCache.AUTO: 0.9, KVCache.INT8_PER_TOKEN_HEAD: 0.65}
"""The same share for attention that reads keys and values: FlashAttention's in BF16, and ours in INT8."""

ATTENTION_S = 5e-6
"""Fixed part of a layer's attention, seconds."""

KV_HEAD_S = {KVCache.AUTO: 22e-9, KVCache.INT8_PER_TOKEN_HEAD: 7e-9}
"""What attention takes for every sequence and KV head of a layer beside reading, seconds."""

LAYER_S = 13e-6
"""Norms, rotary embedding, activation, KV write of a layer, beside what they read and write, seconds."""

QUANTIZE_S = {Precision.BF16: 0.0, Precision.INT8: 3.3e-6, Precision.FP8: 5.0e-6}
"""One launch that quantizes activations, seconds; there are four in a layer. 2.9 and 4.3 us at 28 sequences, 3.9 and
5.8 at 256."""

LOGIT_PASSES = 24
"""Reads and writes of a sequence's FP32 logits in sampling, as many as its kernels' time is worth: 0.9 ms for 256
sequences of 152064."""

HOST_S = 0.8e-3
"""What a step waits for the host, seconds."""

REDUCE_S = 24e-6
"""Fixed part of one all-reduce over NVLink, seconds; two in a layer. Fitted to Qwen2.5-32B in engines of four H200s
(``benchmarks/results/rollout/h200-tp4``), with NCCL_NVLS_ENABLE=0. Short 8-bit steps are up to 19 % longer
than planned with it."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one decode step on a GPU, by part."""

    linear: float
    attention: float
    quantize: float
    reduce: float
    rest: float

    @property
    def total(self) -> float:
        return self.linear + self.attention + self.quantize + self.reduce + self.rest


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Times of one model in one choice of formats on GPUs of one kind."""

    shape: ModelShape
    choice: Choice
    gpu: GPU
    tensor_parallel: int = 1

    def decode(self, sequences: float, context: float) -> StepTime:
        """Seconds of one step that gives every sequence one token.

        Args:
            sequences: how many are decoded together; a mean may be no whole number.
            context: tokens of each, their mean.
        """
        shape, kv_cache = self.shape, self.choice.kv_cache
        heads = math.ceil(shape.kv_heads / self.tensor_parallel)
        read = self._kv_read(sequences, context) / (KV_STREAM[kv_cache] * self.gpu.bandwidth)
        logits = shape.vocabulary * 4 * LOGIT_PASSES  # gathered: every GPU samples
        # Two norms, each reads and writes its input and the residual; gate, up and their product.
        between = shape.layers * (2 * 4 * shape.hidden + 1.5 * shape.intermediate / self.tensor_parallel) * BF16
        return StepTime(
            linear=self._products(sequences, COMPUTE[self.choice.precision]),
            attention=shape.layers * (ATTENTION_S + sequences * heads * KV_HEAD_S[kv_cache]) + read,
            quantize=4 * shape.layers * QUANTIZE_S[self.choice.precision],
            reduce=self._reduce(sequences),
            rest=shape.layers * LAYER_S + HOST_S + sequences * (logits + between) / (STREAM * self.gpu.bandwidth),
        )

    def prefill(self, tokens: int, length: float, sequences: int) -> float:
        """Seconds to read prompts.

        Args:
            tokens: of all.
            length: of each, the mean over tokens.
            sequences: how many: the head multiplies the last token of each.
        """
        attention = self.shape.attention_operations(tokens, length) / self.tensor_parallel
        share = PREFILL[self.choice.precision]
        products = self._products(tokens, share, sequences)
        return products + attention / (PREFILL[Precision.BF16] * self.gpu.bf16) + self._reduce(tokens)

    def _products(self, tokens: float, share: float, asked: float | None = None) -> float:
        """Seconds of all products of ``tokens``, of which so many are asked for logits; None: all."""
        memory = self._weights_read(tokens) / (WEIGHT_STREAM[self.choice.precision] * self.gpu.bandwidth)
        speed = self.gpu.compute(self.choice.precision)
        in_tiles = self.choice.precision is not Precision.BF16 and not self.shape.expert and asked is None
        rows = TILE * math.ceil(tokens / TILE) if in_tiles and tokens > TILE / 2 else tokens
        compute = 2 * rows * self.shape.active / self.tensor_parallel / (share * speed)
        compute += (
            2 * (tokens if asked is None else asked) * self.shape.head / self.tensor_parallel / (share * self.gpu.bf16)
        )
        return (memory**SHARPNESS + compute**SHARPNESS) ** (1 / SHARPNESS)

    def _weights_read(self, tokens: float) -> float:
        shape, element = self.shape, 1 if self.choice.precision is not Precision.BF16 else BF16
        experts = shape.expert * shape.experts_touched(tokens)
        return ((shape.linear + experts) * element + shape.head * BF16) / self.tensor_parallel

    def _kv_read(self, sequences: float, context: float) -> float:
        return (
            sequences
            * context
            * self.shape.kv_bytes_per_token(self.choice.kv_element_bytes(self.shape.head_dim), self.tensor_parallel)
        )

    def _reduce(self, tokens: float) -> float:
        if self.tensor_parallel == 1:
            return 0.0
        return 2 * self.shape.layers * (REDUCE_S + 2 * tokens * self.shape.hidden * BF16 / self.gpu.link)
