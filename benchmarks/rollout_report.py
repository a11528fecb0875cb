# SPDX-License-Identifier: Apache-2.0
"""Tables, JSON and plot of ``flashrl bench rollout``."""

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

from rich.table import Table

from benchmarks.rollout import Report, RolloutConfig, decode_seconds, tokens_per_second
from flashrl_verl.settings import KVCache, Precision
from flashrl_verl.tools.engines.arms import Arm
from flashrl_verl.tools.engines.shapes import load_config
from flashrl_verl.tools.plan import gpus
from flashrl_verl.tools.plan.memory import Choice, Engine, memory_of
from flashrl_verl.tools.plan.schedule import Work, simulate
from flashrl_verl.tools.plan.shape import shape_of
from flashrl_verl.tools.plan.step import Clock
from flashrl_verl.tools.report.figure import new_figure, save
from flashrl_verl.tools.report.palette import OF_PRECISION
from flashrl_verl.trainer.atomic_write import write_whole


class Prediction:
    """What ``flashrl plan`` says of a config on the GPU it was measured on, with the memory that this one has; None of
    everything on devices whose data sheet it does not know.

    Args:
        config: what was measured.
        report: where.
    """

    def __init__(self, config: RolloutConfig, report: Report):
        kind, memory = gpus.of_device(report.environment["device"]), report.environment["memory_bytes"]
        self._gpu = kind if kind is None or memory is None else replace(kind, memory_gib=memory / gpus.GIB)
        self._shape = shape_of(load_config(config.model, config.layers))
        self._engine = Engine(
            tensor_parallel=config.tensor_parallel,
            gpu_memory_utilization=config.gpu_memory_utilization,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )

    def kv_tokens(self, arm: Arm) -> int | None:
        """Tokens of the KV cache."""
        return None if self._gpu is None else memory_of(self._shape, _choice(arm), self._gpu, self._engine).tokens

    def floor_seconds(self, arm: Arm, sequences: float, context: float) -> float | None:
        """Of a decode step: to read what it has to read, at the speed of a copy."""
        if self._gpu is None:
            return None
        clock = Clock(
            shape=self._shape, choice=_choice(arm), gpu=self._gpu, tensor_parallel=self._engine.tensor_parallel
        )
        return clock.floor(sequences, context)

    def seconds(self, arm: Arm, work: Work, tokens: int) -> tuple[float, float] | None:
        """Of a whole rollout, and of what is left of it after one reading of the prompts, as ``rollout.decode_seconds``
        measures it: what is read again where memory is short is in it. With a KV cache of so many tokens."""
        if self._gpu is None:
            return None
        clock = Clock(
            shape=self._shape, choice=_choice(arm), gpu=self._gpu, tensor_parallel=self._engine.tensor_parallel
        )
        whole = simulate(clock, work, tokens, self._engine.max_num_seqs).seconds
        return whole, whole - clock.prefill(work.sequences * work.prompt, work.prompt, work.sequences)


NOT_MEASURABLE = "not measurable"


def _choice(arm: Arm) -> Choice:
    return Choice(precision=arm.precision, kv_cache=arm.kv_cache)


MEMORY_COLUMNS = ("arm", "weights GB", "KV GB", "KV tokens", "planned", "measured / planned")
SPEED_COLUMNS = (
    "work",
    "arm",
    "tokens/s (range)",
    "x BF16",
    "planned",
    "decode tokens/s",
    "x BF16",
    "planned",
    "step ms",
    "n",
)


def memory_rows(config: RolloutConfig, report: Report) -> list[list[str]]:
    """A row of ``MEMORY_COLUMNS`` for every arm that was measured."""
    prediction, rows = Prediction(config, report), []
    for arm in config.arms:
        for answer in report.of(arm)[:1]:
            memory, planned = answer.memory, prediction.kv_tokens(arm)
            rows.append(
                [
                    str(arm),
                    f"{memory['weight_bytes'] / 1e9:.4g}",
                    f"{memory['kv_bytes'] / 1e9:.4g}",
                    str(memory["kv_tokens"]),
                    "-" if planned is None else str(planned),
                    "-" if not planned else f"{memory['kv_tokens'] / planned:.3f}",
                ]
            )
    return rows


def speed_rows(config: RolloutConfig, report: Report) -> list[list[str]]:
    """A row of ``SPEED_COLUMNS`` for every work and arm that was measured."""
    prediction, base = Prediction(config, report), Arm(precision=Precision.BF16)
    found = [(work, arm, _row(report, prediction, arm, base, work)) for work in config.works for arm in config.arms]
    return [[words(work), str(arm), *row] for work, arm, row in found if row is not None]


def memory_table(config: RolloutConfig, report: Report) -> Table:
    """Weights and KV cache of every arm, measured and planned."""
    table = Table(title="Memory of one worker", title_justify="left")
    for name in MEMORY_COLUMNS:
        table.add_column(name, justify="left" if name == "arm" else "right")
    for row in memory_rows(config, report):
        table.add_row(*row)
    return table


def speed_table(config: RolloutConfig, report: Report) -> Table:
    """Every work and arm: median and range, ratio to BF16 with the model's KV dtype, and the planned ratio."""
    device = report.environment["device"]
    table = Table(title=f"Rollout of {config.model} on {device}", title_justify="left")
    for name in SPEED_COLUMNS:
        table.add_column(name, justify="left" if name in ("work", "arm") else "right")
    for row in speed_rows(config, report):
        table.add_row(*row)
    return table


def notes(config: RolloutConfig, report: Report) -> list[str]:
    """Why nothing is planned, and what makes arms hard to compare."""
    device, lines = report.environment["device"], comparability(report)
    if gpus.of_device(device) is None:
        lines.append(f"planned: - because flashrl plan has no data sheet of {device}; it knows {', '.join(gpus.GPUS)}")
    return lines


def comparability(report: Report) -> list[str]:
    """What makes the arms of a measurement hard to compare: they ran on several machines, or beside more or fewer
    others."""
    lines = []
    machines = _arms_by((result.answer.device.get("machine", "not recorded"), result.arm) for result in report.results)
    if len(machines) > 1:
        differ = (
            "arms were measured on several machines, or before and after a restart; those of one type differ by a few "
            "percent"
        )
        lines.append(f"{differ}: {'; '.join(machines)}")
    at_a_time = _arms_by((f"{result.parallel} at a time", result.arm) for result in report.results)
    if len(at_a_time) > 1:
        lines.append(f"engines that run beside others share the machine's cores with them: {'; '.join(at_a_time)}")
    return lines


def _arms_by(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Arms by what is said of them: `what (arm, arm)`."""
    arms: dict[str, dict[str, None]] = {}
    for what, arm in pairs:
        arms.setdefault(what, {})[arm] = None
    return [f"{what} ({', '.join(of)})" for what, of in arms.items()]


def _row(report: Report, prediction: Prediction, arm: Arm, base: Arm, work: Work) -> list[str] | None:
    timing = report.timing(arm, work)
    if timing is None:
        return None
    other = report.timing(base, work)
    speeds, decode = tokens_per_second(timing), statistics.median(decode_seconds(timing))
    planned = prediction.seconds(arm, work, report.of(arm)[0].memory["kv_tokens"])
    ratios = ["-"] * 4
    if other is not None:
        ratios[0] = f"{statistics.median(other.seconds) / statistics.median(timing.seconds):.2f}"
        theirs = statistics.median(decode_seconds(other))
        ratios[2] = f"{theirs / decode:.2f}" if min(theirs, decode) > 0 else "-"
        if planned is not None:
            theirs = prediction.seconds(base, work, report.of(base)[0].memory["kv_tokens"])
            ratios[1], ratios[3] = (f"{b / a:.2f}" for a, b in zip(planned, theirs, strict=True))
    return [
        f"{statistics.median(speeds):.0f} ({min(speeds):.0f}-{max(speeds):.0f})",
        *ratios[:2],
        # The prefill was measured by itself: where it took as long as the whole, there is nothing to say of the rest.
        f"{work.sequences * (work.response - 1) / decode:.0f}" if decode > 0 else NOT_MEASURABLE,
        *ratios[2:],
        f"{1e3 * decode / (work.response - 1):.2f}" if decode > 0 else NOT_MEASURABLE,
        str(len(speeds)),
    ]


def write(config: RolloutConfig, report: Report) -> list[Path]:
    """Write ``rollout.json`` and ``rollout.png`` beside the lines that are there; returns their paths.

    Raises:
        FlashRLError: matplotlib is not installed; ``rollout.json`` is there.
    """
    data, picture = config.output / "rollout.json", config.output / "rollout.png"
    write_whole(data, (json.dumps(asdict(report), indent=1) + "\n").encode())
    _plot(config, report, picture)
    return [data, picture]


def words(work: Work) -> str:
    """A work, as the tables name it."""
    return f"{work.sequences} x ({work.prompt} -> {work.response})"


def _plot(config: RolloutConfig, report: Report, path: Path) -> None:
    figure = new_figure(8, 1.4 + 0.34 * len(config.works) * (len(config.arms) + 1))
    axes = figure.subplots()
    at, places, names = 0.0, [], []
    for work in config.works:
        for arm in config.arms:
            timing = report.timing(arm, work)
            if timing is None:
                continue
            speeds = tokens_per_second(timing)
            middle = statistics.median(speeds)
            error = [[middle - min(speeds)], [max(speeds) - middle]]
            hatch = None if arm.kv_cache is KVCache.AUTO else "///"  # told apart without colours too
            axes.barh(
                at, middle, xerr=error, color=OF_PRECISION[arm.precision], hatch=hatch, edgecolor="white", capsize=3
            )
            axes.annotate(f" {middle:.0f}", (max(speeds), at), va="center", xytext=(4, 0), textcoords="offset points")
            places.append(at)
            names.append(f"{words(work)}, {arm}")
            at += 1
        at += 0.6
    axes.set_yticks(places, names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("generated tokens/s, prefill included (median; bars: range)")
    axes.set_title(f"{config.model}, {report.environment['device']}", fontsize=10, loc="left")
    axes.margins(x=0.14)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)
