# SPDX-License-Identifier: Apache-2.0
"""What ``flashrl bench rollout`` asks of a vLLM worker: weights of the right kind, and what the KV cache became."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from flashrl_verl.config import FlashRLConfig
from flashrl_verl.rollout.worker import FlashRLWorkerExtension

_BUCKET_BYTES = 1 << 30
"""Bytes of random weights on the GPU at a time, beside the engine's own; a larger tensor goes alone."""

_STD = 0.02
"""Standard deviation of the weights; small, so that activations stay finite through all layers."""


class BenchWorkerExtension(FlashRLWorkerExtension):
    """Mixed into vLLM's worker by ``worker_extension_cls``. Methods return plain data."""

    def bench_fill(self, config_folder: str, seed: int) -> int:
        """Give the model random weights by one weight update, as a run does; returns how many tensors it had.

        Codes that nobody wrote are zeros, with which kernels take less power and the GPU clocks higher.
        """
        from flashrl_verl.rollout.receipt import stride_for

        runner = self.model_runner
        device = next(runner.model.parameters()).device
        names = [name for name, _ in _tensors(config_folder)]
        refit, post_process = self._refit_of(runner, device)
        refit.begin(0, stride_for(len(names), FlashRLConfig().receipt_tensors))
        generator = torch.Generator(device).manual_seed(seed)
        bucket: list[tuple[str, torch.Tensor]] = []
        for name, meta in _tensors(config_folder):
            tensor = torch.empty(meta.shape, dtype=torch.bfloat16, device=device).normal_(0, _STD, generator=generator)
            bucket.append((name, tensor))
            if sum(t.nbytes for _, t in bucket) >= _BUCKET_BYTES:
                refit.load(bucket)
                bucket = []
        if bucket:
            refit.load(bucket)
        refit.finish(post_process)
        return len(names)

    def bench_memory(self) -> dict[str, Any]:
        """Tokens that the KV cache holds, its element type, and bytes of it and of the weights on this worker."""
        runner = self.model_runner
        config = runner.kv_cache_config
        block = max(group.kv_cache_spec.block_size for group in config.kv_cache_groups)
        return {
            "kv_tokens": config.num_blocks * block,
            "kv_bytes": sum(tensor.size for tensor in config.kv_cache_tensors),
            "kv_dtype": str(config.kv_cache_groups[0].kv_cache_spec.dtype).removeprefix("torch."),
            "weight_bytes": sum(p.nbytes for p in runner.model.parameters()),
        }

    @staticmethod
    def _refit_of(runner: Any, device: torch.device) -> tuple[Any, Any]:
        from flashrl_verl.rollout.post_process import PostProcess
        from flashrl_verl.rollout.refit import WeightRefit

        return WeightRefit(runner.model), PostProcess(runner.model, runner.vllm_config.model_config, device)


def _tensors(config_folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    from transformers import AutoConfig

    from flashrl_verl.bench.shapes import tensor_shapes

    # vLLM's worker has made the GPU and BF16 the defaults, and the quantization is no matter of the checkpoint's shape.
    settings = json.loads((Path(config_folder) / "config.json").read_text())
    settings.pop("quantization_config", None)
    with torch.device("cpu"):
        yield from tensor_shapes(AutoConfig.for_model(**settings))
