# SPDX-License-Identifier: Apache-2.0
"""One precision of ``flashrl eval``: a vLLM engine in a process of its own, which ends with it.

    python -m benchmarks.legacy_learning.tools.evaluate.engine JOB.json ANSWER.json

The others are the rollout's engine: FlashRL's quantization of the BF16 weights while they are loaded. BF16 is vLLM
without any quantization. What the engine holds is asked of its live model before anything is generated.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flashrl_verl.errors import FlashRLError
from flashrl_verl.platforms.cores import bind_ranks
from flashrl_verl.plugins.versions import vllm_device
from flashrl_verl.settings import FlashRLConfig, Precision
from benchmarks.legacy_learning.tools.engines import process as engine_process
from benchmarks.legacy_learning.tools.engines.arms import Arm
from benchmarks.legacy_learning.tools.engines.child import run_child, start
from benchmarks.legacy_learning.tools.engines.mismatch_engine import kernel_names, require_formats
from benchmarks.legacy_learning.tools.evaluate.partial import PARTIAL, Response, kept_in, read

LOG = "engine.log"
"""What the engine said, in its folder."""

_COUNT = "progress"
"""File in its folder with the number of responses so far."""

_BATCHED_TOKENS = 4096
"""Of a step of a CPU engine, where no prompt is longer."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What an engine is to do."""

    model: str
    """Folder of the BF16 weights."""
    precision: str
    layers: dict[str, Any]
    """``ignore``, ``keep_first_layers`` and ``keep_last_layers``."""
    prompts: list[list[int]]
    samples: int
    """Responses to each prompt."""
    temperature: float
    top_p: float
    max_tokens: int
    """Longest response."""
    seed: int
    stop_token_ids: list[int]
    vocab_size: int
    """Length of the tokenizer: what an embedding has beyond it is masked, as in verl's rollout."""
    tensor_parallel_size: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What it did."""

    responses: list[list[list[int]]]
    """``samples`` token lists for each prompt."""
    truncated: list[list[bool]]
    """Whether each ended at ``max_tokens``."""
    layers: dict[str, Any]
    """Numbers of the live model: ``quantized_layers``, ``unquantized_layers``, ``kept_layers``, ``weight_bytes``."""
    kernels: dict[str, str]
    seconds: dict[str, float]
    """``start`` and ``generate``, of the last engine."""
    kept: int = 0
    """Responses of engines before it, which were stopped."""


def ask(job: Job, folder: Path, progress: Callable[[int, int], None]) -> Answer:
    """Run one engine in a process of its own.

    Args:
        job: what it is to do.
        folder: for its log; it exists.
        progress: told how many responses there are, and will be.

    Raises:
        FlashRLError: it failed; the message has its error and the log's path.
    """
    count, total = folder / _COUNT, len(job.prompts) * job.samples
    count.unlink(missing_ok=True)

    def tell() -> None:
        with contextlib.suppress(FileNotFoundError, ValueError):
            progress(int(count.read_text()), total)

    title = f"the {job.precision} engine"
    answer = engine_process.ask(
        "benchmarks.legacy_learning.tools.evaluate.engine", Path(LOG).stem, asdict(job), folder, title=title, meanwhile=tell
    )
    count.unlink(missing_ok=True)
    return Answer(**answer)


def require_engine(precision: Precision, workers: list[dict[str, Any]], kept: dict[str, Any]) -> None:
    """Refuse an engine that is not what its figures will be called, as a run does (``rollout/inspection.py``).

    Args:
        precision: their name.
        workers: ``FlashRLWorkerExtension.flashrl_layers`` of each.
        kept: ``Job.layers``.

    Raises:
        FlashRLError: a worker's live model holds something else, has layers that the quantizer does not know, or has
            not those that were to stay in BF16.
    """
    first, last = kept.get("keep_first_layers", 0), kept.get("keep_last_layers", 0)
    for layers in workers:
        if precision is Precision.BF16:  # vLLM's own: it has no config of ours to name a precision
            layers = layers | {"precision": "bf16" if layers["precision"] == "None" else layers["precision"]}
        require_formats(
            Arm(precision=precision), layers, "--precision", "Name them with --ignore, or take --precision bf16"
        )
        if layers["ignore_unused"]:
            raise FlashRLError(f"--ignore {' '.join(layers['ignore_unused'])} matches no layer of the model")
        if precision is not Precision.BF16 and len(layers["kept_indices"]) < first + last:
            raise FlashRLError(
                f"--keep-first-layers {first} and --keep-last-layers {last} keep {len(layers['kept_indices'])} layers "
                f"of this model instead of {first + last}: they count names with '.layers.<number>.', and need as "
                "many. Name the layers with --ignore"
            )


def work(job: Job, folder: Path) -> Answer:
    """Start the engine, look at it, generate what is not there.

    Args:
        job: what to do.
        folder: of the files that get the number of responses so far, and each response.
    """
    started = time.monotonic()
    kept = len(read(folder / PARTIAL))
    llm = _start(job)
    workers = llm.collective_rpc("flashrl_layers")
    require_engine(Precision(job.precision), workers, job.layers)
    llm.collective_rpc("monkey_patch_model", kwargs={"vocab_size": job.vocab_size})  # as verl's server does
    ready = time.monotonic()
    responses = generate(llm, job, folder / _COUNT, folder / PARTIAL)
    ended = time.monotonic()
    grouped = [responses[first : first + job.samples] for first in range(0, len(responses), job.samples)]
    first = workers[0]
    return Answer(
        responses=[[response.token_ids for response in group] for group in grouped],
        truncated=[[response.truncated for response in group] for group in grouped],
        layers={
            "quantized_layers": first["quantized_layers"],
            "quantized": first["quantized"],
            "unquantized_layers": len(first["unquantized_layers"]),
            "kept_layers": first["kept_layers"],
            "weight_bytes": sum(worker["weight_bytes"] for worker in workers),
        },
        kernels=kernel_names(job.precision),
        seconds={"start": round(ready - started, 2), "generate": round(ended - ready, 2)},
        kept=kept,
    )


def _start(job: Job) -> Any:
    quantized = job.precision != Precision.BF16.value
    longest = max(map(len, job.prompts)) + job.max_tokens
    arguments: dict[str, Any] = {}
    if vllm_device() != "cuda":
        arguments = {"enforce_eager": True, **whole_prompts(longest)}  # compiling takes a CPU longer than it gains
        bind_ranks(job.tensor_parallel_size)
    return start(
        job.model,
        FlashRLConfig(precision=Precision(job.precision), **job.layers) if quantized else None,
        in_process=job.tensor_parallel_size == 1,  # one process to watch, and to read an error of
        max_model_len=longest,
        tensor_parallel_size=job.tensor_parallel_size,
        seed=job.seed,
        **arguments,
    )


def whole_prompts(longest: int) -> dict[str, Any]:
    """Arguments of a CPU engine whose requests have seeds: vLLM takes a draw back after every piece of a prompt but the
    last, and a CPU's generator cannot (`GPUModelRunner._bookkeeping_sync`; 0.27)."""
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": max(longest, _BATCHED_TOKENS)}


def generate(llm: Any, job: Job, count: Path, partial: Path | None = None) -> list[Response]:
    """The responses, problem by problem.

    vLLM's own loop over an offline engine (``LLM.generate``) gives them when all are there; this one keeps each when it
    ends. Every request has random numbers of its own, the same in every engine. One that a stop cut off is drawn again
    as it was: other draws would put responses of any length in the place of those that take longest. And two precisions
    share them (common random numbers; vLLM takes the token of the largest probability over an exponential draw, the
    Gumbel-max trick), so that their responses go apart only where their probabilities do.

    Args:
        llm: the engine.
        job: what is asked.
        count: file that gets the number of responses so far.
        partial: file of those that are there, which gets the others; None: nothing is kept.
    """
    from tqdm import tqdm
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    common = dict(
        temperature=job.temperature,
        top_p=job.top_p,
        max_tokens=job.max_tokens,
        stop_token_ids=job.stop_token_ids,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    # Each sample is a request of its own: vLLM shares a prompt's computation among them by its prefix cache.
    prompts = [ids for ids in job.prompts for _ in range(job.samples)]
    there = {} if partial is None else read(partial)
    engine = llm.llm_engine
    for number, ids in enumerate(prompts):
        if number not in there:
            params = SamplingParams(**common, seed=_request_seed(job.seed, number))
            engine.add_request(str(number), {"prompt_token_ids": ids}, params)
    bar = tqdm(total=len(prompts), initial=len(there), desc="responses", mininterval=30.0)  # of the log
    with bar, contextlib.nullcontext() if partial is None else kept_in(partial) as keep:
        while engine.has_unfinished_requests():
            ended = [result for result in engine.step() if result.finished]
            for result in ended:
                number, output = int(result.request_id), result.outputs[0]
                there[number] = Response(token_ids=list(output.token_ids), truncated=output.finish_reason == "length")
                if keep is not None:
                    keep(number, there[number])
                bar.update()
            if ended:
                _write_count(count, len(there))
    return [there[number] for number in range(len(prompts))]


def _request_seed(seed: int, number: int) -> int:
    """Of a request's own generator, 63 bits; seeds next to each other have nothing in common."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _write_count(count: Path, number: int) -> None:
    scratch = count.with_suffix(".new")
    scratch.write_text(str(number))
    scratch.replace(count)


if __name__ == "__main__":
    run_child(Job, work)
