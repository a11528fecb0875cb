# SPDX-License-Identifier: Apache-2.0
"""Would drafts make a rollout's tail faster? Three parts of one study, docs/results/drafts.md.

    python -m benchmarks.drafts sample --model MODEL --data train.jsonl --output drafts.npz        # on a GPU
    python -m benchmarks.drafts replay --samples drafts.npz --output acceptance.jsonl              # a minute of a CPU
    python -m benchmarks.drafts steps --drafts 0 --output steps-0.json                             # on a GPU; also 2, 4
    python -m benchmarks.drafts compose --steps steps-0.json,steps-2.json,steps-4.json

``replay`` needs no engine: rejection sampling accepts a deterministic draft with the policy's probability of it, so a
recorded sample accepts exactly the drafts that agree with it. ``steps`` plays such rates back, by vLLM's
``rejection_sample_method=synthetic``. ``compose`` puts both into recorded rollouts.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.common import RESULTS

ORDER = 10
"""Tokens of context that a draft looks at, at most."""
RATES = {2: (0.44, 0.30), 4: (0.39, 0.26, 0.19, 0.14)}
"""Accepted of finished siblings' drafts, by position (``replay``)."""
TOKENS = {
    "the response itself": {2: 1.381, 4: 1.476},
    "finished siblings": {2: 1.730, 4: 1.976},
    "siblings and epochs": {2: 1.867, 4: 2.189},
}
"""Tokens a step by source and drafts (``replay``)."""

To = Annotated[Path, typer.Option("--output")]
Samples = Annotated[Path, typer.Option("--samples")]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Counts = dict[tuple[int, ...], dict[int, int]]
"""How often each token followed each context."""


@app.command()
def sample(model: Annotated[str, typer.Option()], data: Annotated[Path, typer.Option()], output: To) -> None:
    """Sixteen responses to each of 64 problems, three times, at temperature 1, in BF16."""
    from vllm import LLM, SamplingParams

    from benchmarks.mismatch import prompts_of

    job = prompts_of(model, data, 64, 0, 0)
    llm = LLM(model=model, dtype="bfloat16", max_model_len=2048, gpu_memory_utilization=0.4, max_num_seqs=1024)
    params = SamplingParams(n=16, max_tokens=768, stop_token_ids=job["stop_token_ids"], detokenize=False)
    found = []
    for epoch in range(3):
        results = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], params)
        for i, result in enumerate(results):
            found += [((epoch, i, j), o.token_ids) for j, o in enumerate(result.outputs)]
    np.savez_compressed(
        output,
        index=[index for index, _ in found],
        lengths=[len(ids) for _, ids in found],
        tokens=[t for _, ids in found for t in ids],
        prompt_lengths=list(map(len, job["prompts"])),
        prompt_tokens=[t for ids in job["prompts"] for t in ids],
    )


def count(counts: Counts, tokens: list[int], start: int) -> None:
    """Add every token from ``start`` on, behind each context of 1 to ORDER tokens."""
    for at in range(max(start, 1), len(tokens)):
        for n in range(1, min(ORDER, at) + 1):
            after = counts.setdefault(tuple(tokens[at - n : at]), {})
            after[tokens[at]] = after.get(tokens[at], 0) + 1


def draft(own: Counts, shared: Counts, tokens: list[int], k: int) -> list[int]:
    """Up to ``k`` tokens, each the most frequent behind the longest context, of 2 tokens at least, that is known."""
    drafted: list[int] = []
    while len(drafted) < k:
        context = (tokens[-ORDER:] + drafted)[-ORDER:]
        keys = (tuple(context[-n:]) for n in range(len(context), 1, -1))
        key = next((key for key in keys if key in own or key in shared), None)
        if key is None:
            break
        after = dict(own.get(key, {}))
        for token, times in shared.get(key, {}).items():
            after[token] = after.get(token, 0) + times
        drafted.append(max(after, key=after.__getitem__))
    return drafted


@app.command()
def replay(samples: Samples, output: To) -> None:
    """Tokens a step, and drafts accepted by position, on the longest quarter of each group."""
    found = np.load(samples)
    pieces = np.split(found["tokens"], np.cumsum(found["lengths"])[:-1])
    responses = {tuple(i): piece.tolist() for i, piece in zip(found["index"].tolist(), pieces, strict=True)}
    prompts = [p.tolist() for p in np.split(found["prompt_tokens"], np.cumsum(found["prompt_lengths"])[:-1])]
    last = max(epoch for epoch, _, _ in responses)
    totals: dict[tuple[str, int], Any] = {}
    for i, prompt in enumerate(prompts):
        group = sorted((r for (e, p, _), r in responses.items() if (e, p) == (last, i)), key=len)
        finished, tail = group[:12], group[12:]
        epochs = [r for (e, p, _), r in responses.items() if p == i and e < last]
        for source, known in {
            "own": [],
            "siblings": finished,
            "epochs": epochs,
            "siblings+epochs": finished + epochs,
        }.items():
            shared: Counts = {}
            for response in known:
                count(shared, prompt[-ORDER:] + response, min(ORDER, len(prompt)))
            for k in (1, 2, 4, 8):
                total = totals.setdefault((source, k), {"tokens": 0, "steps": 0, "accepted": [0] * k})
                for response in tail:
                    own: Counts = {}
                    tokens, at = list(prompt), 0
                    count(own, tokens, 0)
                    while at < len(response):
                        drafted, rest, agreed = draft(own, shared, tokens, k), response[at:], 0
                        while agreed < min(len(drafted), len(rest)) and drafted[agreed] == rest[agreed]:
                            total["accepted"][agreed] += 1
                            agreed += 1
                        total["steps"] += 1
                        start, at = len(tokens), at + agreed + 1
                        tokens += rest[: agreed + 1]
                        count(own, tokens, start)
                    total["tokens"] += len(response)
    rows = [{"source": source, "drafts": k, **total} for (source, k), total in totals.items()]
    output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:
        per_step = row["tokens"] / row["steps"]
        print(row["source"], row["drafts"], f"{per_step:.3f}", [round(x / row["steps"], 2) for x in row["accepted"]])


def propose_always() -> None:
    """vLLM's n-gram drafter proposes nothing for random tokens; its work is done and its drafts are replaced."""
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    propose = NgramProposer.propose

    def always(self: Any, k: int, sampled: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        propose(self, k, sampled, *args, **kwargs)
        return [[7] * k if tokens else [] for tokens in sampled]

    NgramProposer.propose = always


@app.command()
def steps(drafts: Annotated[int, typer.Option()], output: To) -> None:
    """ms an engine step of Qwen2.5-32B in INT8, random weights, behind prompts of 1,536 tokens (vLLM 0.24)."""
    import vllm
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from benchmarks import engine
    from flashrl_verl.tools.engines.shapes import load_config

    more: dict[str, Any] = {}
    if drafts:
        more["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": drafts,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": list(RATES[drafts]),
        }
    llm_of = vllm.LLM
    vllm.LLM = lambda *args, **kwargs: llm_of(  # the worker imports this file, and with it `propose_always`
        *args, **{**kwargs, "worker_extension_cls": "benchmarks.drafts.Extension"}
    )
    with tempfile.TemporaryDirectory() as folder:
        load_config("qwen2.5-32b").save_pretrained(folder)
        llm = engine.start(
            folder,
            "int8",
            in_process=False,
            enable_prefix_caching=False,
            max_model_len=3040,
            distributed_executor_backend="mp",
            gpu_memory_utilization=0.9,
            max_num_seqs=64,
            max_num_batched_tokens=8192,
            compilation_config={"max_cudagraph_capture_size": 320},
            **more,
        )
    random, found = Random(0), {}
    for n in (1, 4, 8, 16, 32, 64):
        params = SamplingParams(
            max_tokens=80 * (1 + drafts),
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.DELTA,
        )
        names = [f"{n}-{i}" for i in range(n)]
        for name in names:
            prompt = [random.randrange(152064) for _ in range(1536)]
            llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
        started: set[str] = set()
        seconds: list[float] = []
        before = None
        while len(seconds) < 60:
            outputs = llm.llm_engine.step()
            now = time.perf_counter()
            decoding = len(started) == n
            started.update(o.request_id for o in outputs if o.outputs[0].token_ids)
            if decoding and before is not None:
                seconds.append(now - before)
            before = now if decoding else None
        llm.llm_engine.abort_request(names)
        found[n] = [1e3 * x for x in statistics.quantiles(seconds, n=4)]
        print(n, [round(x, 2) for x in found[n]], flush=True)
    output.write_text(json.dumps({"drafts": drafts, "ms": found}))
    llm.llm_engine.engine_core.shutdown()


@app.command()
def compose(
    steps: Annotated[str, typer.Option(help="results of `steps` by commas, that without drafts first")],
    rollouts: str = "qwen2.5-32b-step-int8-kv,qwen2.5-32b-step-int8",
) -> None:
    """How many times as fast each recorded rollout were, with drafts wherever they pay among up to 64 sequences."""
    measured = [json.loads(Path(path).read_text()) for path in steps.split(",")]
    curve = {one["drafts"]: {int(n): ms[1] for n, ms in one["ms"].items()} for one in measured}

    def ms(drafts: int, n: int) -> float:
        return float(np.interp(n, list(curve[drafts]), list(curve[drafts].values())))

    def ms_bound(drafts: int, n: int) -> float:
        """As if drafting and checking took no time but the forward pass's: one of as many sequences as rows."""
        rows, (n0, n1) = n * (drafts + 1), list(curve[0])[-2:]
        beyond = (curve[0][n1] - curve[0][n0]) / (n1 - n0) * max(0, rows - n1)
        return ms(0, rows) + beyond

    for name in rollouts.split(","):
        for line in (RESULTS / "rollout" / f"{name}.jsonl").read_text().splitlines()[1:]:
            for timing in json.loads(line)["timings"]:
                lengths = sorted(length for length, _ in timing["ends"][0])
                whole = timing["seconds"][0]
                for source, tokens in TOKENS.items():
                    ratios = []
                    for cost in (ms, ms_bound):
                        saved = before = 0.0
                        for at, length in enumerate(lengths):
                            n = len(lengths) - at
                            if n <= 64:
                                plain = ms(0, n)
                                best = min(plain, *(cost(k, n) / tokens[k] for k in tokens))
                                saved += (length - before) * (plain - best) / 1e3
                            before = length
                        ratios.append(round(whole / (whole - saved), 3))
                    print(name, len(lengths), source, "measured steps", ratios[0], "free drafts", ratios[1])


try:  # in a worker, before it builds its drafter
    propose_always()
    from benchmarks.engine import BenchWorkerExtension

    class Extension(BenchWorkerExtension):
        """So that the worker imports this file."""
except ImportError:
    pass

if __name__ == "__main__":
    app()
