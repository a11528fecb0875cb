# SPDX-License-Identifier: Apache-2.0
"""What ``flashrl bench rollout`` is asked and answered in its tests."""

from benchmarks.rollout import RolloutConfig
from benchmarks.rollout_engine import Answer, Timing
from flashrl_verl.settings import KVCache, Precision
from flashrl_verl.tools.engines.arms import Arm
from flashrl_verl.tools.plan.schedule import Work

BF16, INT8 = (Arm(precision=precision) for precision in (Precision.BF16, Precision.INT8))
INT8_KV8 = Arm(precision=Precision.INT8, kv_cache=KVCache.INT8_PER_TOKEN_HEAD)
WORK = Work(sequences=10, prompt=100, response=51)


def answer(precision: Precision, seconds: list[float], prefill: list[float], device="NVIDIA H100 80GB HBM3") -> Answer:
    dtypes = {"int8": {"int8": 8}, "bf16": {}}[precision.value]
    return Answer(
        layers={"precision": precision.value, "quantized": dtypes},
        memory={"kv_tokens": 1000, "kv_bytes": 512000, "kv_dtype": "bfloat16", "weight_bytes": 2e9},
        weights={"tensors": 10, "zeros": 0.01, "std": 0.02},
        device={"device": device, "memory_bytes": None},
        timings=[Timing(work=[10, 100, 51], seconds=seconds, prefill_seconds=prefill)],
    )


def config(tmp_path, **more) -> RolloutConfig:
    settings = dict(
        model="tiny", arms=(BF16, INT8), works=(WORK,), rounds=2, repeats=2, gpu_memory_utilization=0.9,
        tensor_parallel=1,
        max_num_seqs=64, max_num_batched_tokens=512, layers=None, seed=0, output=tmp_path,
    )  # fmt: skip
    return RolloutConfig(**{**settings, **more})
