# SPDX-License-Identifier: Apache-2.0
"""Where the memory of one rollout GPU goes, and how many tokens the KV cache holds: the arithmetic of vLLM's start-up.

vLLM takes ``gpu_memory_utilization`` of the GPU, loads the weights, runs the largest batch it may ever see, and gives
the KV cache what is left.
"""

import math
from dataclasses import dataclass

from flashrl_verl.attention.limits import why_not
from flashrl_verl.settings import KVCache, Precision
from flashrl_verl.tools.plan.shape import ModelShape

GIB = 2**30

GPUS = {
    "a100-40gb": 39.4,
    "a100-80gb": 79.2,
    "a6000": 47.5,
    "l40": 44.4,
    "l40s": 44.4,
    "h100": 79.2,
    "h100-nvl": 93.1,
    "h200": 139.8,
}
"""GiB that CUDA reports as total, somewhat less than the name says; estimates, to a percent or two."""

BF16 = 2
"""Bytes of an element."""

FIXED_BYTES = 0.43 * GIB
"""CUDA context, NCCL, cuBLAS workspaces: what vLLM 0.24 keeps on one H200 beside the rest, at 7B and 32B alike."""

GRAPH_BYTES = 16 * 2**20
"""Of a layer, in the CUDA graphs' pool, which vLLM estimates and leaves out of the KV cache. Its own estimates on an
H200 are 0.9 to 1.0 GiB at 64 layers and 0.5 at 28, for graphs of up to 512 sequences."""

LOGIT_BYTES = 18
"""While sampling, for each logit: itself in BF16, in FP32, log-probs, probabilities and random numbers in FP32."""

SCALE_BYTES = 4
"""One FP32 scale per output channel, and per token and head of an INT8 KV cache."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What decides over an engine's memory."""

    gpu: str
    """A name of ``GPUS``."""
    gib: float
    """Of each GPU, for the engine: ``gpu_memory_utilization`` of its memory."""
    tensor_parallel: int = 1
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192


@dataclass(frozen=True)
class Memory:
    """One GPU of an engine, as vLLM divides it when it starts."""

    shape: ModelShape
    engine: Engine
    precision: Precision
    kv_cache: KVCache = KVCache.AUTO

    def __str__(self) -> str:
        return self.precision.value + " + INT8 KV" * (self.kv_cache is not KVCache.AUTO)

    @property
    def weights(self) -> float:
        """Bytes of the weights."""
        in_bf16, projections = self.precision is Precision.BF16, self.shape.projections
        layers = projections * BF16 if in_bf16 else projections + self.shape.channels * SCALE_BYTES
        divided = (layers + self.shape.embeddings * BF16) / self.engine.tensor_parallel
        return divided + self.shape.other * BF16

    @property
    def activations(self) -> float:
        """Bytes at the peak of vLLM's profiling run: the widest layer of the largest batch, or the sampler's logits.

        A layer holds the residual, its normalized copy, gate and up, and their product, beside it in eight bits for
        the next layer.
        """
        config, tokens = self.shape.config, self.engine.max_num_batched_tokens
        gate = self.shape.width * self.shape.gates
        eight_bits = 0 if self.precision is Precision.BF16 else 1
        of_token = 2 * config.hidden_size * BF16 + gate * (3 * BF16 + eight_bits) / self.engine.tensor_parallel
        return max(tokens * of_token, min(self.engine.max_num_seqs, tokens) * config.vocab_size * LOGIT_BYTES)

    @property
    def kv(self) -> float:
        """Bytes that are left for the KV cache, at least 0."""
        rest = self.activations + FIXED_BYTES + self.shape.config.num_hidden_layers * GRAPH_BYTES
        return max(0.0, self.engine.gib * GIB - self.weights - rest)

    @property
    def kv_per_token(self) -> float:
        """Bytes of KV cache of one token. KV heads are copied where there are fewer than GPUs."""
        dim, heads = self.shape.head_dim, math.ceil(self.shape.kv_heads / self.engine.tensor_parallel)
        of_head = dim * BF16 if self.kv_cache is KVCache.AUTO else dim + SCALE_BYTES
        return 2 * self.shape.config.num_hidden_layers * heads * of_head

    @property
    def tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return int(self.kv // self.kv_per_token)

    def refused(self, length: int) -> str | None:
        """Why the engine cannot run with sequences of so many tokens; None if it can."""
        shape, heads = self.shape, self.shape.config.num_attention_heads
        if self.precision is Precision.FP8 and self.engine.gpu.startswith(("a100", "a6000")):
            return "no FP8 tensor cores"
        if self.kv_cache is not KVCache.AUTO and (why := why_not(shape.head_dim, heads, shape.kv_heads)):
            return f"its attention does not take the model's {why}"
        if self.tokens >= length:
            return None
        return (
            f"{self.weights / GIB:.1f} GiB of weights leave {self.kv / GIB:.1f} of {self.engine.gib:.1f} GiB "
            f"for the KV cache: {self.tokens} tokens, one sequence has {length}"
        )
