# SPDX-License-Identifier: Apache-2.0
"""How fast a model's shape generates, by variant, and how many tokens its KV cache holds.

    python -m benchmarks.rollout --model qwen2.5-32b --variants bf16,int8,int8+int8kv --workloads 256x256+384

Random weights that a weight update loads; vLLM's ``LLM`` with CUDA graphs, no prefix cache, log-probs of what is
sampled. With ``--spread`` lengths have a long tail. Each variant is an engine in a process of its own, one after
another. What is measured is written at once.
"""

from __future__ import annotations

import json
import math
import random
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any

import typer

from benchmarks.common import environment, in_own_process, run, show, words_of
from flashrl_verl.errors import ConfigError
from flashrl_verl.trainer.atomic_write import write_atomically

RESULTS = "rollout.jsonl"
ENGINE_SETTINGS = "gpu_memory_utilization", "max_num_batched_tokens", "max_num_seqs", "max_cudagraph_capture_size"


def measure(variant: str, model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """One engine: a line of ``rollout.jsonl``."""
    from benchmarks.engine import start

    tail = settings["spread"], settings["limit"]
    works = [(prompt, response_lengths(number, mean, *tail)) for number, prompt, mean in settings["workloads"]]
    llm = start(
        model,
        variant,
        in_process=False,
        enable_prefix_caching=False,
        disable_log_stats=not settings["spread"],
        max_model_len=max(prompt + max(lengths) for prompt, lengths in works) + 1,
        tensor_parallel_size=settings["tensor_parallel"],
        distributed_executor_backend="mp",  # as in a GPU run: scheduling overlaps with the GPU's work
        **{name: settings[name] for name in ENGINE_SETTINGS},
    )
    vocabulary = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    draw, timings = random.Random(0), []
    for sizes, (prompt, lengths) in zip(settings["workloads"], works, strict=True):

        def generate(most: int | None = None) -> tuple[float, list[list[float]]]:
            prompts = [[draw.randrange(vocabulary) for _ in range(prompt)] for _ in lengths]  # noqa: B023
            return _generate(llm, prompts, [min(length, most or length) for length in lengths])  # noqa: B023

        generate(8)  # kernels of these sizes are chosen or compiled
        pairs = [(generate(1)[0], *generate()) for _ in range(settings["repeats"])]
        prefill, whole, ends = map(list, zip(*pairs, strict=True))
        timings.append({"workload": sizes, "seconds": whole, "prefill_seconds": prefill, "ends": ends})
        print(json.dumps(timings[-1]), flush=True)
    memory = llm.collective_rpc("bench_memory")[0]
    llm.llm_engine.engine_core.shutdown()  # newer vLLMs leave it to the end of this process, which waits for it
    return {"variant": variant, "memory": memory, "timings": timings}


def response_lengths(sequences: int, mean: int, spread: float = 0.0, limit: int | None = None) -> list[int]:
    """Tokens of each response: evenly spaced quantiles of a lognormal distribution, always in the same order.

    Args:
        sequences: how many.
        mean: tokens on average.
        spread: standard deviation of the logarithm; 0: all have one length.
        limit: tokens at which a response is cut off; above the mean.
    """
    factors = [math.exp(spread * NormalDist().inv_cdf((i + 0.5) / sequences)) for i in range(sequences)]

    def of_median(median: float) -> list[int]:
        return [max(1, round(min(limit or math.inf, median * factor))) for factor in factors]

    if not spread:
        return [mean] * sequences
    low, high = 0.0, 100.0 * mean  # where the limit cuts, the median is above the mean of what is left
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if statistics.fmean(of_median(middle)) < mean else (low, middle)
    lengths = of_median(high)
    random.Random(0).shuffle(lengths)
    return lengths


def _generate(llm: Any, prompts: list[list[int]], lengths: list[int]) -> tuple[float, list[list[float]]]:
    """Seconds until every prompt has its tokens; and of each, where the engine keeps times, its tokens and its own
    seconds, the shortest first: the time between two ends over their tokens is that of a step."""
    from vllm import SamplingParams

    fixed = {"temperature": 1.0, "ignore_eos": True, "logprobs": 0, "detokenize": False}
    params = [SamplingParams(max_tokens=length, **fixed) for length in lengths]
    started = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    times = [output.metrics for output in outputs]
    if None in times:
        return seconds, []
    first = min(of.scheduled_ts for of in times)
    return seconds, sorted([n, round(of.last_token_ts - first, 3)] for n, of in zip(lengths, times, strict=True))


def workloads_of(text: str) -> list[list[int]]:
    """``256x256+384``: sequences x prompt + response tokens, separated by commas.

    Raises:
        ConfigError: one has another form.
    """
    found = []
    for word in words_of(text, option="--workloads"):
        if not (match := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)\+([1-9]\d*)", word)) or int(match[3]) < 2:
            raise ConfigError(f"--workloads {word!r}: a workload is sequences x prompt + response, such as 256x256+384")
        found.append([int(number) for number in match.groups()])
    return found


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A variant at a workload, of one measurement."""

    memory_gib: float
    workload: tuple[int, int, int]
    """Sequences, prompt tokens, response tokens."""
    variant: str
    seconds: list[float]
    decode_seconds: float
    """The whole less the same prompts with one token each."""
    memory: dict[str, Any]

    @property
    def tokens_per_second(self) -> list[float]:
        return [self.workload[0] * self.workload[2] / seconds for seconds in self.seconds]

    @property
    def fit(self) -> int:
        """Whole sequences that the KV cache holds."""
        return self.memory["kv_tokens"] // sum(self.workload[1:])


def rollouts_of(lines: list[Any]) -> list[Rollout]:
    """Of a ``rollout.jsonl``: by workload, then by variant."""
    head, *results = lines
    share, memory = head["settings"]["gpu_memory_utilization"], head["environment"]["memory_bytes"] or 0
    found = [
        Rollout(
            memory_gib=share * memory / 2**30,
            workload=tuple(timing["workload"]),
            variant=result["variant"],
            seconds=timing["seconds"],
            decode_seconds=statistics.median(
                whole - prompts for whole, prompts in zip(timing["seconds"], timing["prefill_seconds"], strict=True)
            ),
            memory=result["memory"],
        )
        for result in results
        for timing in result["timings"]
    ]
    order = list(dict.fromkeys(one.workload for one in found))
    return sorted(found, key=lambda one: order.index(one.workload))


def speed_up(one: Rollout, base: Rollout) -> str:
    """Of a whole rollout, over another variant's."""
    return f"{statistics.median(base.seconds) / statistics.median(one.seconds):.2f}"


def table(measured: Sequence[list[Any]]) -> list[list[str]]:
    """Tokens/s of the first variant, and how many times these others make, by model, memory and workload; sequences
    that fit. Header first.

    Args:
        measured: the lines of each ``rollout.jsonl``.
    """
    by_file = [(lines[0]["settings"], rollouts_of(lines)) for lines in measured]
    first, *others = dict.fromkeys(one.variant for _, of in by_file for one in of)
    rows = [["model", "memory GiB", "sequences x (prompt -> response)", f"{first}, tokens/s", *others]]
    for settings, of in by_file:
        for workload in dict.fromkeys(one.workload for one in of):
            there = {one.variant: one for one in of if one.workload == workload}
            base = there[first]
            words = "{} x ({} -> {})".format(*workload) + (", tail" if settings.get("spread") else "")
            row = [settings["model"], f"{base.memory_gib:.0f}", words]
            row.append(f"{statistics.median(base.tokens_per_second):.0f} ({base.fit})")
            row += [f"{speed_up(one, base)} ({one.fit})" if one else "-" for one in map(there.get, others)]
            rows.append(row)
    return rows


def rollout(
    model: Annotated[str, typer.Option(help="A name (qwen2.5-32b, tiny, ...), or a config.json's folder.")] = "tiny",
    variants: Annotated[str, typer.Option(help="precision[+int8kv], separated by commas.")] = "bf16,int8",
    workloads: Annotated[str, typer.Option(help="SEQUENCESxPROMPT+RESPONSE, separated by commas.")] = "64x64+64",
    spread: Annotated[float, typer.Option(min=0, help="Of the logarithm of lognormal responses; 0: all alike.")] = 0.0,
    limit: Annotated[int | None, typer.Option(min=2, help="Tokens that cut a response off; above the mean.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measured rollouts of each.")] = 2,
    gpu_memory_utilization: Annotated[float, typer.Option(help="vLLM's share of the GPU.")] = 0.9,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs of an engine.")] = 1,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="vLLM's.")] = 1024,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="vLLM's.")] = 8192,
    output: Annotated[Path, typer.Option(help=f"Folder for {RESULTS} and logs.")] = Path("outputs/rollout"),
) -> None:
    """Time rollouts of a model's shape by variant."""
    from benchmarks.engine import formats_of
    from flashrl_verl.tools.engines.shapes import load_config

    names = words_of(variants, option="--variants")
    for name in names:
        formats_of(name)
    config = load_config(model)
    asked = workloads_of(workloads)
    if limit is not None and limit <= (longest := max(response for _, _, response in asked)):
        raise ConfigError(f"--limit {limit} has to be above the mean response, {longest} tokens")
    settings = {
        "model": model,
        "workloads": asked,
        "spread": spread,
        "limit": limit,
        "repeats": repeats,
        "gpu_memory_utilization": gpu_memory_utilization,
        "tensor_parallel": tensor_parallel,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_cudagraph_capture_size": max(512, max_num_seqs),  # as a run's engines have it
    }
    file = output / RESULTS
    lines: list[Any] = [{"settings": settings, "environment": environment()}]
    path = output.resolve() / "model"
    config.save_pretrained(path)
    for name in names:
        print(f"{name}: started", flush=True)
        lines.append(in_own_process(measure, name, str(path), settings, log=output / f"{name}.log"))
        lines[0]["environment"]["memory_bytes"] = lines[-1]["memory"].pop("memory_bytes")
        write_atomically(file, "".join(json.dumps(line) + "\n" for line in lines).encode())
    header, *rows = table([lines])
    show(f"on {lines[0]['environment']['device']}", header, rows)
    print(f"written: {file}")


if __name__ == "__main__":
    run(rollout)
