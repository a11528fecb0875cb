# SPDX-License-Identifier: Apache-2.0
"""One precision of ``flashrl bench mismatch``: a vLLM engine in a process of its own, which ends with it.

    python -m benchmarks.legacy_learning.tools.engines.mismatch_engine JOB.json ANSWER.json

The engine starts with random weights and gets the model's by weight updates, as in a run: cast to BF16, loaded by
``WeightRefit``. Then it samples, and scores the common sequences.
"""

import itertools
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from flashrl_verl.errors import FlashRLError
from flashrl_verl.quantization.formats import weight_format
from flashrl_verl.settings import FlashRLConfig, KVCache, Precision
from benchmarks.legacy_learning.tools.engines import process as engine_process
from benchmarks.legacy_learning.tools.engines.arms import Arm
from benchmarks.legacy_learning.tools.engines.child import Bucket, drop_prefix_cache, run_child, start, update

_BUCKET_TENSORS = 16
"""Tensors handed over at once; verl counts bytes instead. At most 16 x 1.6 GB (a 32B model's embedding) on the GPU."""

_MAX_BATCHED_TOKENS = 4096
_MAX_SEQUENCES = 256


@dataclass(frozen=True, kw_only=True)
class Job:
    """What an engine is to do."""

    model: str
    """Folder of the checkpoint."""
    precision: str
    kv_cache: str
    """``flashrl.kv_cache``."""
    prompts: list[list[int]]
    tokens: int
    """Longest response."""
    stop_token_ids: list[int]
    vocab_size: int
    """Length of the tokenizer."""
    gpu_memory_utilization: float | None
    """Share of the GPU for the engine; None for most of what is free."""
    seed: int
    common: list[list[int]] | None
    """A response to each prompt, to be scored; None for the engine's own."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What it did. Log-probs are those of temperature 1, one list a response."""

    responses: list[list[int]]
    log_probs: list[list[float]]
    """Of ``responses``, as they were sampled: one token at a time."""
    common_log_probs: list[list[float]]
    """Of the common responses, given as prompts: all tokens of a response at once."""
    layers: dict[str, Any]
    """``FlashRLWorkerExtension.flashrl_layers``: what the live engine's model is."""
    kernels: dict[str, str]
    """Of linear layers and of experts."""
    updated: int
    """Tensors that the last weight update brought."""
    seconds: dict[str, float]
    """``start``, ``load`` (both updates), ``sample``, ``score``."""


def ask(job: Job, folder: Path) -> Answer:
    """Run one engine in a process of its own.

    Args:
        job: what it is to do.
        folder: for its log.

    Raises:
        FlashRLError: it failed; the message has its error and the log's path.
    """
    module = "benchmarks.legacy_learning.tools.engines.mismatch_engine"
    return Answer(**engine_process.ask(module, name_of(job), asdict(job), folder, title=f"the {arm_of(job)} engine"))


def arm_of(job: Job) -> Arm:
    """The arm that a job measures."""
    return Arm(precision=Precision(job.precision), kv_cache=KVCache(job.kv_cache))


def name_of(job: Job) -> str:
    """Of the files of a job's engine."""
    return "engine-" + (job.precision if job.kv_cache == KVCache.AUTO.value else f"{job.precision}-{job.kv_cache}")


def require_formats(arm: Arm, layers: dict[str, Any], option: str, remedy: str = "Leave this arm out") -> None:
    """The live engine's model, not its arguments, decides whether a row may carry the arm's name.

    Args:
        arm: the name.
        layers: of its ``Answer``.
        option: by which the command was given the name.
        remedy: against layers that the quantizer does not know.

    Raises:
        FlashRLError: the engine holds something else, or half of it only.
    """
    from flashrl_verl.rollout.inspection import require_kv_cache, unknown_layers  # vLLM: reports are drawn without

    fmt = weight_format(arm.precision)
    expected = set() if fmt is None else {fmt.storage}
    if layers["precision"] != arm.precision.value or set(layers["quantized"]) != expected:
        raise FlashRLError(
            f"{option} {arm}: the engine's quantization is {layers['precision']!r} and its quantized weights are "
            f"{layers['quantized'] or 'none'}"
        )
    if fmt is not None and (unknown := unknown_layers(layers)):
        raise FlashRLError(
            f"{option} {arm} would leave {len(unknown)} layers of this model in high precision, of kinds the quantizer "
            f"does not know: {list(unknown.items())[:8]}. {remedy}"
        )
    try:
        require_kv_cache(arm.kv_cache, layers["kv_cache"])
    except FlashRLError as error:
        raise FlashRLError(f"{option} {arm}: {error}") from error


def work(job: Job) -> Answer:
    """Start the engine, update its weights, sample and score."""
    started = time.monotonic()
    llm = _start(job)
    (layers,) = llm.collective_rpc("flashrl_layers")
    llm.collective_rpc("monkey_patch_model", kwargs={"vocab_size": job.vocab_size})  # as verl's server does
    ready = time.monotonic()
    (updated,) = llm.collective_rpc(update_from, args=(job.model,))
    drop_prefix_cache(llm)
    loaded = time.monotonic()
    responses, log_probs = _sample(llm, job)
    sampled = time.monotonic()
    common_log_probs = _score(llm, job.prompts, responses if job.common is None else job.common)
    seconds = {
        "start": ready - started,
        "load": loaded - ready,
        "sample": sampled - loaded,
        "score": time.monotonic() - sampled,
    }
    return Answer(
        responses=responses,
        log_probs=log_probs,
        common_log_probs=common_log_probs,
        layers=layers,
        kernels=kernel_names(job.precision),
        updated=updated,
        seconds={name: round(value, 2) for name, value in seconds.items()},
    )


def _start(job: Job) -> Any:
    return start(
        job.model,
        FlashRLConfig(precision=Precision(job.precision), kv_cache=KVCache(job.kv_cache)),
        in_process=True,  # the weight update reaches the model without crossing another border
        gpu_memory_utilization=job.gpu_memory_utilization,
        load_format="dummy",
        enforce_eager=True,
        logprobs_mode="processed_logprobs",
        max_model_len=max(map(len, job.prompts)) + job.tokens + 1,  # scoring asks for one token more
        max_num_batched_tokens=_MAX_BATCHED_TOKENS,
        max_num_seqs=_MAX_SEQUENCES,
        seed=job.seed,
    )


def update_from(worker: Any, model: str, updates: int = 2) -> int:
    """Weight updates of a vLLM worker's model from a checkpoint; returns how many tensors one brings."""
    sent = _sent_weights(model)
    device = next(worker.model_runner.model.parameters()).device
    return update(worker.model_runner, (_buckets(sent, device) for _ in range(updates)))


def _buckets(sent: list[tuple[str, torch.Tensor]], device: torch.device) -> Iterator[Bucket]:
    from flashrl_verl.refit.sender import cast_for_rollout

    weights = cast_for_rollout(sent, torch.bfloat16)
    while bucket := [(name, t.to(device)) for name, t in itertools.islice(weights, _BUCKET_TENSORS)]:
        yield bucket


def _sent_weights(model: str) -> list[tuple[str, torch.Tensor]]:
    """The tensors that verl's FSDP engine sends, under the names it gives them."""
    from transformers import AutoModelForCausalLM

    from benchmarks.legacy_learning.tools.engines.shapes import sent_tensors

    with torch.device("cpu"):  # vLLM's worker has made the GPU the default
        return list(sent_tensors(AutoModelForCausalLM.from_pretrained(model, dtype="auto")))


def _sample(llm: Any, job: Job) -> tuple[list[list[int]], list[list[float]]]:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=1.0, max_tokens=job.tokens, logprobs=0, stop_token_ids=job.stop_token_ids, detokenize=False
    )
    results = llm.generate([{"prompt_token_ids": ids} for ids in job.prompts], params, use_tqdm=False)
    outputs = [result.outputs[0] for result in results]
    return [list(o.token_ids) for o in outputs], [
        [step[token].logprob for token, step in zip(o.token_ids, o.logprobs, strict=True)] for o in outputs
    ]


def _score(llm: Any, prompts: list[list[int]], responses: list[list[int]]) -> list[list[float]]:
    from vllm import SamplingParams

    # vLLM's prompt log-probs are of the raw logits, which at temperature 1 without top-k or top-p are the processed
    # ones.
    params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    whole = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    results = llm.generate([{"prompt_token_ids": ids} for ids in whole], params, use_tqdm=False)
    return [
        [result.prompt_logprobs[i][ids[i]].logprob for i in range(len(prompt), len(ids))]
        for result, prompt, ids in zip(results, prompts, whole, strict=True)
    ]


def kernel_names(precision: str) -> dict[str, str]:
    """Of linear layers and of experts, as this machine multiplies them in a precision."""
    from flashrl_verl.quantization.gemm import device_kernels

    fmt = weight_format(Precision(precision))
    if fmt is None:
        return {"linear": "unquantized", "experts": "unquantized"}
    choice = device_kernels(fmt)
    return {"linear": choice.linear.value, "experts": choice.experts.value}


if __name__ == "__main__":
    run_child(Job, lambda job, folder: work(job))
