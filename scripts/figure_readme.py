#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The README's picture (docs/summary.png) and its table of results, from the raw data of docs/results.

python scripts/figure_readme.py [PICTURE]
"""

import json
import statistics
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # works from a checkout that is not installed

from flashrl_verl.errors import environment_needed  # noqa: E402

with environment_needed():
    from benchmarks import rollout_figure
    from benchmarks.rollout_figure import Bar
    from benchmarks.rollout_report import words
    from flashrl_verl.settings import KVCache, Precision
    from flashrl_verl.tools.engines.arms import Arm
    from flashrl_verl.tools.report.figure import new_figure, save
    from flashrl_verl.tools.report.palette import OF_PRECISION, TITLE

RESULTS = ROOT / "docs" / "results"
ROLLOUTS = (
    "rollout/qwen2.5-32b-two-arms.jsonl",
    "rollout/qwen2.5-32b-four-arms.jsonl",
    "throughput/qwen2.5-32b-73gib.jsonl",
    "throughput/qwen2.5-32b-71gib-two-arms.jsonl",
)
AGAIN = ("throughput/again/qwen2.5-32b.jsonl", "throughput/again/qwen2.5-32b-71gib.jsonl")
"""The second and the last of them once more, one engine after another on one GPU."""
LONG = 8192
"""Tokens of the prompts of the work of which only decoding is shown: whole rollouts of it are prompts above all."""
STEP = "step/h200.json"
LEARNING = tuple(f"learning/outliers-32{which}.json" for which in ("", "-again", "-third"))
ORDINALS = ("first", "second", "third")
"""Each experiment is from a warmed-up model of its own."""
ENDS = {
    "bf16:tis": ("BF16, TIS", "P", "full"),
    "int8:tis": ("INT8, TIS", "D", "full"),
    "int8:none": ("INT8, no correction", "o", "none"),
}
"""Names and markers as the pictures of docs/results/learning.md have them; hollow where nothing is corrected."""
A100_GIB, NEAR_GIB = 71, 2
"""What an A100-80GB gives vLLM, 0.9 of it: said where an H200's share is so near."""


@cache
def raw(file: str) -> dict[str, Any]:
    return json.loads((RESULTS / file).read_text())


def pairs() -> list[tuple[str, Bar, Bar]]:
    """Where, BF16 and INT8, of the short works of a 32B rollout, by memory."""
    found = []
    for of in (rollout_figure.bars(RESULTS / file) for file in ROLLOUTS):
        for bar in of:
            base = rollout_figure.base_of(bar, of)
            if base is not None and bar.arm == Arm(precision=Precision.INT8) and bar.work.prompt != LONG:
                gib = round(bar.memory_gib)
                near = "as an A100-80GB" if gib == A100_GIB else f"an A100-80GB gives {A100_GIB}"
                about = f" ({near})" if abs(gib - A100_GIB) <= NEAR_GIB else ""
                found.append((f"{words(bar.work)}, {gib} GiB{about}", base, bar))
    return found


def speed(bar: Bar) -> float:
    """Generated tokens a second, median."""
    return statistics.median(bar.tokens_per_second)


# ---- the table ----


def table() -> list[str]:
    """Lines of Markdown."""
    rows = [("measured", "BF16", "INT8", "INT8 is"), ("---",) * 4, *speeds(), decoding(), step()]
    return ["| " + " | ".join(row) + " |" for row in rows]


def speeds() -> list[tuple[str, ...]]:
    return [
        (
            f"rollout, {place}, tokens/s",
            f"{speed(base):.0f}",
            f"{speed(bar):.0f}",
            f"[{rollout_figure.speed_up(bar, [base]):.2f} x](docs/results/throughput.md){again(bar)}",
        )
        for place, base, bar in pairs()
    ]


def again(bar: Bar) -> str:
    """The same measured anew; nothing where it was not."""
    measurements = [rollout_figure.bars(RESULTS / file) for file in AGAIN]
    same = [(one, of) for of in measurements for one in of if (one.place[1:], one.arm) == (bar.place[1:], bar.arm)]
    return "".join(
        f", [{rollout_figure.speed_up(one, of):.2f}](docs/results/throughput_again.md) again" for one, of in same
    )


def decoding() -> tuple[str, ...]:
    weights = Arm(precision=Precision.INT8)
    both = Arm(precision=Precision.INT8, kv_cache=KVCache.INT8_PER_TOKEN_HEAD)
    per_second = {
        bar.arm: bar.work.sequences * (bar.work.response - 1) / bar.decode_seconds
        for bar in rollout_figure.bars(RESULTS / ROLLOUTS[1])
        if bar.work.prompt == LONG
    }
    bf16, int8, with_kv = (per_second[arm] for arm in (Arm(precision=Precision.BF16), weights, both))
    what = "decoding, 28 sequences of 8192 tokens, INT8 KV cache too, tokens/s"
    gain = f"[{with_kv / bf16:.2f} x](docs/results/rollout.md), the weights alone {int8 / bf16:.2f} x"
    return what, f"{bf16:.0f}", f"{with_kv:.0f}", gain


def step() -> tuple[str, ...]:
    seconds = {
        tuple(sorted(one["choice"].items())): one["whole"]["seconds"] for one in raw(STEP)["outcomes"] if one["whole"]
    }
    (bf16, keys), (int8, both) = (
        [seconds[("kv_cache", kv_cache), ("precision", precision)] for kv_cache in ("auto", "int8_per_token_head")]
        for precision in ("bf16", "int8")
    )
    what = "a step of DAPO on 64 H200s, INT8 KV cache too, *computed*, s"
    alone = f"the weights alone {bf16 / int8:.2f} x, the KV cache alone {bf16 / keys:.2f} x"
    gain = f"[{bf16 / both:.2f} x](docs/results/step.md), {alone}"
    return what, f"{bf16:.0f}", f"{both:.0f}", gain


# ---- the picture ----


def draw(path: Path) -> None:
    """Speed over BF16 on the left, what was learned on the right."""
    figure = new_figure(11, 3.6)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    draw_speeds(left)
    draw_learning(right)
    for axes in (left, right):
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path, dpi=130)


def draw_speeds(axes: Any) -> None:
    found = pairs()
    for row, (_, base, bar) in enumerate(found):
        for place, one in ((row - 0.2, base), (row + 0.2, bar)):
            ratio, precision = rollout_figure.speed_up(one, [base]), one.arm.precision
            axes.barh(
                place, ratio, 0.38, color=OF_PRECISION[precision], label=precision.value.upper() if row == 0 else None
            )
            said = f" {ratio:.2f} x" if one is bar else f" {speed(one):.0f} tokens/s"
            axes.annotate(said, (ratio, place), va="center", fontsize=8)
    axes.set_yticks(
        range(len(found)), [place.replace(", ", "\n").replace(" (a", "\n(a") for place, *_ in found], fontsize=8
    )
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlabel("generated tokens a second, BF16 = 1", fontsize=9)
    axes.set_title("Rollout of a 32B model on one H200, by vLLM's memory", **TITLE)
    axes.legend(fontsize=8, frameon=False, loc="upper right")


def draw_learning(axes: Any) -> None:
    """A point a run, models beside each other: what the last weights are right about, asked in BF16."""
    for place, (arm, (label, marker, fill)) in enumerate(ENDS.items()):
        colour = OF_PRECISION[Precision(arm.partition(":")[0])]
        for model, file in enumerate(LEARNING):
            ends = [run["bf16"]["mean@8"]["value"] for run in raw(file)["runs"] if run["arm"] == arm]
            at = model + (place - 1) * 0.25
            axes.plot(
                [at + (run - 1) * 0.05 for run in range(len(ends))],
                ends,
                marker,
                color=colour,
                fillstyle=fill,
                markersize=5,
                label=label if model == 0 else None,
            )
            axes.hlines(statistics.mean(ends), at - 0.1, at + 0.1, color=colour, linewidth=1)
    starts = [raw(file)["start"]["mean@8"]["value"] for file in LEARNING]
    axes.set_xticks(
        range(len(LEARNING)),
        [f"{name} model\n({start:.2f} before)" for name, start in zip(ORDINALS, starts, strict=True)],
    )
    axes.set_ylabel("accuracy after training, in BF16; bars: means", fontsize=9)
    axes.set_title("A small model, much mismatch", **TITLE)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.legend(fontsize=8, frameon=False, loc="lower right")


if __name__ == "__main__":
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(__doc__)
        sys.exit()
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "summary.png")
    print("\n".join(table()))
