# SPDX-License-Identifier: Apache-2.0
"""A plan as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from flashrl_verl.tools.plan.gpus import GIB
from flashrl_verl.tools.plan.planner import STOCK, Plan
from flashrl_verl.tools.plan.whole_step import ATTENTION, LIGER, PRODUCTS, REFIT_RATE, WholeStep

TRAINER_BYTES = 16
"""A parameter: weight, gradient, and AdamW's two moments, in FP32."""

ASSUMPTIONS = (
    "Estimates from data sheets, decode steps of a 32B model on one H200 and all-reduces of four; other GPUs, other "
    "numbers of them and mixtures of experts are extrapolated. Lengths are lognormal (alike with a spread of 0), "
    "engines work alike. Rollouts with such lengths took 2 to 11 % longer when measured. Of the data sheet's BF16 "
    f"operations the trainer's products reach {PRODUCTS:.0%}, its attention {ATTENTION[False][0]:.0%} (old log-probs) "
    f"and {ATTENTION[False][1]:.0%} (update, gradient checkpointing), FlashAttention 4 {ATTENTION[True][0]:.0%} and "
    f"{ATTENTION[True][1]:.0%}. Products are {LIGER} times as fast with Liger's kernels. "
    f"Weights are sent at {REFIT_RATE / 1e9:.0f} GB/s (a guess)."
)


def render(plan: Plan, explain: bool) -> Group:
    """Return what the command prints: seconds of a step and the advice, with ``explain`` the rest."""
    parts = [_steps(plan), plan.advice]
    if explain:
        parts += ["", _levers(plan), _engines(plan), _layouts(plan), *_notes(plan), ASSUMPTIONS]
    return Group(*parts)


def _table(title: str, first: str, names: list[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _steps(plan: Plan) -> Table:
    title = (
        f"{plan.model} on {plan.gpus} x {plan.gpu.name}, TP {plan.engine.tensor_parallel}, {plan.sequences} responses "
        f"of {plan.work.prompt} + {plan.work.response} tokens"
        + (f", {plan.levers.constant:.0%} of groups constant" if plan.levers.constant else "")
        + ": seconds, computed"
    )
    # The best of its layouts, as in the advice: a BF16 that hardly fits is no measure.
    layouts = [layout for layout in plan.layouts if layout.choice == plan.outcomes[0].choice]
    bf16 = min(layouts, key=lambda layout: layout.rollout_s, default=None)
    names = ["rollout", "old log-probs", "update", "refit", "step", f"x {bf16 or 'BF16'}"]
    table = _table(title, "variant", names)
    for outcome in plan.outcomes:
        whole = outcome.whole
        if whole is None:
            table.add_row(str(outcome.choice), *["-"] * len(names))
            continue
        ratio = "-" if bf16 is None else f"{bf16.step_s / whole.seconds:.2f}"
        table.add_row(str(outcome.choice), *_seconds(whole), ratio)
    return table


def _seconds(whole: WholeStep) -> list[str]:
    parts = (whole.rollout, whole.log_probs, whole.update, whole.refit, whole.seconds)
    return [f"{s:.0f}" if whole.seconds >= 100 else f"{s:.1f}" for s in parts]


def _levers(plan: Plan) -> Table:
    names = ["rollout", "old log-probs", "update", "refit", "step", "x stock"]
    table = _table("Seconds of a step, a lever more in each row", "levers", names)
    stock = {name: whole.seconds for name, whole in plan.by_lever}.get(STOCK)  # missing where BF16 does not fit
    for name, whole in plan.by_lever:
        table.add_row(name, *_seconds(whole), f"{stock / whole.seconds:.2f}" if stock else "-")
    return table


def _engines(plan: Plan) -> Table:
    title = (
        f"Rollout: an engine of {plan.engine.tensor_parallel} GPU(s), {plan.work.sequences} sequences; memory of a GPU"
    )
    columns = "weights\nGiB,KV\nGiB,KV\ntokens,fit,run,step\nms,tokens\n/s,x\nBF16"
    names = columns.split(",")
    table = _table(title, "variant", names)
    for outcome in plan.outcomes:
        if outcome.refused:
            table.add_row(str(outcome.choice), *["-"] * len(names))
            continue
        tokens = outcome.together * outcome.timeline.steps / outcome.timeline.seconds
        table.add_row(
            str(outcome.choice),
            f"{outcome.memory.weights / GIB:.1f}",
            f"{outcome.memory.kv / GIB:.1f}",
            _thousands(outcome.memory.tokens),
            str(outcome.fit),
            f"{outcome.together:.0f}",
            f"{outcome.decode_s * 1e3:.1f}",
            _thousands(tokens),
            "-" if outcome.speedup is None else f"{outcome.speedup:.2f}",
        )
    return table


def _layouts(plan: Plan) -> Table:
    seconds = {(layout.choice, layout.tensor_parallel): layout.rollout_s for layout in plan.layouts}
    sizes = sorted({size for _, size in seconds})
    table = _table("Seconds of the rollout by layout", "variant", [f"TP {size}" for size in sizes])
    for outcome in plan.outcomes:
        cells = [seconds.get((outcome.choice, size)) for size in sizes]
        table.add_row(str(outcome.choice), *("-" if cell is None else f"{cell:.0f}" for cell in cells))
    return table


def _notes(plan: Plan) -> Iterator[str]:
    yield (
        "fit: whole sequences in an engine's KV cache. run: sequences decoded together, the mean. step: a decode step. "
        "tokens/s: of one engine, prefills included."
    )
    for outcome in plan.outcomes:
        if outcome.refused:
            yield f"{outcome.choice}: not possible, {outcome.refused}."
    each = TRAINER_BYTES * plan.parameters / plan.gpus / GIB
    over = f", more than its {plan.gpu.memory_gib:.0f}" if each > plan.gpu.memory_gib else ""
    yield (
        f"Trainer: FP32 weights, gradients and AdamW's moments are {each:.1f} GiB of each GPU{over}, unless FSDP "
        "offloads them; activations come on top."
    )
    yield f"Refit: {plan.sent_bytes / GIB:.1f} GiB of BF16 to each engine."
    if plan.samples > 1:
        shared = max(1.0, plan.samples * plan.engine.tensor_parallel / plan.gpus)
        yield f"Of the {plan.samples} responses to a prompt {shared:.3g} share it in an engine's KV cache."
    if any(o.choice.eight_bit_kv and not o.refused for o in plan.outcomes) and plan.gpu.capability != (9, 0):
        yield "INT8 KV: the speed of its attention was measured on an H200, not on this GPU."
    if plan.not_planned:
        yield f"Not in these figures, though the run sets it: {', '.join(plan.not_planned)}."


def _thousands(count: float) -> str:
    return f"{count / 1e6:.2f}M" if count >= 1e6 else f"{count / 1e3:.1f}k" if count >= 1e4 else f"{count:.0f}"
