# SPDX-License-Identifier: Apache-2.0
"""One plan: every choice of formats on the same work, and which of them to take."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from flashrl_verl.attention.limits import why_not
from flashrl_verl.errors import ConfigError
from flashrl_verl.settings import KVCache, Precision
from flashrl_verl.tools.plan.advice import Outcome, advise
from flashrl_verl.tools.plan.gpus import GIB, GPU
from flashrl_verl.tools.plan.memory import BF16, Choice, Engine, memory_of, weight_bytes
from flashrl_verl.tools.plan.schedule import Work, own_prompt, simulate
from flashrl_verl.tools.plan.shape import ModelShape
from flashrl_verl.tools.plan.step import Clock
from flashrl_verl.tools.plan.whole_step import whole_step


def choices() -> list[Choice]:
    """Every precision, BF16 first, with a KV cache in BF16 and in INT8."""
    precisions = (Precision.BF16, Precision.INT8, Precision.FP8)
    return [Choice(precision=precision, kv_cache=kv_cache) for kv_cache in KVCache for precision in precisions]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that ``flashrl plan`` says."""

    model: str
    gpu: GPU
    gpus: int
    engine: Engine
    work: Work
    sequences: int
    """Of the whole batch, all engines together; each has as many."""
    samples: int
    """Responses to a prompt, which share it where they meet in an engine."""
    parameters: int
    outcomes: tuple[Outcome, ...]
    sent_bytes: float
    """BF16 bytes that the trainer sends to every GPU of an engine in one update."""
    written_bytes: dict[str, float]
    """Bytes that a GPU writes in one update, by precision."""
    advice: tuple[str, ...]
    not_planned: tuple[str, ...]
    """Settings of the run that change memory or speed and are not in these figures."""

    def as_json(self) -> dict[str, Any]:
        """The plan as JSON takes it; bytes and seconds."""
        record = asdict(self)
        for row, outcome in zip(record["outcomes"], self.outcomes, strict=True):
            row["choice"] = {
                "precision": outcome.choice.precision.value,
                "kv_cache": outcome.choice.kv_cache.value,
            }
            if outcome.memory is not None:
                row["memory"]["tokens"] = outcome.memory.tokens
                row["whole"]["seconds"] = outcome.whole.seconds
        return record


def make_plan(
    model: str,
    shape: ModelShape,
    gpu: GPU,
    gpus: int,
    engine: Engine,
    work: Work,
    not_planned: Sequence[str] = (),
    samples: int = 1,
) -> Plan:
    """Compare every choice of formats for one engine's share of a rollout.

    Args:
        model: name, for the report.
        shape: its sizes.
        gpu: kind of the GPUs.
        gpus: how many there are; the engines are ``gpus / engine.tensor_parallel``.
        engine: settings of each engine.
        work: what one engine generates in a step.
        not_planned: settings to name as left out.
        samples: responses to a prompt, which share its part of an engine's KV cache, and its prefill. They are spread
            evenly over the engines, as verl balances requests: with as many engines nothing is shared.

    Raises:
        ConfigError: the GPUs do not divide into engines, or nothing fits.
    """
    _require_layout(shape, gpus, engine)
    engines = gpus // engine.tensor_parallel
    sequences = work.sequences * engines
    outcomes = [_outcome(choice, shape, gpu, engine, work, _sharing(samples, engines)) for choice in choices()]
    if all(outcome.refused for outcome in outcomes):
        raise ConfigError(
            f"{model} fits in no precision: {'; '.join(f'{o.choice}: {o.refused}' for o in outcomes)}. Take more GPUs "
            "for an engine (--tensor-parallel), or a higher --gpu-memory-utilization"
        )
    base, length = outcomes[0].timeline, work.prompt + work.response
    for at, outcome in enumerate(outcomes):
        if outcome.timeline is not None:
            whole = whole_step(shape, gpu, gpus, outcome.timeline.seconds, sequences, length)
            outcomes[at] = replace(outcome, whole=whole, speedup=base and base.seconds / outcome.timeline.seconds)
    layouts, gain = _layouts(outcomes, shape, gpu, gpus, engine, work, sequences, samples) or ("", None)
    return Plan(
        model=model,
        gpu=gpu,
        gpus=gpus,
        engine=engine,
        work=work,
        sequences=sequences,
        samples=samples,
        parameters=shape.parameters,
        outcomes=tuple(outcomes),
        sent_bytes=shape.sent * BF16,
        written_bytes={
            precision.value: weight_bytes(shape, Choice(precision=precision), engine.tensor_parallel)
            for precision in Precision
        },
        advice=tuple(filter(None, [layouts, *advise(outcomes, shape, engine, gain)])),
        not_planned=tuple(not_planned),
    )


def _require_layout(shape: ModelShape, gpus: int, engine: Engine) -> None:
    if gpus % engine.tensor_parallel:
        raise ConfigError(f"--gpus {gpus} is no multiple of --tensor-parallel {engine.tensor_parallel}")
    if not _divides(shape, engine.tensor_parallel):
        sizes = ", ".join(str(size) for size in range(1, 65) if _divides(shape, size))
        raise ConfigError(
            f"--tensor-parallel {engine.tensor_parallel} does not divide the model's {shape.heads} attention heads, "
            f"{shape.kv_heads} KV heads and {shape.width} rows of an MLP, as vLLM asks; these do: {sizes}"
        )


def _layouts(
    outcomes: Sequence[Outcome],
    shape: ModelShape,
    gpu: GPU,
    gpus: int,
    engine: Engine,
    work: Work,
    total: int,
    samples: int,
) -> tuple[str, float] | None:
    """Where another number of GPUs in an engine is faster, BF16 at its best beside INT8 at its best, in words, and
    INT8's gain: a BF16 that hardly fits is no measure of it. None where the number that was asked for is best for
    both."""
    best = {}
    for choice in (outcomes[0].choice, Choice(precision=Precision.INT8)):
        for size in (1, 2, 4, 8):
            if gpus % size or not _divides(shape, size):
                continue
            share = replace(work, sequences=max(1, total * size // gpus))
            there = replace(engine, tensor_parallel=size)
            outcome = _outcome(choice, shape, gpu, there, share, _sharing(samples, gpus // size))
            if outcome.timeline is not None:
                speed = share.sequences * share.response * (gpus // size) / outcome.timeline.seconds
                best[choice] = max(best.get(choice, (0.0, 0)), (speed, size))
    if len(best) == 2 and any(size != engine.tensor_parallel for _, size in best.values()):
        (bf16, bf16_size), (int8, int8_size) = best.values()
        gain = int8 / bf16
        said = (
            f"With the best --tensor-parallel of each, all {gpus} GPUs make {bf16:.0f} tokens/s in BF16 ({bf16_size} "
            f"in an engine) and {int8:.0f} in INT8 ({int8_size}): {gain:.2f}x is what eight bits gain on them."
        )
        return said, gain
    return None


def _divides(shape: ModelShape, size: int) -> bool:
    """vLLM's own conditions (vllm/model_executor/models/qwen2.py, layers/linear.py)."""
    kv = shape.kv_heads % size == 0 or size % shape.kv_heads == 0
    return kv and shape.heads % size == 0 and shape.width % size == 0


def _sharing(samples: int, engines: int) -> float:
    """Sequences of one engine to a prompt."""
    return max(1.0, samples / engines)


def _outcome(choice: Choice, shape: ModelShape, gpu: GPU, engine: Engine, work: Work, sharing: float) -> Outcome:
    if gpu.compute(choice.precision) is None:
        return Outcome(choice=choice, refused="no FP8 tensor cores")
    if choice.eight_bit_kv and (reason := why_not(shape.head_dim, shape.heads, shape.kv_heads)) is not None:
        return Outcome(choice=choice, refused=f"its attention does not take the model's {reason}")
    memory = memory_of(shape, choice, gpu, engine)
    length = work.prompt + work.response
    if memory.tokens < length:
        limit = gpu.memory_gib * engine.gpu_memory_utilization
        return Outcome(
            choice=choice,
            refused=f"{memory.weights / GIB:.1f} GiB of weights leave {memory.kv / GIB:.1f} of {limit:.1f} GiB for the KV "  # noqa: E501
            f"cache: {memory.tokens} tokens, one sequence has {length}",
        )
    clock = Clock(shape=shape, choice=choice, gpu=gpu, tensor_parallel=engine.tensor_parallel)
    timeline = simulate(clock, work, memory.tokens, engine.max_num_seqs, sharing)
    together, context = work.sequences * work.response / timeline.steps, work.prompt + work.response / 2
    step = clock.decode(together, context)
    return Outcome(
        choice=choice,
        refused=None,
        memory=memory,
        fit=memory.tokens // (own_prompt(work, sharing) + work.response),
        together=together,
        floor_s=clock.floor(together, context),
        step_s=step.total,
        parts=asdict(step),
        timeline=timeline,
    )
