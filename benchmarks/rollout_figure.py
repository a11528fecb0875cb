# SPDX-License-Identifier: Apache-2.0
"""``flashrl bench rollout-figure``: several results of ``flashrl bench rollout`` in one picture and one table: speed by
model, memory, work and arm, beside BF16 of the same measurement: machines of one type differ by a few percent."""

from __future__ import annotations

import os
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks import rollout_files
from flashrl_verl.tools.console import new_console

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

    from flashrl_verl.tools.engines.arms import Arm
    from flashrl_verl.tools.plan.schedule import Work

COLUMNS = ("model", "GPU", "memory GiB", "work", "arm", "tokens/s", "x BF16", "decode x BF16", "sequences fit", "n")
LABEL_WIDTH = 24  # characters below a group of bars; three bars are as wide


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One arm's speed at one work of one measurement."""

    run: Path
    """The measurement, an absolute path of a file: only bars of one are compared."""
    model: str
    device: str
    memory_gib: float | None
    """Of the GPU, for vLLM; None on a CPU."""
    work: Work
    arm: Arm
    seconds: tuple[float, ...]
    """Of whole rollouts."""
    decode_seconds: float | None
    """Median; None where the prefill took as long as the whole."""
    fit: int
    """Sequences of this work that the KV cache holds at their full length."""

    @property
    def tokens_per_second(self) -> list[float]:
        """Generated tokens over the whole time, prefill included; one a rollout."""
        from benchmarks.rollout import speeds

        return speeds(self.work.sequences * self.work.response, self.seconds)

    @property
    def place(self) -> tuple[Path, str, str, float | None, Work]:
        """What two bars share that are to be compared."""
        return self.run, self.model, self.device, self.memory_gib, self.work


def rollout_figure(
    results: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER_OR_JSONL...", help="Outputs of flashrl bench rollout, or their rollout.jsonl."),
    ],
    output: Annotated[
        Path, typer.Option(help="The picture, .png or .svg; the table is written beside it, as .md.")
    ] = Path("outputs/rollout.png"),
) -> None:
    """Put several results of `flashrl bench rollout` (models, GPU memories) in one picture and one table. An arm is
    compared with BF16 of the same folder."""
    from flashrl_verl.errors import ConfigError
    from flashrl_verl.tools.report.arms import require_once
    from flashrl_verl.tools.report.figure import require_picture

    output = output.expanduser()
    require_picture("--output", output)
    rollout_files.require_table(output.with_suffix(".md"), _line(COLUMNS))
    require_once(results, [rollout_files.read(path)[0] for path in results])
    found = [bar for path in results for bar in bars(path)]
    try:
        written = write(found, output)
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {error.strerror or error}") from error
    console = new_console()
    console.print(_table(found))
    for path in results:
        for line in notes(path):
            console.print(f"{path}: {line}", markup=False, highlight=False, style="dim", soft_wrap=True)
    console.print("written: " + ", ".join(map(str, written)), highlight=False, soft_wrap=True)


def bars(path: Path) -> list[Bar]:
    """All that was measured in one folder.

    Raises:
        ConfigError: it holds no results of ``flashrl bench rollout``, or of another release.
    """
    from benchmarks import rollout

    file, config, report = rollout_files.read(path)
    memory = report.environment["memory_bytes"]
    found = []
    for work in config.works:
        for arm in config.arms:
            if (timing := report.timing(arm, work)) is None:
                continue
            decode = statistics.median(rollout.decode_seconds(timing))
            found.append(
                Bar(
                    run=Path(os.path.abspath(file)),
                    model=Path(config.model).name,
                    device=report.environment["device"],
                    memory_gib=None if memory is None else memory * config.gpu_memory_utilization / 2**30,
                    work=work,
                    arm=arm,
                    seconds=tuple(timing.seconds),
                    decode_seconds=decode if decode > 0 else None,
                    fit=report.of(arm)[0].memory["kv_tokens"] // (work.prompt + work.response),
                )
            )
    return found


def notes(path: Path) -> list[str]:
    """What makes arms of one folder hard to compare, but for what is planned of them.

    Raises:
        ConfigError: as ``bars``.
    """
    from benchmarks.rollout_report import comparability

    file, _, report = rollout_files.read(path)
    cut = ["its last line is cut off and left out: the same bench command measures that arm again"]
    return [*(cut if rollout_files.cut_off(file) else []), *comparability(report)]


def base_of(bar: Bar, among: list[Bar]) -> Bar | None:
    """BF16 with the model's KV dtype at the same place of the same measurement; None where it was not measured."""
    from flashrl_verl.settings import Precision
    from flashrl_verl.tools.engines.arms import Arm

    return _at(bar, Arm(precision=Precision.BF16), among)


def _at(bar: Bar, arm: Arm, among: list[Bar]) -> Bar | None:
    return next((other for other in among if other.arm == arm and other.place == bar.place), None)


def model_name(bar: Bar, among: list[Bar]) -> str:
    """What to call a bar's model: by the measurement too where another was of the same work and memory."""
    runs = {other.run for other in among if other.place[1:] == bar.place[1:]}
    return bar.model if len(runs) == 1 else f"{bar.model} ({rollout_files.names(runs)[bar.run]})"


def unit_of(panel: list[Bar]) -> Arm | None:
    """The arm that speeds are multiples of: BF16, or the first, if it was measured wherever another was; else None."""
    from flashrl_verl.settings import Precision
    from flashrl_verl.tools.engines.arms import Arm

    arms = dict.fromkeys([Arm(precision=Precision.BF16), *(bar.arm for bar in panel)])
    return next((arm for arm in arms if all(_at(bar, arm, panel) is not None for bar in panel)), None)


def speed_up(bar: Bar, among: list[Bar]) -> float | None:
    """Median seconds of BF16 over this arm's."""
    base = base_of(bar, among)
    return None if base is None else statistics.median(base.seconds) / statistics.median(bar.seconds)


def rows(found: list[Bar]) -> list[list[str]]:
    """A row of ``COLUMNS`` for every bar."""
    from benchmarks.rollout_report import words

    table = []
    for bar in found:
        base, whole, speeds = base_of(bar, found), speed_up(bar, found), bar.tokens_per_second
        decode = None
        if base is not None and base.decode_seconds is not None and bar.decode_seconds is not None:
            decode = base.decode_seconds / bar.decode_seconds
        table.append(
            [
                model_name(bar, found),
                bar.device,
                "-" if bar.memory_gib is None else f"{bar.memory_gib:.0f}",
                words(bar.work),
                str(bar.arm),
                f"{statistics.median(speeds):.0f} ({min(speeds):.0f}-{max(speeds):.0f})",
                "-" if whole is None else f"{whole:.2f}",
                "-" if decode is None else f"{decode:.2f}",
                str(bar.fit),
                str(len(speeds)),
            ]
        )
    return table


def write(found: list[Bar], picture: Path) -> list[Path]:
    """Write the picture and, beside it, the table in Markdown; returns their paths.

    Raises:
        FlashRLError: matplotlib is not installed.
        OSError: no space, no rights, ...
    """
    from flashrl_verl.trainer.atomic_write import write_whole

    lines = [_line(row) for row in (COLUMNS, ["---"] * len(COLUMNS), *rows(found))]
    table = picture.with_suffix(".md")
    write_whole(table, ("\n".join(lines) + "\n").encode())
    _plot(found, picture)
    return [picture, table]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _table(found: list[Bar]) -> Table:
    from rich.table import Table

    table = Table(title="Rollout speed", title_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("model", "GPU", "work", "arm") else "right")
    for row in rows(found):
        table.add_row(*row)
    return table


def _plot(found: list[Bar], path: Path) -> None:
    """A panel for each memory, and in it a group of bars for each model and work measured there, as multiples of one
    arm's speed; all on one scale where that arm is the same, so that memories can be compared."""
    from flashrl_verl.tools.report.figure import new_figure, save

    memories = sorted({bar.memory_gib for bar in found}, key=lambda gib: -(gib or 0))
    panels = [[bar for bar in found if bar.memory_gib == memory] for memory in memories]
    units = [unit_of(panel) for panel in panels]
    most = max(len(panel) for panel in panels)
    groups = [_groups(panel) for panel in panels]
    width, widest = 0.84 / max(len(group) for of in groups for group in of), max(map(len, groups))
    figure = new_figure(max(5.5, 1.5 + 0.42 * most), 0.8 + 2.5 * len(memories))
    grid = figure.subplots(len(memories), 1, squeeze=False, sharey=None not in units and len(set(units)) == 1)[:, 0]
    for axes, panel, memory, unit in zip(grid, panels, memories, units, strict=True):
        _draw(axes, panel, unit, width, widest)
        devices = ", ".join(dict.fromkeys(bar.device for bar in panel))
        axes.set_title(devices if memory is None else f"{devices}, {memory:.0f} GiB for vLLM", fontsize=9, loc="left")
        axes.set_ylabel("generated tokens/s" if unit is None else f"generated tokens/s, {unit} = 1", fontsize=8)
    handles = {label: handle for axes in grid for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper center", ncols=len(handles), fontsize=8, frameon=False
    )
    save(figure, path)


def _groups(panel: list[Bar]) -> list[list[Bar]]:
    """Bars of one place each; measurements of the same model and work beside each other."""
    same = list(dict.fromkeys(bar.place[1:] for bar in panel))
    places = sorted(dict.fromkeys(bar.place for bar in panel), key=lambda place: same.index(place[1:]))
    return [[bar for bar in panel if bar.place == place] for place in places]


def _draw(axes: Axes, here: list[Bar], unit: Arm | None, width: float, widest: int) -> None:
    from benchmarks.rollout_report import words
    from flashrl_verl.settings import KVCache
    from flashrl_verl.tools.report.palette import OF_PRECISION

    groups = _groups(here)
    for bar in here:
        place, group = next((place, group) for place, group in enumerate(groups) if bar in group)
        at = place + (group.index(bar) - (len(group) - 1) / 2) * width
        one = (
            bar.work.sequences * bar.work.response if unit is None else statistics.median(_at(bar, unit, here).seconds)
        )
        low, middle, high = (
            one / seconds for seconds in (max(bar.seconds), statistics.median(bar.seconds), min(bar.seconds))
        )
        axes.bar(
            at,
            middle,
            width,
            yerr=[[middle - low], [high - middle]],
            color=OF_PRECISION[bar.arm.precision],
            hatch=None if bar.arm.kv_cache is KVCache.AUTO else "///",  # told apart without colours too
            edgecolor="white",
            capsize=2,
            label=str(bar.arm),
        )
        speed = f"{statistics.median(bar.tokens_per_second):.0f}/s"
        if bar.arm == unit:  # as high as every other such bar
            axes.annotate(speed, (at, middle / 2), ha="center", va="center", rotation=90, color="white", fontsize=7)
        else:
            said, turn = (speed, 90) if unit is None else (f"{middle:.2f}", 0)
            above = {"xytext": (0, 2), "textcoords": "offset points", "rotation": turn}
            axes.annotate(said, (at, high), ha="center", va="bottom", fontsize=7, **above)
    called = [model_name(group[0], here).replace(" (", "\n(") + f"\n{words(group[0].work)}" for group in groups]
    labels = ["\n".join(textwrap.fill(line, LABEL_WIDTH) for line in lines.splitlines()) for lines in called]
    axes.set_xticks(range(len(groups)), labels, fontsize=8)
    axes.set_xlim(-0.6, max(len(groups), widest / 2) - 0.4)  # few groups are not drawn much wider than many
    axes.tick_params(axis="y", labelsize=8)
    axes.margins(y=0.15 if unit is not None else 0.3)
    axes.spines[["top", "right"]].set_visible(False)
