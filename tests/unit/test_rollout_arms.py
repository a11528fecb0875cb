# SPDX-License-Identifier: Apache-2.0
"""An engine of `flashrl bench rollout` that is not what its arm says, or has no weights, is refused before it is
timed."""

import pytest

from benchmarks.rollout_engine import Job, require_arm, require_weights
from flashrl_verl.errors import FlashRLError

INT8_KV = "int8_per_token_head"


def looked_at(
    precision="int8",
    kv_cache="auto",
    there=None,
    quantized="int8",
    kv_dtype="bfloat16",
    held="auto",
    unquantized=(),
) -> None:
    """`require_arm` of an engine on an H200 that was to be INT8."""
    job = Job(
        model="m", precision=precision, kv_cache=kv_cache, works=[], repeats=1, gpu_memory_utilization=0.9,
        tensor_parallel=1,
        max_num_seqs=1, max_num_batched_tokens=1, profile=False, seed=0, device=there,
    )  # fmt: skip
    cache = {"dtypes": {held: 2}, "backends": ["FLASH_ATTN"]}
    layers = {"precision": quantized, "quantized": {} if quantized == "bf16" else {"int8": 8}, "kv_cache": cache}
    layers |= {"unquantized_layers": dict.fromkeys(unquantized, "ColumnParallelLinear"), "kept_layers": []}
    require_arm(job, layers, {"kv_dtype": kv_dtype}, {"device": "NVIDIA H200"})


@pytest.mark.parametrize(
    "more, part",
    [
        (dict(quantized="bf16"), "--arm int8: the engine's quantization is 'bf16'"),
        (dict(unquantized=["a.in_proj"]), "--arm int8 would leave 1 layers .*a.in_proj.*Leave this arm out"),
        (dict(kv_dtype="uint8"), "--arm int8:auto: the engine's KV cache is uint8, not bfloat16"),
        (dict(kv_cache=INT8_KV, held=INT8_KV), f"--arm int8:{INT8_KV}: the engine's KV cache is bfloat16, not int8"),
        (
            dict(kv_cache=INT8_KV),
            rf"--arm int8 \+ {INT8_KV} KV: flashrl.kv_cache={INT8_KV}, but .* KV cache in {{'auto': 2}}",
        ),
        (dict(there="NVIDIA H100 80GB HBM3"), "another device, NVIDIA H100 80GB HBM3; this is NVIDIA H200"),
    ],
)
def test_an_engine_that_is_not_what_its_arm_says_is_refused(more, part):
    with pytest.raises(FlashRLError, match=part):
        looked_at(**more)


def test_an_engine_that_is_what_its_arm_says_is_measured():
    looked_at()
    looked_at(there="NVIDIA H200")
    looked_at(kv_cache=INT8_KV, kv_dtype="int8", held=INT8_KV)


def test_weights_that_nobody_wrote_are_refused():
    require_weights({"zeros": 0.02})
    with pytest.raises(FlashRLError, match="97% of the engine's weights are zero"):
        require_weights({"zeros": 0.97})
