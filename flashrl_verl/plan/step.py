# SPDX-License-Identifier: Apache-2.0
"""How long one decode step takes, and a prompt: bytes that have to be read, operations that have to be done, and fixed parts.

The constants are fitted to one profile: Qwen2.5-32B's shape on one H200, 128 sequences of about 470 tokens, CUDA graphs, vLLM
0.24.0 (docs/precision_and_cap.md): linear layers 17.1 ms in BF16 and 10.1 in INT8, attention 5.7 and 5.4, quantization of
activations 0.8, the rest 2.2 and 1.7, wall clock 25.9 and 18.3; attention at long context from the decode-only row of the table
there, prefill from our own measurements. Other GPUs and sizes are extrapolated by data sheet.
"""

from dataclasses import dataclass

from flashrl_verl.config import KVCache, Precision
from flashrl_verl.plan.gpus import GPU
from flashrl_verl.plan.memory import BF16, Choice
from flashrl_verl.plan.shape import ModelShape

STREAM = 0.88
"""Share of the data sheet's memory bandwidth that a kernel reaches which only reads: 4.2 of 4.8 TB/s."""

COMPUTE = {Precision.BF16: 0.73, Precision.INT8: 0.66, Precision.FP8: 0.66}
"""Share of the data sheet's operations that the products of a decode step reach; FP8's is taken to be INT8's. fp8_block has
none: its kernel does other work between the products, and nobody has measured it here."""

PREFILL = {Precision.BF16: 0.65, Precision.INT8: 0.54, Precision.FP8: 0.54}
"""The same share in a prefill, whose products are large, with the rest of a layer; of attention too, which is BF16's whatever
the weights are. Fitted to 128 x 256 and 28 x 8192 tokens (docs/results/rollout.md)."""

SHARPNESS = {Precision.BF16: 3.0, Precision.INT8: 2.0, Precision.FP8: 2.0}
"""Exponent p of (memory^p + compute^p)^(1/p), the time of a product between the two roofs. INT8's, with its share above, is of
two points: the profile's 10.1 ms at 128 sequences, and 14.8 ms at 256, what the second row of that table leaves of a step."""

KV_STREAM = {KVCache.AUTO: STREAM, KVCache.FP8: 0.52, KVCache.FP8_PER_TOKEN_HEAD: 0.52, KVCache.INT8_PER_TOKEN_HEAD: 0.64}
"""The same share for attention that reads keys and values: FlashAttention's in BF16 and FP8, and ours in INT8
(docs/results/rollout.md). fp8_per_token_head has not been measured, and is slower."""

ATTENTION_S = 30e-6
"""Fixed part of a layer's attention, seconds."""

LAYER_S = 25e-6
"""Norms, rotary embedding, activation, KV write of a layer, seconds."""

QUANTIZE_S = 3.1e-6
"""One launch that quantizes activations, seconds; there are four in a layer."""

HOST_S = 0.5e-3
"""What a step waits for the host, and sampling's launches, seconds."""

REDUCE_S = 12e-6
"""Latency of one all-reduce of a few hundred KiB over NVLink, seconds; two in a layer. Assumed, not fitted."""


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

    def floor(self, sequences: float, context: float) -> float:
        """Seconds to read what one step has to read, at the speed of a copy: no kernel is faster.

        Args:
            sequences: how many are decoded together; a mean may be no whole number.
            context: tokens of each, their mean.
        """
        return (self._weights_read(sequences) + self._kv_read(sequences, context)) / (STREAM * self.gpu.bandwidth)

    def decode(self, sequences: float, context: float) -> StepTime:
        """Seconds of one step that gives every sequence one token; arguments as in ``floor``."""
        layers, quantized = self.shape.layers, self.choice.precision is not Precision.BF16
        stream = KV_STREAM[self.choice.kv_cache]
        rows = self.shape.vocabulary / self.tensor_parallel * sequences * 4 * 3  # logits, log-probs, sorted
        return StepTime(
            linear=self._products(sequences, self._weights_read(sequences), COMPUTE[self.choice.precision]),
            attention=layers * ATTENTION_S + self._kv_read(sequences, context) / (stream * self.gpu.bandwidth),
            quantize=4 * layers * QUANTIZE_S if quantized else 0.0,
            reduce=self._reduce(sequences),
            rest=layers * LAYER_S + HOST_S + rows / (STREAM * self.gpu.bandwidth),
        )

    def prefill(self, tokens: int, length: float, sequences: int) -> float:
        """Seconds to read prompts.

        Args:
            tokens: of all.
            length: of each, the mean over tokens.
            sequences: how many: the head multiplies the last token of each.
        """
        shape = self.shape
        # Two products of 2 operations each, over half of the length: attention is causal.
        attention = 2 * shape.layers * shape.heads * shape.head_dim * length * tokens / self.tensor_parallel
        share = PREFILL[self.choice.precision]
        products = self._products(tokens, self._weights_read(tokens), share, sequences)
        return products + attention / (PREFILL[Precision.BF16] * self.gpu.bf16) + self._reduce(tokens)

    def _products(self, tokens: float, bytes_read: float, share: float, asked: float | None = None) -> float:
        """Seconds of all products of ``tokens``, of which so many are asked for logits; None: all."""
        memory = bytes_read / (STREAM * self.gpu.bandwidth)
        active = self.shape.expert * self.shape.experts_per_token / self.shape.experts if self.shape.experts else 0
        speed = self.gpu.compute(self.choice.precision)
        compute = 2 * tokens * (self.shape.linear + active) / self.tensor_parallel / (share * speed)
        compute += 2 * (tokens if asked is None else asked) * self.shape.head / self.tensor_parallel / (share * self.gpu.bf16)
        power = SHARPNESS[self.choice.precision]
        return (memory**power + compute**power) ** (1 / power)

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
