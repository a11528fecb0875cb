# SPDX-License-Identifier: Apache-2.0
"""Where the memory of one rollout GPU goes, and how many tokens the KV cache holds: the arithmetic of vLLM's start-up.

vLLM takes ``gpu_memory_utilization`` of the GPU, loads the weights, runs the largest batch it may ever see, and gives
the KV cache what is left.
"""

from dataclasses import dataclass

from flashrl_verl.settings import KVCache, Precision
from flashrl_verl.tools.plan.gpus import GIB, GPU
from flashrl_verl.tools.plan.shape import ModelShape

BF16 = 2
"""Bytes of an element."""

FIXED_BYTES = 0.43 * GIB
"""CUDA context, NCCL, cuBLAS workspaces: what vLLM 0.24 keeps on one H200 beside the rest, at 7B and 32B alike."""

GRAPH_BYTES = 16 * 2**20
"""Of a layer, in the CUDA graphs' pool, which vLLM estimates and leaves out of the KV cache. Its own estimates on an
H200 are 0.9 to 1.0 GiB at 64 layers and 0.5 at 28."""

LOGIT_BYTES = 18
"""While sampling, for each logit: itself in BF16, in FP32, log-probs, probabilities and random numbers in FP32."""

SCALE_BYTES = 4
"""One FP32 scale per output channel."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Settings of an engine that decide over memory and speed, by verl's names in ``actor_rollout_ref.rollout``."""

    tensor_parallel: int = 1
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A variant of the rollout: number formats of weights and KV cache."""

    precision: Precision
    kv_cache: KVCache = KVCache.AUTO

    def __str__(self) -> str:
        return self.precision.value + " + INT8 KV" * self.eight_bit_kv

    @property
    def eight_bit_kv(self) -> bool:
        return self.kv_cache is not KVCache.AUTO

    def kv_element_bytes(self, head_dim: int) -> float:
        """Bytes of an element of the KV cache, its share of a scale for each token and head included."""
        return 1 + SCALE_BYTES / head_dim if self.eight_bit_kv else BF16


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one GPU; ``kv`` is at least 0."""

    weights: float
    activations: float
    kv: float
    kv_per_token: float

    @property
    def tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return int(self.kv // self.kv_per_token)


def weight_bytes(shape: ModelShape, choice: Choice, tensor_parallel: int = 1) -> float:
    """Bytes of a model's weights on one GPU of so many. Norms and routers, which every GPU holds whole, are small."""
    quantized = shape.linear + shape.expert
    if choice.precision is Precision.BF16:
        bytes_quantized = quantized * BF16
    else:
        bytes_quantized = quantized + shape.linear_rows * SCALE_BYTES
    return (bytes_quantized + (shape.head + shape.embedding) * BF16) / tensor_parallel + shape.other * BF16


def activation_bytes(shape: ModelShape, choice: Choice, engine: Engine) -> float:
    """Bytes at the peak of vLLM's profiling run: the widest layer of the largest batch, or the sampler's logits.

    A layer holds the residual, its normalized copy, gate and up, and their product, beside it in eight bits for the
    next layer.
    """
    wide = shape.intermediate / engine.tensor_parallel
    per_token = 2 * shape.hidden * BF16 + wide * BF16 + wide / 2 * BF16
    if choice.precision is not Precision.BF16:
        per_token += wide / 2
    layer = engine.max_num_batched_tokens * per_token
    sampling = min(engine.max_num_seqs, engine.max_num_batched_tokens) * shape.vocabulary * LOGIT_BYTES
    return max(layer, sampling)


def memory_of(shape: ModelShape, choice: Choice, gpu: GPU, engine: Engine) -> Memory:
    """Divide a GPU's memory as vLLM does when it starts."""
    weights = weight_bytes(shape, choice, engine.tensor_parallel)
    activations = activation_bytes(shape, choice, engine)
    usable = gpu.memory_gib * GIB * engine.gpu_memory_utilization
    return Memory(
        weights=weights,
        activations=activations,
        kv=max(0.0, usable - weights - activations - FIXED_BYTES - shape.layers * GRAPH_BYTES),
        kv_per_token=shape.kv_bytes_per_token(choice.kv_element_bytes(shape.head_dim), engine.tensor_parallel),
    )
