# SPDX-License-Identifier: Apache-2.0
"""Classes of the kernels of a decode step, by their names."""

import re
from typing import Any

BETWEEN_PRODUCTS = "norms, rope, activation"

CLASSES = {
    "communication": r"nccl|all_?reduce|all_?gather|reduce_?scatter|cross_device|multimem",
    "experts": r"moe|topk_?gating|expert",
    "KV write": r"reshape_(and_)?cache|concat_and_cache|write_kv_cache",
    # FlashInfer's kernels of every kind have "flash" in their namespace.
    "attention": r"flash(::|_?attn|_fwd)|fmha|attention|read_kv_cache|reduce_segments|paged_|prepare_varlen",
    "activation quantization": r"(scaled|dynamic|static|per_token|group).*quant|quant_(fp8|int8)|per_token_group",
    "linear layers": r"gemm|gemv|nvjet|cutlass|cublas|xmma|wgmma|splitk|scaled_mm|matmul|onednn|aten::(mm|addmm|bmm)",
    "sampling": r"sort|topk|top_k|top_p|gumbel|softmax|argmax|exponential|distribution|multinomial|_temperature|penalt"
    r"|logprob|ranks?_kernel|sampl",
    BETWEEN_PRODUCTS: r"rms_?norm|layer_?norm|rotary|silu|gelu|act_and_mul",
    "copies": r"memcpy|memset|copy_kernel|aten::copy_",
}
"""Name to what the names of its kernels contain; the first that fits has it. Names are those of vLLM 0.24,
FlashAttention 3, CUTLASS, cuBLAS, NCCL and ATen."""

OTHER = "other"

_GENERATED = re.compile(r"^triton_(poi|red|per)_")
"""What Inductor makes is called after the operations before and behind it too, such as
``..._scaled_int8_quant_mul_silu``: it is norms, rotary embedding and activation functions, with a little of
sampling."""

_PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in CLASSES.items()}


def class_of(kernel: str) -> str:
    """A kernel's class, by its name."""
    if _GENERATED.match(kernel):
        return BETWEEN_PRODUCTS
    return next((name for name, pattern in _PATTERNS.items() if pattern.search(kernel)), OTHER)


def regrouped(profile: dict[str, Any]) -> dict[str, Any]:
    """A recorded ``StepProfile`` with kernels of Inductor's in their class: older releases had told it by their whole
    names."""
    milliseconds, launches = dict(profile["milliseconds"]), dict(profile["launches"])
    kernels = []
    for recorded, name, time, count in profile["kernels"]:
        kind = BETWEEN_PRODUCTS if _GENERATED.match(name) else recorded
        if kind != recorded:
            for sums, value in ((milliseconds, time), (launches, count)):
                sums[recorded] -= value
                sums[kind] += value
        kernels.append([kind, name, time, count])
    return profile | {"milliseconds": milliseconds, "launches": launches, "kernels": kernels}
