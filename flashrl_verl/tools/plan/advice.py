# SPDX-License-Identifier: Apache-2.0
"""What the choices of formats come to, and which of them to take."""

from dataclasses import dataclass

from flashrl_verl.settings import Precision
from flashrl_verl.tools.plan.memory import Choice, Engine, Memory
from flashrl_verl.tools.plan.schedule import Timeline
from flashrl_verl.tools.plan.shape import ModelShape
from flashrl_verl.tools.plan.whole_step import WholeStep

NEARLY = 0.95
"""Of the fastest choice's speed: what is slower by less is within what the plan's ratios miss
(docs/results/rollout.md)."""

WORTH = 1.15
"""Rollout speed over BF16 below which eight bits are not recommended: the mismatch and a tenth of error in these
figures are there whatever is gained."""

KV_WORTH = 1.10
"""Speed over the same precision with a BF16 KV cache from which on one in 8 bits is named."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one choice of formats comes to."""

    choice: Choice
    refused: str | None
    """Why it cannot run here; then the rest is None."""
    memory: Memory | None = None
    fit: int | None = None
    """Whole sequences, prompt and response, that the KV cache holds."""
    together: float | None = None
    """Sequences that are decoded together, the mean over the steps."""
    floor_s: float | None = None
    """Seconds of a decode step at the speed of a copy, with so many sequences half way through their responses."""
    step_s: float | None = None
    """Seconds of the same step as expected."""
    parts: dict[str, float] | None = None
    """The same by part."""
    timeline: Timeline | None = None
    speedup: float | None = None
    """Rollout's speed over BF16's; None where BF16 does not fit."""
    whole: WholeStep | None = None
    """A step of RL."""


def advise(outcomes: list[Outcome], shape: ModelShape, engine: Engine, gain: float | None = None) -> list[str]:
    """Return sentences for a user; the first says what to take.

    Args:
        outcomes: BF16's first; at least one is possible.
        shape: the model's.
        engine: the engines' settings.
        gain: rollout speed of INT8 over BF16 where each has as many GPUs in an engine as are best for it; None where
            these engines have.
    """
    able = [o for o in outcomes if not o.refused]
    plain = [o for o in able if not o.choice.eight_bit_kv]
    if not plain:
        return [
            "Nothing fits without an 8-bit KV cache: take more GPUs for an engine (--tensor-parallel). "
            f"{_about(able[0])}"
        ]
    if plain[0].choice.precision is not Precision.BF16:
        return [f"BF16 does not fit ({outcomes[0].refused}). Take {plain[0].choice}."]
    if len(plain) == 1:
        return ["Take bf16: eight bits do not fit or have no tensor cores here."]
    best = _best(plain[1:])
    said = [_worth(best, outcomes[0], engine, gain)]
    with_kv = max((o for o in able if o.choice.eight_bit_kv), key=lambda o: o.speedup, default=best)
    if with_kv.speedup > max(WORTH, KV_WORTH * best.speedup):
        said.append(
            f"With {with_kv.choice} it would be {with_kv.speedup:.2f}x: keys and values are much of what a step reads. "
            f"{_about(with_kv)}"
        )
    if engine.tensor_parallel > shape.kv_heads:
        said.append(
            f"--tensor-parallel {engine.tensor_parallel} is more than the model's {shape.kv_heads} KV heads, which are "
            "copied "
            "then: a token takes the same KV cache on every GPU, and more GPUs in an engine only share the weights."
        )
    return said


def _about(outcome: Outcome) -> str:
    key = f"flashrl.kv_cache={outcome.choice.kv_cache.value}"
    return (
        f"An 8-bit KV cache ({key}) has a mismatch of its own (docs/kv_cache.md), with which no long run has been "
        "trained."
    )


def _best(plain: list[Outcome]) -> Outcome:
    """The fastest; INT8 where it is nearly as fast as FP8, because its mismatch has been 8 to 14 times smaller. With
    outlier channels it is larger than FP8's (docs/precision_and_cap.md), which a shape does not tell."""
    fastest = max(plain, key=lambda o: o.speedup)
    int8 = [o for o in plain if o.choice.precision is Precision.INT8 and o.speedup >= NEARLY * fastest.speedup]
    return int8[0] if int8 and fastest.choice.precision is Precision.FP8 else fastest


def _worth(best: Outcome, bf16: Outcome, engine: Engine, gain: float | None) -> str:
    if best.speedup < WORTH:
        return (
            f"Stay with BF16 weights: eight bits alone make the rollout {best.speedup:.2f}x as fast, and bring a "
            "mismatch. They pay when weights are most of what a decode step reads (from about 14B on, few sequences at "
            "a time) or leave no room for the KV cache."
        )
    share = bf16.whole.rollout / bf16.whole.seconds
    whole = (
        f"{bf16.whole.seconds / best.whole.seconds:.2f}x of a whole step, of which in BF16 the rollout is {share:.0%}"
    )
    layout = f"--tensor-parallel {engine.tensor_parallel} for both"
    take = f"Take {best.choice}"
    if gain is not None and gain < WORTH:
        take = f"Stay with BF16 weights where you can have that layout; with this one take {best.choice}"
    said = f"{take}: {best.speedup:.2f}x of BF16's rollout with {layout}, {whole}."
    if best.timeline.steps < bf16.timeline.steps:
        said += " Part of that is memory: beside BF16 weights fewer sequences find room in the KV cache at a time."
    return said
