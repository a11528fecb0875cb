#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The README's picture (docs/summary.png) and its table of results, from the raw data of docs/results.

python scripts/figure_readme.py [PICTURE]
"""

import json
import statistics
import sys
from pathlib import Path

from flashrl_verl.bench import rollout_figure
from flashrl_verl.bench.rollout_figure import Bar
from flashrl_verl.bench.rollout_report import words
from flashrl_verl.config import Precision
from flashrl_verl.report.figure import new_figure
from flashrl_verl.report.palette import LINES, OF_PRECISION, TITLE

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
LEARNING = "outliers-32"
ARMS = {"bf16:tis": "BF16 with TIS", "int8:tis": "INT8 with TIS", "int8:none": "INT8 without TIS"}


def bars(*files: str) -> dict[str, list[Bar]]:
    """What was measured in each file: BF16 and another arm at the same places."""
    return {file: rollout_figure.bars(RESULTS / file) for file in files}


def pairs() -> list[tuple[str, Bar, Bar]]:
    """Measurements of 32B with all of the GPU's memory and with little: where, BF16, and what it is compared with."""
    found = []
    for file, of in bars("rollout/qwen2.5-32b.jsonl", "throughput/qwen2.5-32b-80gb.jsonl").items():
        for bar in of:
            if bar.arm.precision is Precision.INT8 and (base := rollout_figure.base_of(bar, of)):
                memory = "all memory" if file.startswith("rollout") else "an A100-80GB's memory"
                found.append((f"{words(bar.work)}, {memory}", base, bar))
    return found


def learning() -> dict:
    return json.loads((RESULTS / "learning" / f"{LEARNING}.json").read_text())


def speed(bar: Bar) -> float:
    """Generated tokens a second, median."""
    return statistics.median(bar.tokens_per_second)


def table() -> list[str]:
    """Lines of Markdown."""
    rows = [("", "BF16", "INT8", ""), ("---",) * 4, *speeds(), decoding(), step(), trained(), refit()]
    return ["| " + " | ".join(row) + " |" for row in rows]


def speeds() -> list[tuple[str, ...]]:
    page = "docs/results/throughput.md"
    found = [(place, speed(base), speed(bar)) for place, base, bar in pairs()]
    return [
        (f"32B rollout, {place}, tokens/s", f"{bf16:.0f}", f"{int8:.0f}", f"[{int8 / bf16:.2f} x]({page})")
        for place, bf16, int8 in found
    ]


def decoding() -> tuple[str, ...]:
    (of,) = bars("rollout/qwen2.5-32b-int8-kv.jsonl").values()
    bf16, int8 = (
        next(bar.work.sequences * (bar.work.response - 1) / bar.decode_seconds for bar in of if bar.arm.precision is precision)
        for precision in (Precision.BF16, Precision.INT8)
    )
    what = "decoding at 8192 tokens, INT8 keys and values too, tokens/s"
    return what, f"{bf16:.0f}", f"{int8:.0f}", f"[{int8 / bf16:.2f} x](docs/results/rollout.md)"


def step() -> tuple[str, ...]:
    chosen = {("bf16", "auto"), ("int8", "int8_per_token_head")}
    outcomes = json.loads((RESULTS / "step" / "h200.json").read_text())["outcomes"]
    bf16, int8 = (one["whole"]["seconds"] for one in outcomes if tuple(one["choice"].values()) in chosen)
    what = "the same, a whole step of DAPO-32B on 64 H200s, computed, s"
    return what, f"{bf16:.0f}", f"{int8:.0f}", f"[{bf16 / int8:.2f} x](docs/results/step.md)"


def trained() -> tuple[str, ...]:
    record = learning()
    final = {arm["arm"]: "{mean:.3f} ± {standard_error:.3f}".format(**arm["accuracy"]) for arm in record["arms"]}
    what = f"accuracy after training with TIS, from {record['start']['mean@8']['value']:.2f}, much mismatch, asked in BF16"
    return what, final["bf16:tis"], final["int8:tis"], f"[without TIS {final['int8:none']}](docs/results/learning.md)"


def refit() -> tuple[str, ...]:
    record = json.loads((RESULTS / "refit" / "qwen2.5-32b.json").read_text())
    (one,) = [result for result in record["results"] if result["arm"] == "flashrl int8"]
    seconds = statistics.median(one["refit_seconds"])
    share = (one["read_bytes"] + one["written_bytes"]) / 1e9 / seconds / statistics.median(record["copy_gigabytes_per_second"])
    what = "engine's part of a 32B weight update, verified, ms"
    return what, "", f"{seconds * 1e3:.0f}", f"[at {share:.0%} of a copy's speed](docs/results/refit.md)"


def draw(path: Path) -> None:
    """Speed over BF16 on the left, learning on the right."""
    figure = new_figure(11, 3.6)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    found = pairs()
    for row, (_, base, bar) in enumerate(found):
        for place, one in ((row - 0.2, base), (row + 0.2, bar)):
            ratio = speed(one) / speed(base)
            precision = one.arm.precision
            left.barh(place, ratio, 0.38, color=OF_PRECISION[precision], label=precision.value.upper() if row == 0 else None)
            said = f" {ratio:.2f} x" if one is bar else f" {speed(one):.0f} tokens/s"
            left.annotate(said, (ratio, place), va="center", fontsize=8)
    left.set_yticks(range(len(found)), [place.replace(", ", "\n") for place, *_ in found], fontsize=8)
    left.invert_yaxis()
    left.margins(x=0.2)
    left.set_xlabel("generated tokens a second, BF16 = 1", fontsize=9)
    left.set_title("Rollout of a 32B model on one H200", **TITLE)
    left.legend(fontsize=8, frameon=False, loc="upper right")
    runs = learning()["runs"]
    for arm, label in ARMS.items():
        curves = [run["series"]["accuracy"] for run in runs if run["arm"] == arm]
        steps, values = curves[0]["step"], [*zip(*(curve["value"] for curve in curves), strict=True)]
        colour, line = OF_PRECISION[Precision(arm.partition(":")[0])], LINES[arm.endswith("none")]
        right.fill_between(steps, [*map(min, values)], [*map(max, values)], color=colour, alpha=0.12, linewidth=0)
        right.plot(steps, [*map(statistics.mean, values)], line, color=colour, marker="o", markersize=4, label=label)
    right.set_xlabel("training step", fontsize=9)
    right.set_ylabel("accuracy on held-out chains", fontsize=9)
    right.set_title("A small model, much mismatch", **TITLE)
    right.legend(fontsize=8, frameon=False, loc="lower right")
    for axes in (left, right):
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "summary.png")
    print("\n".join(table()))
