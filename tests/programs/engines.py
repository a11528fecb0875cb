# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines inside the test's process, so that their parameters can be looked at, and refits of them.

On a machine with a GPU the engine is the CUDA one, elsewhere the CPU one.
"""

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

CUDA = torch.cuda.is_available()
os.environ["VERL_PLATFORM"] = "nvidia" if CUDA else "cpu"
os.environ["VERL_RAY_JOB_ID"] = f"test-{os.getpid()}"  # in the name of weight sockets: two test processes do not meet


@contextlib.contextmanager
def engine(
    path: Path, settings: dict[str, Any] | None = None, *, compiled: bool = False, **arguments: Any
) -> Iterator[Any]:
    """Start ``vllm.LLM`` on a model folder; end it and its process group afterwards.

    Args:
        path: folder with config.json (and weights, unless load_format is dummy).
        settings: FlashRL's settings for the quantization; None leaves vLLM's own loading alone.
        compiled: torch.compile and, on CUDA, CUDA graphs; otherwise eager, which starts sooner.
        **arguments: further engine arguments.
    """
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")
    import vllm
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    if settings is not None:
        from flashrl_verl.plugins.vllm import register
        from flashrl_verl.quantization.config import engine_arguments
        from flashrl_verl.settings import FlashRLConfig

        register()
        arguments = {
            **engine_arguments(FlashRLConfig(**settings)),
            "worker_extension_cls": "flashrl_verl.rollout.worker.FlashRLWorkerExtension",
            "load_format": "dummy",
            **arguments,
        }
    if CUDA and compiled:
        # vLLM's older model runner forbids captures of graphs once it has made its own, for the whole process; its
        # newer one (vllm/v1/worker/gpu, which Qwen3 and Llama get) does not allow them again.
        from vllm.compilation.monitor import set_cudagraph_capturing_enabled

        set_cudagraph_capturing_enabled(True)
    llm = None
    try:
        llm = vllm.LLM(
            str(path),
            **{
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
                **arguments,
            },
        )
        yield llm
    finally:
        del llm
        torch.set_default_dtype(torch.float32)  # vLLM leaves its own behind when a model cannot be built
        cleanup_dist_env_and_memory()  # other engines and tests of this process want process groups of their own
        gc.collect()


def runner(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


@contextlib.contextmanager
def parallel_engine(path: Path, settings: dict[str, Any], ranks: int, **arguments: Any) -> Iterator[Any]:
    """``engine`` with tensor parallelism and ``InspectedWorker``s, in processes of their own.

    Args:
        path: as in ``engine``.
        settings: as in ``engine``.
        ranks: tensor-parallel size.
        **arguments: further engine arguments.
    """
    from flashrl_verl.platforms.cores import VARIABLE, share_cores

    variables = {VARIABLE: share_cores(sorted(os.sched_getaffinity(0)), ranks), "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        with engine(
            path,
            settings,
            tensor_parallel_size=ranks,
            distributed_executor_backend="mp",
            worker_extension_cls="inspected_worker.InspectedWorker",
            disable_custom_all_reduce=True,
            **arguments,
        ) as llm:
            yield llm
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def update(llm: Any, ranks: int, weights: dict[str, torch.Tensor], step: int) -> list[dict]:
    """Send one weight update to a ``parallel_engine`` as the trainer does, each rank's over a socket of its own.

    Returns:
        The workers' reports, by rank.
    """
    import asyncio
    import threading

    from flashrl_verl.refit.transfer import WatchedSender

    timeout_s = 120.0
    errors: list[BaseException] = []

    def send(rank: int) -> None:
        sender = WatchedSender(
            timeout_s=timeout_s,
            receiver_ended=lambda: None,
            zmq_handle=f"ipc:///tmp/rl-colocate-zmq-{os.environ['VERL_RAY_JOB_ID']}-replica-0-rank-{rank}.sock",
            bucket_size_mb=1,
            use_shm=True,
        )
        try:
            asyncio.run(sender.async_send_weights(iter(weights.items())))
        except BaseException as error:  # noqa: BLE001 - a thread's error is the caller's
            errors.append(error)

    threads = [threading.Thread(target=send, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    request = {"step": step, "timeout_s": timeout_s}
    reports = llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True, "flashrl": request})
    for thread in threads:
        thread.join()
    llm.reset_prefix_cache()
    failed = [report["error"] for report in reports if report["error"]]
    assert not errors and not failed, (failed, errors)
    return reports


class Refit:
    """A ``WeightRefit`` of an engine's model that is called like one weight update, in buckets of a few tensors.

    As in training every bucket lies in the same memory, over the one before it, and no update finds its tensors where
    the last one had them.
    """

    _ALIGNMENT = 256

    def __init__(self, llm: Any):
        from flashrl_verl.refit.load import WeightRefit

        self._llm, self._runner = llm, runner(llm)
        self.model, self.model_config = self._runner.model, self._runner.vllm_config.model_config
        self.device = torch.device("cuda" if CUDA else "cpu")
        self.account = WeightRefit(self.model, self.model_config, self.device)

    def _room(self, tensor: torch.Tensor) -> int:
        return -(-tensor.nbytes // self._ALIGNMENT) * self._ALIGNMENT

    def _placed(
        self, bucket: list[tuple[str, torch.Tensor]], memory: torch.Tensor, offset: int
    ) -> list[tuple[str, torch.Tensor]]:
        """The bucket's tensors copied into ``memory``, one after another from ``offset``; strided ones stay where they
        are."""
        placed = []
        for name, tensor in bucket:
            if not tensor.is_contiguous():
                placed.append((name, tensor.to(self.device)))
                continue
            copy = memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            placed.append((name, copy.copy_(tensor)))
            offset += self._room(tensor)
        return placed

    def __call__(self, weights: dict[str, torch.Tensor], step: int, bucket: int = 5) -> dict:
        items = list(weights.items())
        buckets = [items[first : first + bucket] for first in range(0, len(items), bucket)]
        shift = step % 7 * self._ALIGNMENT
        size = shift + max(sum(self._room(tensor) for _, tensor in bucket) for bucket in buckets)
        memory = torch.full((size,), 0xFF, dtype=torch.uint8, device=self.device)  # NaN in every dtype
        self.account.begin(step)
        for bucket in buckets:
            self.account.load(self._placed(bucket, memory, shift))
        report = self.account.finish()
        self._llm.reset_prefix_cache()
        return report


def greedy(llm: Any, prompt: tuple[int, ...] = (5, 6, 7, 8), tokens: int = 10) -> tuple[list[int], list[float]]:
    """Greedy tokens and the log-prob of each."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=0, ignore_eos=True, detokenize=False)
    out = llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)[0].outputs[0]
    return list(out.token_ids), [step[t].logprob for t, step in zip(out.token_ids, out.logprobs, strict=True)]


def teacher_forced(llm: Any, sequences: list[list[int]]) -> list[list[float]]:
    """Log-prob the engine gives every token after the first of each sequence."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    results = llm.generate([{"prompt_token_ids": ids} for ids in sequences], params, use_tqdm=False)
    return [
        [position[token].logprob for position, token in zip(r.prompt_logprobs[1:], ids[1:], strict=True)]
        for r, ids in zip(results, sequences, strict=True)
    ]
