# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention backend ``CUSTOM``: an INT8 KV cache with a scale for each token and head, decoded by our kernel.

vLLM has this format in its Triton attention (``int8_per_token_head``, vllm/v1/attention/backends/triton_attn.py), which
is general and slow: its decode kernel reads values across the order that tensor cores want, and a prompt's tokens read
the cache three at a time. Here

- new tokens are decoded by ``triton_decode.py``, those of prompts too as long as a CUDA graph holds the batch, which
  saves Python's time;
- prompts of larger batches are read by FlashAttention, from BF16 keys and values that ``read_kv_cache_kernel`` makes of
  the cache first, some ten thousand tokens at a time.

A backend is upstream's hook (``vllm.v1.attention.backends.registry.register_backend``); nothing of vLLM's is changed.
"""

import dataclasses
from typing import Any, ClassVar

import torch
from vllm.config import CUDAGraphMode, VllmConfig, get_current_vllm_config, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
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

from flashrl_verl.attention import graphs_hold_prompts, kernels, pages
from flashrl_verl.attention.limits import NAME, REMEDY, why_not
from flashrl_verl.attention.metadata import Metadata, Prefill, prefills_of

KV_CACHE_DTYPE = "int8_per_token_head"

BLOCK_SIZES = (16, 32, 64, 128)

_READ_AT_ONCE = 1 << 15
"""Tokens whose keys and values are BF16 at one time while prompts are read: 128 MiB for eight KV heads of 128."""


def _refuse(what: str) -> None:
    raise ValueError(f"flashrl.kv_cache={KV_CACHE_DTYPE}: {what}. {REMEDY}")


class Int8KVBackend(AttentionBackend):
    """The name, the shapes and what is supported."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
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
    def get_supported_kernel_block_sizes(kv_cache_spec: AttentionSpec | None = None) -> list[int | MultipleOf]:
        return list(BLOCK_SIZES)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Since vLLM 0.29: the bytes of a token and head in a page."""
        return dataclasses.replace(spec, state_content_bytes=2 * (spec.head_size + pages.SCALE_BYTES))

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Since vLLM 0.29: those in which a page is one run of bytes, whose order is ours."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return KVCacheLayout.LBHNC, KVCacheLayout.BLHNC

    @staticmethod
    def get_kv_cache_shape(  # before vLLM 0.29, as is the stride order
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return pages.shape(num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        if include_num_layers_dimension:
            raise NotImplementedError("a KV cache with all layers in one tensor")
        return (0, 1, 2, 3, 4)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False  # a connector that cuts a page by the shape it is told would move parts of other tokens

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True  # so that it is ``Int8KVAttention`` that refuses it, with a remedy, and not vLLM, which has none


class MetadataBuilder(AttentionMetadataBuilder[Metadata]):
    """Splits a batch in tokens that are decoded and prompts that are read."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.ALWAYS if graphs_hold_prompts() else AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )
    reorder_batch_threshold: int | None = 1

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if vllm_config.speculative_config is not None:
            _refuse("it has no speculative decoding, whose lengths the host only guesses")
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        self._compilation = vllm_config.compilation_config
        self._graphs = self._compilation.max_cudagraph_capture_size or 0
        self._plan = kernels.Plan.make(
            max(vllm_config.scheduler_config.max_num_seqs, self._graphs),
            max(layer.num_heads for layer in layers.values()),
            kv_cache_spec.num_kv_heads,
            kv_cache_spec.head_size,
            device,
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Metadata:
        common, prefills = common_attn_metadata, []
        rows = common.num_actual_tokens
        # Asked of each step, as vLLM may choose another mode once it knows all layers.
        if rows > self._graphs or self._compilation.cudagraph_mode.mixed_mode() is not CUDAGraphMode.FULL:
            rows, num_prefills, _, _ = split_decodes_and_prefills(common, decode_threshold=1)
            if num_prefills:
                lengths = common.seq_lens_cpu_upper_bound  # exact without speculative decoding
                lengths = (common.seq_lens if lengths is None else lengths)[: common.num_reqs].tolist()
                starts = common.query_start_loc_cpu.tolist()
                prefills = prefills_of(starts, lengths, rows, _READ_AT_ONCE, self._to_device)
        self._plan.fill(common.query_start_loc, common.seq_lens, rows)
        return Metadata(rows, prefills, common.block_table_tensor, self._plan)

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
            "sliding window": sliding_window,
            "cap on logits": logits_soft_cap,
            **unknown,
        }.items():
            if given:
                _refuse(f"its attention has no {name}, and this model's layers do")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if reason := why_not(head_size, num_heads, self.num_kv_heads):
            _refuse(f"the model has {reason}")
        self.kv_cache_dtype = kv_cache_dtype
        self._flash_attention = get_flash_attn_version(head_size=head_size)
        if self._flash_attention is None:
            _refuse("prompts are read by vLLM's FlashAttention, which this build or GPU does not have")
        self._read_at_once = max(_READ_AT_ONCE, get_current_vllm_config().model_config.max_model_len)

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Quantize the step's new keys and values into the cache; vLLM calls it before ``forward``."""
        kernels.write(key, value, kv_cache, slot_mapping)

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
            kv_cache: as ``pages.geometry`` takes it.
            attn_metadata: of the step; None while vLLM measures memory.
            output: like query, written.
            output_scale: not supported; neither is ``output_block_scale``.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("quantized output of attention")
        if attn_metadata is None:
            # What reading prompts takes has to be seen when vLLM gives the rest of the memory to the cache.
            torch.empty(
                2, self._read_at_once, self.num_kv_heads, self.head_size, dtype=query.dtype, device=query.device
            )
            return output.fill_(0)
        step = attn_metadata
        if step.rows:
            rows = slice(step.rows)
            kernels.decode(query[rows], kv_cache, step.block_table, step.plan, self.scale, output[rows])
        for prefill in step.prefills:
            self._prefill(
                query[prefill.tokens], kv_cache, step.block_table[prefill.rows], prefill, output[prefill.tokens]
            )
        return output

    def _prefill(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        prefill: Prefill,
        output: torch.Tensor,
    ) -> None:
        key, value = kernels.read(
            kv_cache, block_table, prefill.key_starts, prefill.max_seq_len, prefill.total, query.dtype
        )
        flash_attn_varlen_func(
            q=query,
            k=key,
            v=value,
            out=output,
            cu_seqlens_q=prefill.query_starts,
            max_seqlen_q=prefill.max_query_len,
            cu_seqlens_k=prefill.key_starts,
            max_seqlen_k=prefill.max_seq_len,
            softmax_scale=self.scale,
            causal=True,
            fa_version=self._flash_attention,
        )
