# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention backend ``CUSTOM``: an INT8 KV cache with a scale for each token and head, decoded by our kernel.

vLLM has this format in its Triton attention (``int8_per_token_head``, vllm/v1/attention/backends/triton_attn.py), which is
general and slow: its decode kernel reads values across the order that tensor cores want, and a prompt's tokens read the cache
three at a time. Here

- sequences with one new token are decoded by ``triton_decode.py``;
- prompts are read by FlashAttention, from BF16 keys and values that ``read_kv_cache_kernel`` makes of the cache first, some ten
  thousand tokens at a time.

A backend is upstream's hook (``vllm.v1.attention.backends.registry.register_backend``); nothing of vLLM's is changed.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec

from flashrl_verl.attention import kernels, pages

NAME = "CUSTOM"
KV_CACHE_DTYPE = "int8_per_token_head"

_REMEDY = (
    "Set +actor_rollout_ref.rollout.engine_kwargs.vllm.attention_backend=TRITON_ATTN (vLLM's, slower), or flashrl.kv_cache=auto"
)

_READ_AT_ONCE = 1 << 15
"""Tokens whose keys and values are BF16 at one time while prompts are read (one sequence may have more): 128 MiB for eight KV
heads of 128."""


@dataclass
class Reading:
    """Some sequences of a batch whose prompts are read by one call of FlashAttention."""

    rows: slice
    """Sequences of the batch."""
    tokens: slice
    """New tokens of the batch."""
    query_starts: torch.Tensor
    """[sequences + 1] int32, from 0."""
    key_starts: torch.Tensor
    """[sequences + 1] int32: all tokens of each, the new ones last."""
    longest_query: int
    longest: int
    total: int


@dataclass
class Metadata:
    """What all layers of a step share."""

    decodes: int
    """Sequences with one new token, which are the batch's first; with the rows that pad a CUDA graph."""
    readings: list[Reading]
    table: torch.Tensor
    lengths: torch.Tensor
    scratch: kernels.Scratch


class Int8KVBackend(AttentionBackend):
    """The name, the shapes and what is supported."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [KV_CACHE_DTYPE]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type["Int8KVAttention"]:
        return Int8KVAttention

    @staticmethod
    def get_builder_cls() -> type["MetadataBuilder"]:
        return MetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [16, 32, 64, 128]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return pages.shape(num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        if include_num_layers_dimension:
            raise NotImplementedError("a KV cache with all layers in one tensor")
        return (0, 1, 2, 3, 4)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in kernels.HEAD_SIZES

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability >= DeviceCapability(8, 0)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER


class MetadataBuilder(AttentionMetadataBuilder[Metadata]):
    """Splits a batch in sequences that decode and prompts that are read."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold: int | None = 1

    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        graphs = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        self._scratch = kernels.Scratch.make(
            max(vllm_config.scheduler_config.max_num_seqs, graphs),
            vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config),
            kv_cache_spec.num_kv_heads,
            kv_cache_spec.head_size,
            device,
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Metadata:
        common = common_attn_metadata
        decodes, reading, _, _ = split_decodes_and_prefills(common, decode_threshold=1)
        return Metadata(
            decodes=decodes,
            readings=self._readings(common, decodes) if reading else [],
            table=common.block_table_tensor,
            lengths=common.seq_lens,
            scratch=self._scratch,
        )

    def _readings(self, common: CommonAttentionMetadata, first: int) -> list[Reading]:
        lengths = common.seq_lens_cpu_upper_bound
        lengths = (common.seq_lens if lengths is None else lengths)[: common.num_reqs].tolist()
        starts = common.query_start_loc_cpu.tolist()
        readings, end = [], first
        while end < common.num_reqs:
            start, total = end, 0
            while end < common.num_reqs and (end == start or total + lengths[end] <= _READ_AT_ONCE):
                total += lengths[end]
                end += 1
            queries = [starts[row] - starts[start] for row in range(start, end + 1)]
            keys = [0]
            for length in lengths[start:end]:
                keys.append(keys[-1] + length)
            reading = Reading(
                rows=slice(start, end),
                tokens=slice(starts[start], starts[end]),
                query_starts=self._to_device(queries),
                key_starts=self._to_device(keys),
                longest_query=max(b - a for a, b in zip(queries, queries[1:], strict=False)),
                longest=max(lengths[start:end]),
                total=total,
            )
            if reading.longest_query > 0:  # else rows that pad the batch
                readings.append(reading)
        return readings

    def _to_device(self, numbers: list[int]) -> torch.Tensor:
        host = torch.tensor(numbers, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        return host.to(self.device, non_blocking=True)


class Int8KVAttention(AttentionImpl):
    """One layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = KV_CACHE_DTYPE,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **unknown: Any,
    ):
        for name, given in {
            "ALiBi": alibi_slopes,
            "a sliding window": sliding_window,
            "a cap on logits": logits_soft_cap,
            "a KV cache that layers share": kv_sharing_target_layer_name,
            **unknown,
        }.items():
            if given:
                raise ValueError(
                    f"flashrl.kv_cache={KV_CACHE_DTYPE}: its attention has no {name}, and this model's layers do. {_REMEDY}"
                )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sharing = num_heads // self.num_kv_heads
        if sharing > kernels.MOST_SHARING:
            raise ValueError(
                f"flashrl.kv_cache={KV_CACHE_DTYPE}: {sharing} query heads share one head of keys and values; "
                f"its attention takes up to {kernels.MOST_SHARING}. {_REMEDY}"
            )
        self.kv_cache_dtype = kv_cache_dtype
        self._flash_attention = get_flash_attn_version(head_size=head_size)
        self._pages: pages.Pages | None = None
        self._cache_address = 0

    def _pages_of(self, kv_cache: torch.Tensor) -> pages.Pages:
        if self._pages is None or kv_cache.data_ptr() != self._cache_address:
            self._pages, self._cache_address = pages.pages_of(kv_cache), kv_cache.data_ptr()
        return self._pages

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Quantize the step's new keys and values into the cache; vLLM calls it before ``forward``."""
        kernels.write(key, value, self._pages_of(kv_cache), slot_mapping)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the step's new tokens.

        Args:
            layer: that this belongs to.
            query: [tokens or more, heads, head_size].
            key: [tokens or more, KV heads, head_size], in the cache already.
            value: alike.
            kv_cache: ``pages.shape``.
            attn_metadata: of the step; None while vLLM measures memory.
            output: like query, written.
            output_scale: not supported; so is ``output_block_scale``.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("quantized output of attention")
        if attn_metadata is None:
            # What reading prompts takes has to be seen when vLLM gives the rest of the memory to the cache.
            torch.empty(2, _READ_AT_ONCE, self.num_kv_heads, self.head_size, dtype=query.dtype, device=query.device)
            return output.fill_(0)
        cache, step = self._pages_of(kv_cache), attn_metadata
        if step.decodes:
            rows = slice(step.decodes)
            kernels.decode(query[rows], cache, step.table, step.lengths, self.scale, output[rows], step.scratch)
        for reading in step.readings:
            self._read(query[reading.tokens], cache, step, reading, output[reading.tokens])
        return output

    def _read(self, query: torch.Tensor, cache: pages.Pages, step: Metadata, reading: Reading, output: torch.Tensor) -> None:
        key, value = kernels.read(
            cache, step.table[reading.rows], reading.key_starts, reading.longest, reading.total, query.dtype
        )
        flash_attn_varlen_func(
            q=query,
            k=key,
            v=value,
            out=output,
            cu_seqlens_q=reading.query_starts,
            max_seqlen_q=reading.longest_query,
            cu_seqlens_k=reading.key_starts,
            max_seqlen_k=reading.longest,
            softmax_scale=self.scale,
            causal=True,
            fa_version=self._flash_attention,
        )
