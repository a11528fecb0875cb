# SPDX-License-Identifier: Apache-2.0
"""The other side of ``engine_process``: what a module does that is run there. It starts vLLM as a run does, updates its
weights as a run does, and writes an answer."""

import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from flashrl_verl.errors import FlashRLError
from flashrl_verl.settings import FlashRLConfig
from flashrl_verl.trainer.atomic_write import write_whole

_GPU_MEMORY_SHARE = 0.9
"""Of the GPU's free memory, for vLLM: whatever else runs there keeps its own."""

_CPU_KV_GIB = "1"
"""KV cache of an engine on a CPU, GiB; ``VLLM_CPU_KVCACHE_SPACE`` overrides it."""

Job = TypeVar("Job")
Bucket = list[tuple[str, torch.Tensor]]


def run_child(job_type: type[Job], work: Callable[[Job, Path], Any]) -> None:
    """Read the job named first on the command line, do it, write the answer to the file named second.

    Args:
        job_type: dataclass of the job.
        work: does it, told the folder of its files too; returns a dataclass.
    """
    from omegaconf import OmegaConf

    from flashrl_verl.platforms import activate
    from flashrl_verl.plugins.versions import vllm_device

    job_file, answer_file = map(Path, sys.argv[1:])
    activate(OmegaConf.create({"trainer": {"device": vllm_device()}}))
    answer = work(job_type(**json.loads(job_file.read_text())), answer_file.parent)
    write_whole(answer_file, json.dumps(asdict(answer)).encode())


def start(
    model: str,
    quantization: FlashRLConfig | None,
    *,
    in_process: bool,
    gpu_memory_utilization: float | None = None,
    worker_extension: str = "flashrl_verl.rollout.worker.FlashRLWorkerExtension",
    **arguments: Any,
) -> Any:
    """Start an engine on token ids, in BF16 but for what is quantized.

    Args:
        model: folder with config.json.
        quantization: FlashRL's; None for vLLM without any.
        in_process: keep the engine's core in this process, where an error of it can be read and a function reaches the
            model.
        gpu_memory_utilization: share of a GPU's memory; None for most of what is free.
        worker_extension: class that is mixed into vLLM's worker.
        **arguments: further ones of ``vllm.LLM``.
    """
    if in_process:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", _CPU_KV_GIB)
    import vllm

    from flashrl_verl.plugins.versions import vllm_device

    if quantization is not None:
        from flashrl_verl.plugins.vllm import register
        from flashrl_verl.quantization.config import engine_arguments

        register()
        arguments |= engine_arguments(quantization)
    if vllm_device() == "cuda":
        arguments["gpu_memory_utilization"] = gpu_memory_utilization or _share_of_free_memory()
    return vllm.LLM(
        model, skip_tokenizer_init=True, worker_extension_cls=worker_extension, dtype="bfloat16", **arguments
    )


def drop_prefix_cache(llm: Any) -> None:
    """Forget the keys and values of the weights before an update: else the next answers would be half the former
    model's.

    Raises:
        FlashRLError: vLLM kept them, which it only logs.
    """
    if not llm.reset_prefix_cache():
        raise FlashRLError(
            "vLLM did not reset its prefix cache after a weight update, because requests hold blocks of it: answers "
            "would mix keys and values of two models. Of this one nothing was measured; vLLM's warning is in the "
            "engine's log. Run the command again"
        )


def _share_of_free_memory() -> float:
    free, total = torch.cuda.mem_get_info()
    return _GPU_MEMORY_SHARE * free / total


def update(runner: Any, updates: Iterable[Iterable[Bucket]]) -> int:
    """Update the weights of vLLM's model in this process, once or several times; returns how many tensors the last one
    brought.

    Args:
        runner: vLLM's model runner.
        updates: of each, lists of names and BF16 tensors on the model's device.
    """
    from flashrl_verl.refit.load import WeightRefit

    device = next(runner.model.parameters()).device
    refit, report = WeightRefit(runner.model, runner.vllm_config.model_config, device), {}
    for step, buckets in enumerate(updates):
        refit.begin(step)
        for bucket in buckets:
            refit.load(bucket)
            del bucket  # or the next one is made while this one still takes memory
        report = refit.finish()
    return report["tensors"] - len(report["skipped"])
