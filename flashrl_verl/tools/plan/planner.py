# SPDX-License-Identifier: Apache-2.0
"""One plan: every variant on the same work, and which of them to take."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from flashrl_verl.attention.limits import why_not
from flashrl_verl.errors import ConfigError
from flashrl_verl.settings import KVCache, Precision
from flashrl_verl.tools.plan.gpus import GIB, GPU
from flashrl_verl.tools.plan.memory import BF16, Choice, Engine, Memory, memory_of
from flashrl_verl.tools.plan.schedule import Timeline, Work, length_over_tokens, own_prompt, response_lengths, simulate
from flashrl_verl.tools.plan.shape import ModelShape
from flashrl_verl.tools.plan.step import Clock
from flashrl_verl.tools.plan.whole_step import Levers, WholeStep, whole_step

NEARLY = 0.95
"""Of the fastest variant's speed: what is slower by less is within the plan's error (docs/results/throughput.md)."""

WORTH = 1.1
"""Speed of a step over BF16's below which 8 bits are not recommended: it is within the plan's error, and they bring a
mismatch whatever they gain."""

LAYOUTS = (1, 2, 4, 8)
"""GPUs of one engine that are compared."""

STOCK = "stock verl, BF16"
"""The baseline of the levers."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one variant comes to."""

    choice: Choice
    refused: str | None
    """Why it cannot run here; then the rest is None."""
    memory: Memory | None = None
    fit: int | None = None
    """Whole sequences, prompt and response, that the KV cache holds."""
    together: float | None = None
    """Sequences that are decoded together, the mean over the steps."""
    decode_s: float | None = None
    """Seconds of a decode step of so many sequences, half way through their responses."""
    timeline: Timeline | None = None
    speedup: float | None = None
    """Rollout's speed over BF16's; None where BF16 does not fit."""
    whole: WholeStep | None = None
    """A step of RL."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A variant with some number of GPUs in an engine, on the same batch."""

    choice: Choice
    tensor_parallel: int
    rollout_s: float
    step_s: float
    """Of a step of RL."""

    def __str__(self) -> str:
        return f"{self.choice} (TP {self.tensor_parallel})"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that ``flashrl plan`` says."""

    model: str
    gpu: GPU
    gpus: int
    engine: Engine
    work: Work
    """Of one engine."""
    sequences: int
    """Of the whole batch, all engines together."""
    samples: int
    """Responses to a prompt, which share it where they meet in an engine."""
    parameters: int
    outcomes: tuple[Outcome, ...]
    layouts: tuple[Layout, ...]
    """All that fit, the asked one among them."""
    sent_bytes: float
    """BF16 bytes that the trainer sends to every GPU of an engine in one update."""
    advice: str
    levers: Levers
    by_lever: tuple[tuple[str, WholeStep], ...]
    """A step of stock verl in BF16, then with one lever more each, in engines as asked."""
    not_planned: tuple[str, ...]
    """Settings of the run that change memory or speed and are not in these figures."""


def choices() -> list[Choice]:
    """Every precision, BF16 first, with a KV cache in BF16 and in INT8."""
    precisions = (Precision.BF16, Precision.INT8, Precision.FP8)
    return [Choice(precision=precision, kv_cache=kv_cache) for kv_cache in KVCache for precision in precisions]


def make_plan(
    model: str,
    shape: ModelShape,
    gpu: GPU,
    gpus: int,
    engine: Engine,
    work: Work,
    not_planned: Sequence[str] = (),
    samples: int = 1,
    levers: Levers | None = None,
) -> Plan:
    """Compare every variant for one engine's share of a rollout.

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
        levers: of the run; None: the default ones, and no constant groups.

    Raises:
        ConfigError: the GPUs do not divide into engines, or nothing fits.
    """
    _require_layout(shape, gpus, engine.tensor_parallel)
    sequences = work.sequences * gpus // engine.tensor_parallel
    levers = levers or Levers()
    tokens, length = sequences * (work.prompt + work.response), length_over_tokens(work)

    def outcome_of(choice: Choice, size: int, levers: Levers) -> Outcome:
        there = replace(engine, tensor_parallel=size)
        started = sequences * levers.started(sequences / samples)
        share = replace(work, sequences=max(1, round(started * size / gpus)))
        outcome = _outcome(choice, shape, gpu, there, share, max(1.0, samples * size / gpus), levers.asynchronous)
        if outcome.timeline is None:
            return outcome
        whole = whole_step(shape, gpu, gpus, outcome.timeline.seconds, tokens, length, levers)
        return replace(outcome, whole=whole)

    outcomes, layouts = [], []
    for size in sorted({*LAYOUTS, engine.tensor_parallel}):
        if gpus % size or not _divides(shape, size):
            continue
        for choice in choices():
            outcome = outcome_of(choice, size, levers)
            if (whole := outcome.whole) is not None:
                layouts.append(
                    Layout(choice=choice, tensor_parallel=size, rollout_s=whole.rollout, step_s=whole.seconds)
                )
            if size == engine.tensor_parallel:
                outcomes.append(outcome)
    if all(outcome.refused for outcome in outcomes):
        why = "; ".join(f"{o.choice}: {o.refused}" for o in outcomes)
        sizes = ", ".join(str(size) for size in sorted({layout.tensor_parallel for layout in layouts}))
        remedy = f"With --tensor-parallel {sizes} it does" if sizes else "Take more GPUs for an engine, or larger ones"
        raise ConfigError(f"{model} fits in no precision: {why}. {remedy}")
    if outcomes[0].whole is not None:
        base = outcomes[0].whole.rollout
        outcomes = [o if o.refused else replace(o, speedup=base / o.whole.rollout) for o in outcomes]
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
        layouts=tuple(layouts),
        sent_bytes=shape.sent * BF16,
        advice=advise(layouts),
        levers=levers,
        by_lever=tuple(_by_lever(lambda choice, now: outcome_of(choice, engine.tensor_parallel, now), levers, gpu)),
        not_planned=tuple(not_planned),
    )


def _by_lever(
    outcome_of: Callable[[Choice, Levers], Outcome], levers: Levers, gpu: GPU
) -> Iterator[tuple[str, WholeStep]]:
    """Stock verl, and what each lever makes of the step before it; what does not fit is left out."""
    choice = Choice(precision=Precision.BF16)
    stock = now = Levers(constant=levers.constant, refill=False, even_mini_batches=False)
    steps: list[tuple[str, Choice, Levers]] = [(STOCK, choice, stock)]
    if levers.constant:
        now = replace(now, refill=True)
        steps.append(("+ refill", choice, now))
    now = replace(now, even_mini_batches=True)
    steps.append(("+ even mini-batches", choice, now))
    choice = Choice(precision=Precision.INT8)
    steps.append(("+ INT8 weights", choice, now))
    with_kv = Choice(precision=Precision.INT8, kv_cache=KVCache.INT8_PER_TOKEN_HEAD)
    if outcome_of(with_kv, now).whole is not None:
        choice = with_kv
        steps.append(("+ INT8 KV cache", choice, now))
    if gpu.capability >= (9, 0):  # Hopper
        now = replace(now, flash_attention_4=True)
        steps.append(("+ FlashAttention 4", choice, now))
    now = replace(now, liger=True)
    steps.append(("+ Liger's kernels", choice, now))
    steps.append(("+ asynchrony", choice, replace(now, asynchronous=True)))
    for name, choice, now in steps:
        if (whole := outcome_of(choice, now).whole) is not None:
            yield name, whole


def advise(layouts: Sequence[Layout]) -> str:
    """What to take, in a sentence. Every variant is judged by the step in its own best layout, for a BF16 that hardly
    fits is no measure of the others.

    Args:
        layouts: all that fit, at least one.
    """
    best: dict[Choice, Layout] = {}
    for layout in sorted(layouts, key=lambda x: x.step_s):
        best.setdefault(layout.choice, layout)
    bf16 = best.get(Choice(precision=Precision.BF16))
    int8 = best.get(Choice(precision=Precision.INT8))
    eight = next((x for x in best.values() if not x.choice.eight_bit_kv and x is not bf16), None)
    with_kv = next((x for x in best.values() if x.choice.eight_bit_kv), None)
    if int8 and eight.step_s >= NEARLY * int8.step_s:  # INT8's mismatch has been smaller than FP8's
        eight = int8
    if eight is None:
        if bf16 is None:
            return f"Take {with_kv}: nothing fits without an 8-bit KV cache, {UNTRIED}."
        return f"Take {bf16}: 8-bit weights do not fit or have no tensor cores here."
    if bf16 is None:
        return f"Take {eight}: BF16 fits in no layout."
    if bf16.step_s >= WORTH * eight.step_s:
        return f"Take {eight}: {_gain(eight, bf16)} as with {bf16}."
    said = f"Stay with BF16 weights: with {eight} {_gain(eight, bf16)} as with {bf16}"
    if with_kv is None or bf16.step_s < WORTH * with_kv.step_s:
        return f"{said}."
    return f"{said}; with {with_kv} {_gain(with_kv, bf16)}, but {UNTRIED}."


UNTRIED = "no long run has been trained with flashrl.kv_cache=int8_per_token_head"


def _gain(layout: Layout, base: Layout) -> str:
    rollout, step = base.rollout_s / layout.rollout_s, base.step_s / layout.step_s
    return f"the rollout is {rollout:.2f}x and the step {step:.2f}x as fast"


def _require_layout(shape: ModelShape, gpus: int, tensor_parallel: int) -> None:
    if gpus % tensor_parallel:
        raise ConfigError(f"--gpus {gpus} is no multiple of --tensor-parallel {tensor_parallel}")
    if not _divides(shape, tensor_parallel):
        sizes = ", ".join(str(size) for size in range(1, 65) if _divides(shape, size))
        raise ConfigError(
            f"--tensor-parallel {tensor_parallel} does not divide the model's {shape.heads} attention heads, "
            f"{shape.kv_heads} KV heads and {shape.width} rows of an MLP, as vLLM asks; these do: {sizes}"
        )


def _divides(shape: ModelShape, size: int) -> bool:
    """vLLM's own conditions (vllm/model_executor/models/qwen2.py, layers/linear.py)."""
    kv = shape.kv_heads % size == 0 or size % shape.kv_heads == 0
    return kv and shape.heads % size == 0 and shape.width % size == 0


def _outcome(
    choice: Choice, shape: ModelShape, gpu: GPU, engine: Engine, work: Work, sharing: float, asynchronous: bool
) -> Outcome:
    """Args as `make_plan`'s; sharing: sequences of one engine to a prompt."""
    if gpu.compute(choice.precision) is None:
        return Outcome(choice=choice, refused="no FP8 tensor cores")
    if choice.eight_bit_kv and (reason := why_not(shape.head_dim, shape.heads, shape.kv_heads)) is not None:
        return Outcome(choice=choice, refused=f"its attention does not take the model's {reason}")
    memory = memory_of(shape, choice, gpu, engine)
    length = work.prompt + max(response_lengths(work))
    if memory.tokens < length:
        limit = gpu.memory_gib * engine.gpu_memory_utilization
        return Outcome(
            choice=choice,
            refused=f"{memory.weights / GIB:.1f} GiB of weights leave {memory.kv / GIB:.1f} of {limit:.1f} GiB for the "
            f"KV cache: {memory.tokens} tokens, one sequence has {length}",
        )
    clock = Clock(shape=shape, choice=choice, gpu=gpu, tensor_parallel=engine.tensor_parallel)

    def rollout(batches: int) -> Timeline:
        all_of_them = replace(work, sequences=batches * work.sequences)
        in_flight = min(engine.max_num_seqs, 2 * work.sequences)
        return simulate(clock, all_of_them, memory.tokens, in_flight, sharing)

    timeline = rollout(1)
    if asynchronous:  # with two batches in flight, what one more takes
        timeline = replace(timeline, seconds=(rollout(12).seconds - rollout(6).seconds) / 6)
    together = work.sequences * work.response / timeline.steps
    return Outcome(
        choice=choice,
        refused=None,
        memory=memory,
        fit=memory.tokens // (own_prompt(work, sharing) + work.response),
        together=together,
        decode_s=clock.decode(together, work.prompt + work.response / 2).total,
        timeline=timeline,
    )
