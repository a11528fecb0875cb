# SPDX-License-Identifier: Apache-2.0
"""What ``flashrl bench rollout`` asks of a vLLM worker: weights of the right kind, and what the KV cache became."""

import json
import platform
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig

from benchmarks.rollout_profile import StepRecorder
from flashrl_verl.rollout.worker import FlashRLWorkerExtension
from flashrl_verl.tools.engines.child import Bucket, update
from flashrl_verl.tools.software import machine_digest

_BUCKET_BYTES = 1 << 30
"""Bytes of random weights on the GPU at a time, beside the engine's own; a larger tensor goes alone."""

_STD = 0.02
"""Standard deviation of the weights; small, so that activations stay finite through all layers."""

_STD_ROWS = 1024
"""Rows of a matrix from which that is measured again."""


class BenchWorkerExtension(FlashRLWorkerExtension):
    """Mixed into vLLM's worker by ``worker_extension_cls``. Methods return plain data."""

    def bench_fill(self, config_folder: str, seed: int) -> int:
        """Give the model random weights by one weight update, as a run does; returns how many tensors it had.

        Codes that nobody wrote are zeros, with which kernels take less power and the GPU clocks higher.
        """
        runner = self.model_runner
        device = next(runner.model.parameters()).device
        return update(runner, [_buckets(config_folder, device, seed)])

    def bench_memory(self) -> dict[str, Any]:
        """Tokens that the KV cache holds, its element type, and bytes of it and of the weights on this worker."""
        runner = self.model_runner
        config = runner.kv_cache_config
        return {
            "kv_tokens": kv_tokens(config),
            "kv_bytes": sum(tensor.size for tensor in config.kv_cache_tensors),
            "kv_dtype": str(config.kv_cache_groups[0].kv_cache_spec.dtype).removeprefix("torch."),
            "weight_bytes": sum(p.nbytes for p in runner.model.parameters()),
        }

    def bench_weights(self) -> dict[str, float]:
        """What this worker's matrices are: share of zeros, and standard deviation of the first in BF16, the
        embedding."""
        matrices = [p.data for p in self.model_runner.model.parameters() if p.dim() > 1 and p.numel() > p.shape[0]]
        # Bytes of an 8-bit format: not every device compares FP8.
        plain = [m.view(torch.int8) if m.element_size() == 1 else m for m in matrices]
        written = sum(int(torch.count_nonzero(m)) for m in plain)
        first = next(m for m in matrices if m.dtype == torch.bfloat16)
        return {
            "zeros": 1 - written / sum(m.numel() for m in plain),
            "std": float(first[:_STD_ROWS].float().std()),
        }

    def bench_record(self, sequences: int, skip: int, steps: int) -> None:
        """Record, in the next rollout, ``steps`` steps that decode so many sequences, after ``skip`` such."""
        self._recorder = StepRecorder(self, sequences, skip, steps)

    def bench_recorded(self) -> tuple[dict[str, Any] | None, str | None]:
        """What was recorded, a ``StepProfile``, or why nothing was."""
        self._recorder.stop()
        result = self._recorder.result
        return None if result is None else asdict(result), self._recorder.reason

    def bench_device(self) -> dict[str, Any]:
        """Name of this worker's device, bytes of its memory (None on a CPU), and which machine of that kind this is."""
        here: dict[str, Any] = {"machine": machine_digest()}
        if next(self.model_runner.model.parameters()).is_cuda:
            return here | {"device": torch.cuda.get_device_name(), "memory_bytes": torch.cuda.mem_get_info()[1]}
        return here | {"device": f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)", "memory_bytes": None}


def kv_tokens(config: KVCacheConfig) -> int:
    """Tokens that a KV cache holds. Layers of different kinds (full and sliding-window attention) are groups, which
    share the
    blocks: a token takes a slot in a block of each."""
    groups = config.kv_cache_groups
    return config.num_blocks // len(groups) * min(group.kv_cache_spec.block_size for group in groups)


def _buckets(config_folder: str, device: torch.device, seed: int) -> Iterator[Bucket]:
    generator = torch.Generator(device).manual_seed(seed)
    bucket: Bucket = []
    for name, meta in _tensors(config_folder):
        tensor = torch.empty(meta.shape, dtype=torch.bfloat16, device=device).normal_(0, _STD, generator=generator)
        bucket.append((name, tensor))
        if sum(t.nbytes for _, t in bucket) >= _BUCKET_BYTES:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _tensors(config_folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    from transformers import AutoConfig

    from flashrl_verl.tools.engines.shapes import tensor_shapes

    # vLLM's worker has made the GPU and BF16 the defaults, and the quantization is no matter of the checkpoint's shape.
    settings = json.loads((Path(config_folder) / "config.json").read_text())
    settings.pop("quantization_config", None)
    with torch.device("cpu"):
        yield from tensor_shapes(AutoConfig.for_model(**settings))
