# SPDX-License-Identifier: Apache-2.0
"""One arm of ``flashrl bench rollout``: a vLLM engine in a process of its own, timed from outside as a run sees it.

    python -m benchmarks.rollout_engine JOB.json ANSWER.json

The engine's core runs in another process again (vLLM's default), so that scheduling overlaps with the GPU's work.
"""

import json
import math
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashrl_verl.errors import FlashRLError
from flashrl_verl.settings import FlashRLConfig, KVCache, Precision
from flashrl_verl.tools.engines.arms import Arm
from flashrl_verl.tools.engines.child import run_child, start
from flashrl_verl.tools.engines.mismatch_engine import require_formats

_WARM_UP_TOKENS = 8
"""Of a first rollout of each work, which is not measured: kernels of these sizes are chosen or compiled in it."""

_RECORDED_STEPS = 8

_MOST_ZEROS = 0.1
"""Share of weights. Of normal ones some 1 % become a code of zero in INT8; vLLM pads some matrices with zeros."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What an engine is to do."""

    model: str
    """Folder with config.json."""
    precision: str
    kv_cache: str
    """vLLM's ``kv_cache_dtype``."""
    works: list[list[int]]
    """Sequences, prompt and response tokens of each."""
    repeats: int
    profile: bool
    gpu_memory_utilization: float
    tensor_parallel: int
    max_num_seqs: int
    max_num_batched_tokens: int
    seed: int
    device: str | None
    """Name of the device that the other results are of; None where there is none yet."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One work, measured."""

    work: list[int]
    seconds: list[float]
    """Of whole rollouts, one a repeat."""
    prefill_seconds: list[float]
    """Of the same prompts with one token each."""
    profile: dict[str, Any] | None = None
    """A ``StepProfile`` of the first worker, as a dictionary: of decode steps in the middle of a further rollout."""
    unrecorded: str | None = None
    """Why there is no profile; None where nobody asked for one."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What it measured."""

    layers: dict[str, Any]
    """``FlashRLWorkerExtension.flashrl_layers`` of the first worker: what the live engine's model is."""
    memory: dict[str, Any]
    """``BenchWorkerExtension.bench_memory`` of the first worker."""
    weights: dict[str, Any]
    """``BenchWorkerExtension.bench_weights`` of the first worker, after the update."""
    device: dict[str, Any]
    """``BenchWorkerExtension.bench_device`` of the first worker."""
    timings: list[Timing]


def work(job: Job) -> Answer:
    """Start the engine, look at it, give it weights, measure."""
    llm = _start(job)
    layers, memory, device = (
        llm.collective_rpc(name)[0] for name in ("flashrl_layers", "bench_memory", "bench_device")
    )
    require_arm(job, layers, memory, device)
    filled = llm.collective_rpc("bench_fill", args=(job.model, job.seed))[0]
    weights = {"tensors": filled} | llm.collective_rpc("bench_weights")[0]
    require_weights(weights)
    vocabulary = json.loads((Path(job.model) / "config.json").read_text())["vocab_size"]
    draw = random.Random(job.seed)
    timings = []
    for sequences, prompt, response in job.works:
        whole, prefill = [], []
        for tokens in (1, min(response, _WARM_UP_TOKENS)):  # one token alone takes another way through the sampler
            _generate(llm, _prompts(draw, sequences, prompt, vocabulary), tokens)
        for _ in range(job.repeats):
            prompts = _prompts(draw, sequences, prompt, vocabulary)
            prefill.append(_generate(llm, prompts, 1))
            whole.append(_generate(llm, prompts, response))
        timings.append(Timing(work=[sequences, prompt, response], seconds=whole, prefill_seconds=prefill))
    if job.profile:  # when all is timed: a GPU that has been traced may stay slower until the process ends
        timings = [_recorded(llm, job, timing, _prompts(draw, *timing.work[:2], vocabulary)) for timing in timings]
    return Answer(layers=layers, memory=memory, weights=weights, device=device, timings=timings)


def require_arm(job: Job, layers: dict[str, Any], memory: dict[str, Any], device: dict[str, Any]) -> None:
    """Refuse, before minutes are spent on it, an engine that is not what its figures will be called.

    Args:
        job: what they will be called.
        layers: as in ``Answer``; so are the others.

    Raises:
        FlashRLError: other weights, another KV cache, or another device than that of the results beside which they
            would stand.
    """
    require_formats(Arm(precision=Precision(job.precision), kv_cache=KVCache(job.kv_cache)), layers, "--arm")
    expected = {KVCache.AUTO: "bfloat16", KVCache.INT8_PER_TOKEN_HEAD: "int8"}[KVCache(job.kv_cache)]
    if memory["kv_dtype"] != expected:
        raise FlashRLError(
            f"--arm {job.precision}:{job.kv_cache}: the engine's KV cache is {memory['kv_dtype']}, not {expected}. "
            "Leave this arm out"
        )
    if job.device is not None:
        require_device(device, job.device)


def require_device(device: dict[str, Any], there: str) -> None:
    """Refuse figures of one device beside those of another.

    Args:
        device: as in ``Answer``.
        there: name of the other results' device.

    Raises:
        FlashRLError: they differ.
    """
    if device["device"] != there:
        raise FlashRLError(
            f"--output has results of another device, {there}; this is {device['device']}. Name another folder"
        )


def require_weights(weights: dict[str, Any]) -> None:
    """Refuse weights that the update did not write: with codes of zero kernels take less power, and the GPU clocks
    higher.

    Raises:
        FlashRLError: too many of them are zero.
    """
    if weights["zeros"] > _MOST_ZEROS:
        raise FlashRLError(
            f"{weights['zeros']:.0%} of the engine's weights are zero after the weight update; random ones are hardly "
            "ever. Speeds with them would be too high"
        )


def _start(job: Job) -> Any:
    return start(
        job.model,
        FlashRLConfig(precision=Precision(job.precision), kv_cache=KVCache(job.kv_cache)),
        in_process=False,
        gpu_memory_utilization=job.gpu_memory_utilization,
        worker_extension="benchmarks.rollout_worker.BenchWorkerExtension",
        load_format="dummy",
        # As in a run: log-probs of what was sampled; and no prompt is found in the cache.
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=False,
        tensor_parallel_size=job.tensor_parallel,
        max_model_len=max(prompt + response for _, prompt, response in job.works) + 1,
        max_num_batched_tokens=job.max_num_batched_tokens,
        max_num_seqs=job.max_num_seqs,
        seed=job.seed,
    )


def _prompts(draw: random.Random, sequences: int, length: int, vocabulary: int) -> list[list[int]]:
    return [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(sequences)]


def _recorded(llm: Any, job: Job, timing: Timing, prompts: list[list[int]]) -> Timing:
    """With the kernels of decode steps in the middle of one more rollout, between the last prompt's end and the first
    response's."""
    response = timing.work[2]
    reading = math.ceil(sum(map(len, prompts)) / job.max_num_batched_tokens)
    skip = max(0, (response - reading - _RECORDED_STEPS) // 2)
    llm.collective_rpc("bench_record", args=(len(prompts), skip, _RECORDED_STEPS))
    _generate(llm, prompts, response)
    profile, unrecorded = llm.collective_rpc("bench_recorded")[0]
    return replace(timing, profile=profile, unrecorded=unrecorded)


def _generate(llm: Any, prompts: list[list[int]], tokens: int) -> float:
    """Seconds until every prompt has so many tokens."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
    started = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    lengths = {len(output.outputs[0].token_ids) for output in outputs}
    if lengths != {tokens}:
        raise RuntimeError(f"responses of {sorted(lengths)} tokens where {tokens} were asked for")
    return seconds


if __name__ == "__main__":
    run_child(Job, lambda job, folder: work(job))
