# SPDX-License-Identifier: Apache-2.0
"""A plan as a table for a terminal."""

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from flashrl_verl.settings import Precision
from flashrl_verl.tools.plan.gpus import GIB
from flashrl_verl.tools.plan.planner import Outcome, Plan
from flashrl_verl.tools.plan.whole_step import FORWARD, REFIT_RATE, UPDATE

TRAINER_BYTES = 16
"""A parameter: weight, gradient, and AdamW's two moments, in FP32."""

ASSUMPTIONS = (
    "Estimates from data sheets and decode steps of a 32B model on an H200, compared there at 7B and 14B: speeds of "
    "other GPUs and sizes are extrapolated, mixtures of experts have not been measured, all responses have one length, "
    f"and with several GPUs in an engine the all-reduce is a guess. The trainer is taken to reach {FORWARD:.0%} (old "
    f"log-probs) and {UPDATE:.0%} (update, gradient checkpointing) of the BF16 operations in the data sheet, as one "
    f"H200 did that communicated nothing, and to send weights at {REFIT_RATE / 1e9:.0f} GB/s, which is a guess. "
    "Measure before you rent."
)


def render(plan: Plan) -> Group:
    """Return what the command prints."""
    engines = plan.gpus // plan.engine.tensor_parallel
    work, engine = plan.work, plan.engine
    title = (
        f"{plan.model} ({plan.parameters / 1e9:.2f}B parameters) on {plan.gpus} x {plan.gpu.name}: {engines} engine(s) "
        "of "
        f"{engine.tensor_parallel} GPU(s); each {work.sequences} sequences of {work.prompt} -> {work.response} tokens"
    )
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("rollout", no_wrap=True)
    for name in (
        "weights\nGiB",
        "KV\nGiB",
        "KV\ntokens",
        "fit",
        "run",
        "step\nms",
        "floor\nms",
        "tokens\n/s",
        "x\nBF16",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for outcome in plan.outcomes:
        table.add_row(str(outcome.choice), *_cells(outcome, plan))
    lines = [f"{o.choice}: not possible, {o.refused}" for o in plan.outcomes if o.refused]
    able = {name: size for name, size in plan.written_bytes.items() if plan.gpu.compute(Precision(name)) is not None}
    written = ", ".join(f"{name} {size / GIB:.1f}" for name, size in able.items())
    lines.append(
        "GiB of one GPU. fit: whole sequences in an engine's KV cache; run: sequences decoded together, the mean; "
        "floor: what a step has to read at the speed of a copy; tokens/s of one engine, prefills included. More run "
        "than fit while responses are not whole yet."
    )
    if plan.samples > engines:
        lines.append(
            f"The {plan.samples} responses to a prompt share it: {plan.samples / engines:.3g} in an engine, on average."
        )
    lines.append(
        f"A weight update sends {plan.sent_bytes / GIB:.1f} GiB of BF16 to each GPU, which writes (GiB): {written}."
    )
    lines.extend(plan.advice)
    lines.append(_trainer(plan))
    if any(o.choice.eight_bit_kv and not o.refused for o in plan.outcomes) and plan.gpu.capability != (9, 0):
        lines.append("INT8 KV: the rate at which attention reads is that of an H200; on this GPU it was not measured.")
    if plan.not_planned:
        lines.append(f"Not in these figures, though the run sets it: {', '.join(plan.not_planned)}.")
    return Group(table, *(Text(line) for line in lines), _whole_steps(plan), Text(ASSUMPTIONS, style="dim"))


def _trainer(plan: Plan) -> str:
    each = TRAINER_BYTES * plan.parameters / plan.gpus / GIB
    over = f", more than its {plan.gpu.memory_gib:.0f}" if each > plan.gpu.memory_gib else ""
    return (
        "Not asked is whether training fits: FP32 weights and gradients and AdamW's moments, sharded over all GPUs, "
        f"are {each:.1f} GiB of each{over}, unless FSDP offloads them to the host's memory; activations come on top."
    )


def _whole_steps(plan: Plan) -> Table:
    title = f"A step of RL with {plan.sequences} sequences, trainer and engines on the same GPUs"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("seconds", no_wrap=True)
    for name in ("rollout", "old\nlog-probs", "policy\nupdate", "weight\nupdate", "step", "steps\n/hour", "x\nBF16"):
        table.add_column(name, justify="right", no_wrap=True)
    bf16 = plan.outcomes[0].whole
    for outcome in plan.outcomes:
        if (whole := outcome.whole) is not None:
            parts = (whole.rollout, whole.log_probs, whole.update, whole.refit, whole.seconds)
            ratio = "-" if bf16 is None else f"{bf16.seconds / whole.seconds:.2f}"
            table.add_row(str(outcome.choice), *(f"{s:.1f}" for s in parts), f"{3600 / whole.seconds:.3g}", ratio)
    return table


def _cells(outcome: Outcome, plan: Plan) -> list[str]:
    if outcome.refused:
        return ["-"] * 9
    tokens = plan.work.sequences * plan.work.response / outcome.timeline.seconds
    return [
        f"{outcome.memory.weights / GIB:.1f}",
        f"{outcome.memory.kv / GIB:.1f}",
        _thousands(outcome.memory.tokens),
        str(outcome.fit),
        f"{outcome.together:.0f}",
        f"{outcome.step_s * 1e3:.1f}",
        f"{outcome.floor_s * 1e3:.1f}",
        f"{tokens:.0f}" if tokens < 1e5 else _thousands(tokens),
        "-" if outcome.speedup is None else f"{outcome.speedup:.2f}",
    ]


def _thousands(count: float) -> str:
    return f"{count / 1e6:.2f}M" if count >= 1e6 else f"{count / 1e3:.0f}k"
