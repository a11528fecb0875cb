# SPDX-License-Identifier: Apache-2.0
"""One arm of ``flashrl bench rollout``: a vLLM engine in a process of its own, timed from outside as a run sees it.

    python -m flashrl_verl.bench.rollout_engine JOB.json ANSWER.json

The engine's core runs in another process again (vLLM's default), so that scheduling overlaps with the GPU's work.
"""

import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashrl_verl.config import FlashRLConfig, Precision

_WARM_UP_TOKENS = 8
"""Of a first rollout of each work, which is not measured: kernels of these sizes are chosen or compiled in it."""


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
    gpu_memory_utilization: float
    tensor_parallel: int
    max_num_seqs: int
    max_num_batched_tokens: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One work, measured."""

    work: list[int]
    seconds: list[float]
    """Of whole rollouts, one a repeat."""
    prefill_seconds: list[float]
    """Of the same prompts with one token each."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What it measured."""

    layers: dict[str, Any]
    """``FlashRLWorkerExtension.flashrl_layers`` of the first worker: what the live engine's model is."""
    memory: dict[str, Any]
    """``BenchWorkerExtension.bench_memory`` of the first worker."""
    backend: str
    """vLLM's attention backend."""
    timings: list[Timing]
    start_seconds: float


def work(job: Job) -> Answer:
    """Start the engine, give it weights, measure."""
    started = time.monotonic()
    llm = _start(job)
    layers = llm.collective_rpc("flashrl_layers")[0]
    memory = llm.collective_rpc("bench_memory")[0]
    llm.collective_rpc("bench_fill", args=(job.model, job.seed))
    vocabulary = json.loads((Path(job.model) / "config.json").read_text())["vocab_size"]
    draw = random.Random(job.seed)
    start_seconds = time.monotonic() - started
    timings = []
    for sequences, prompt, response in job.works:
        whole, prefill = [], []
        _generate(llm, _prompts(draw, sequences, prompt, vocabulary), min(response, _WARM_UP_TOKENS))
        for _ in range(job.repeats):
            prompts = _prompts(draw, sequences, prompt, vocabulary)
            prefill.append(_generate(llm, prompts, 1))
            whole.append(_generate(llm, prompts, response))
        timings.append(Timing(work=[sequences, prompt, response], seconds=whole, prefill_seconds=prefill))
    return Answer(layers=layers, memory=memory, backend=_backend(llm), timings=timings, start_seconds=round(start_seconds, 1))


def _start(job: Job) -> Any:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    import vllm

    from flashrl_verl.compat import vllm_device
    from flashrl_verl.plugin_vllm import register
    from flashrl_verl.quantization.config import NAME, quantization_config_dict

    register()
    settings = quantization_config_dict(FlashRLConfig(precision=Precision(job.precision)))
    arguments: dict[str, Any] = {}
    if vllm_device() == "cuda":
        arguments["gpu_memory_utilization"] = job.gpu_memory_utilization
    return vllm.LLM(
        job.model,
        skip_tokenizer_init=True,
        load_format="dummy",
        quantization=NAME,
        hf_overrides={"quantization_config": settings},
        worker_extension_cls="flashrl_verl.bench.rollout_worker.BenchWorkerExtension",
        dtype="bfloat16",
        kv_cache_dtype=job.kv_cache,
        # As in a run: log-probs of what was sampled; and no prompt is found in the cache.
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=False,
        tensor_parallel_size=job.tensor_parallel,
        max_model_len=max(prompt + response for _, prompt, response in job.works) + 1,
        max_num_batched_tokens=job.max_num_batched_tokens,
        max_num_seqs=job.max_num_seqs,
        seed=job.seed,
        **arguments,
    )


def _prompts(draw: random.Random, sequences: int, length: int, vocabulary: int) -> list[list[int]]:
    return [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(sequences)]


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


def _backend(llm: Any) -> str:
    config = llm.llm_engine.vllm_config
    backend = getattr(getattr(config, "attention_config", None), "backend", None)
    return getattr(backend, "name", None) or "vLLM's choice"


def main() -> None:
    """Read the job, do it, write the answer."""
    from omegaconf import OmegaConf

    from flashrl_verl.compat import vllm_device
    from flashrl_verl.platforms import activate

    job_file, answer_file = map(Path, sys.argv[1:])
    activate(OmegaConf.create({"trainer": {"device": vllm_device()}}))
    answer = work(Job(**json.loads(job_file.read_text())))
    answer_file.write_text(json.dumps(asdict(answer)))


if __name__ == "__main__":
    main()
