# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/results, the README's table and picture, and pictures of learning, from benchmarks/results.

    python -m benchmarks.tables           # writes them in place; tests/unit/test_benchmarks.py compares the tables

A table stands between ``<!-- table: name -->`` and ``<!-- end -->``; ``name`` is a function of this file with its
arguments, as in ``mismatches h200.json cpu.json``.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import gsm8k, mismatch, refit, rollout, step
from benchmarks.common import RESULTS, ROOT
from benchmarks.engine import FP8_VERL
from benchmarks.mismatch import K3_KL, far_off
from flashrl_verl.tools import report
from flashrl_verl.trainer.atomic_write import write_atomically

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs" / "results").glob("*.md")))
PLACE = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)", re.S)

Rows = list[list[str]]
"""Header first."""
GSM8K, GSM8K_LARGER = "gsm8k/qwen2.5-coder-0.5b-seed*.json", "gsm8k/qwen2.5-coder-1.5b-seed*.json"
"""What the README tells of learning."""
STEP = "step/qwen2.5-14b-4xh200.json"
"""And of a whole step: BF16 first."""


def load(file: str) -> Any:
    """A JSON file of ``benchmarks/results``."""
    return json.loads((RESULTS / file).read_text())


def lines(file: str) -> list[Any]:
    """A JSON Lines file of ``benchmarks/results``."""
    return [json.loads(line) for line in (RESULTS / file).read_text().splitlines()]


# ---- of the benchmarks ----


def throughput(*files: str) -> Rows:
    """Results of ``benchmarks.rollout``."""
    return rollout.table([lines(f"{file}.jsonl") for file in files])


def engines(*files: str) -> Rows:
    """Speed of engines, one a file, BF16 first: of as many sequences each as ran in it."""
    rows = [["sequences x (prompt -> response)", "variant", "seconds", "of them prompts", "tokens/s", "x BF16"]]
    of = [rollout.rollouts_of(lines(f"{file}.jsonl")) for file in files]
    for at, base in enumerate(of[0]):
        for one in (engine[at] for engine in of):
            assert one.workload[1:] == base.workload[1:]
            (seconds,), (speed,), (first,) = one.seconds, one.tokens_per_second, base.tokens_per_second
            cells = f"{seconds:.1f}", f"{seconds - one.decode_seconds:.1f}", f"{speed:.0f}", f"{speed / first:.2f}"
            rows.append(["{} x ({} -> {})".format(*one.workload), one.variant, *cells])
    return rows


def refits(*files: str) -> Rows:
    """Results of ``benchmarks.refit``."""
    return refit.table(map(load, files))


def steps_run(*files: str) -> Rows:
    """Results of ``benchmarks.step``."""
    return step.table({"results": [one for file in files for one in load(file)["results"]]})


def mismatches(*files: str) -> Rows:
    """Results of ``benchmarks.mismatch``."""
    return mismatch.table(map(load, files))


def mismatch_kv_cache(*files: str) -> Rows:
    """k3 KL of own tokens, by KV cache; with an INT8 one by `int8`'s too."""
    caches = "int8+int8kv", "int8+int8kv-raw"
    rows = [["model", "context", "bf16", "int8", *(word for name in caches for word in (name, "x int8"))]]
    for record in map(load, files):
        of = {one["variant"]: one["own"] for one in record["results"]}
        row = [record["model"], f"{record['context']}", *(far_off(of[n]) for n in ("bf16", "int8"))]
        for one in map(of.get, caches):
            row += [far_off(one), f"{one[K3_KL] / of['int8'][K3_KL]:.2f}"] if one else ["-", "-"]
        rows.append(row)
    return rows


def mismatch_logits(rounded: str, fp32: str) -> Rows:
    """k3 KL of own tokens by variant, with logits in BF16 and in FP32 on both sides."""
    of = {one["variant"]: one["own"] for one in load(rounded)["results"]}
    results = load(fp32)["results"]
    return [
        ["variant", "logits in BF16", "in FP32"],
        *([one["variant"], far_off(of[one["variant"]]), far_off(one["own"])] for one in results),
    ]


def versions(*names: str) -> Rows:
    """What ran in several versions of vLLM, a column each; the first's mismatch and weight updates stand elsewhere."""
    elsewhere = {"mismatch.json": "mismatch/h200-qwen2.5-coder-0.5b-kv.json", "refit.json": "refit/qwen2.5-14b.json"}
    cells: dict[str, dict[str, str]] = {}
    for name in names:
        kinds = "rollout.jsonl", "steps.json", "mismatch.json", "refit.json"
        path = {kind: f"versions/{name}/{kind}" for kind in kinds} | (elsewhere if name == names[0] else {})
        if (RESULTS / path["rollout.jsonl"]).exists():
            for one in rollout.rollouts_of(lines(path["rollout.jsonl"])):
                what = "tokens/s, {} x ({} -> {}), {}".format(*one.workload, one.variant)
                cells.setdefault(what, {})[name] = f"{one.tokens_per_second[0]:.0f}"
        for variant, sizes in load(path["steps.json"]).items():
            if variant.startswith("int8"):
                for n, passes in sizes.items():
                    median = statistics.median(of_pass[1] for of_pass in passes)
                    cells.setdefault(f"ms a decode step, {n} sequences, {variant}", {})[name] = f"{median:.2f}"
        for one in load(path["mismatch.json"])["results"]:
            if one["variant"] in ("bf16", "int8", "int8+int8kv"):
                cells.setdefault(f"k3 KL, {one['variant']}", {})[name] = far_off(one["own"])
        if (RESULTS / path["refit.json"]).exists():
            for one in load(path["refit.json"])["results"]:
                median = 1e3 * statistics.median(one["refit_seconds"])
                cells.setdefault(f"ms a weight update, {one['variant']}", {})[name] = f"{median:.0f}"
    return [["vLLM", *names], *([what, *(of.get(name, "-") for name in names)] for what, of in cells.items())]


def gsm8k_records(pattern: str) -> list[Any]:
    """Results of ``benchmarks.gsm8k``, of the same experiment."""
    return [load(path) for path in sorted(RESULTS.glob(pattern))]


def learning(pattern: str) -> Rows:
    """Results of ``benchmarks.gsm8k``."""
    return [list(gsm8k.HEADER), *map(list, gsm8k.table(gsm8k_records(pattern)))]


def learning_by_seed(pattern: str) -> Rows:
    """Accuracy in BF16 of a run's last weights, minus that of the run in BF16 beside it."""
    records, base = gsm8k_records(pattern), "bf16+tis"
    variants = dict.fromkeys(run["variant"] for record in records for run in record["runs"])
    pairs = {name: gsm8k.evaluated(gsm8k.pairs(records, name, base)) for name in variants if name != base}
    gaps = {name: {one["seed"]: one["bf16"] - other["bf16"] for one, other in of} for name, of in pairs.items() if of}
    seeds = sorted(set().union(*gaps.values()))
    cells = ([f"{of[seed]:+.3f}" if seed in of else "-" for seed in seeds] for of in gaps.values())
    return [["seed", *map(str, seeds)], *([name, *row] for name, row in zip(gaps, cells, strict=True))]


def runs(*paths: str) -> Rows:
    """Runs of the recipe, as ``flashrl report`` tells of them."""
    return report.table_rows(report.load(*(RESULTS / path for path in paths)))


# ---- the README's ----


def readme() -> Rows:
    """Mismatch and learning of a pretrained model, a rollout of 32B, a step of 14B; each with its baseline."""
    rows = [["on H200s", "baseline", "8-bit rollout", ""]]
    far = load("mismatch/h200-qwen2.5-coder-1.5b.json")
    k3_kl = {one["variant"]: one["own"][K3_KL] for one in far["results"]}
    rows.append(
        [
            f"mismatch of rollout and trainer (k3 KL, nats a token), {far['model']}; of BF16 {k3_kl['bf16']:.1e}",
            f"verl's FP8: {k3_kl[FP8_VERL]:.1e}",
            f"INT8: {k3_kl['int8']:.1e}",
            f"[{k3_kl[FP8_VERL] / k3_kl['int8']:.1f} x closer](docs/results/mismatch.md)",
        ]
    )
    head, *learned = learning(GSM8K)
    (ours,) = (dict(zip(head, row, strict=True)) for row in learned if row[0] == "int8+int8kv+tis")
    what = f"accuracy on GSM8K after {ours['steps']} steps, evaluated in BF16, Qwen2.5-Coder-0.5B-Instruct"
    both = zip(*gsm8k.evaluated(gsm8k.pairs(gsm8k_records(GSM8K), "int8+int8kv+tis", "bf16+tis")), strict=True)
    after, before = (f"{statistics.fmean(gsm8k.bf16_accuracies(of)):.3f}" for of in both)
    gap = f"[{ours['minus the first variant (pairs)'].replace(')', ' seeds)')}](docs/results/learning.md)"
    rows.append([what, f"BF16: {before}", f"INT8 and KV cache: {after}", gap])
    of = {one.variant: one for one in rollout.rollouts_of(lines("rollout/qwen2.5-32b-long-tail.jsonl"))}
    bf16, ours = (of[variant].tokens_per_second for variant in ("bf16", "int8+int8kv"))
    rows.append(
        [
            "tokens/s of a rollout, Qwen2.5-32B on one GPU, long-tailed lengths",
            f"BF16: {statistics.median(bf16):.0f}",
            f"INT8 and KV cache: {statistics.median(ours):.0f}",
            f"[{rollout.speed_up(of['int8+int8kv'], of['bf16'])} x](docs/results/throughput.md)",
        ]
    )
    took = {one["variant"]: step.means(one["steps"])["step"] for one in load(STEP)["results"]}
    what = "seconds of a whole training step, Qwen2.5-14B on four GPUs, long-tailed lengths"
    gain = f"[{took['bf16'] / took['int8+kv']:.2f} x](docs/results/step.md)"
    rows.append([what, f"BF16: {took['bf16']:.0f}", f"INT8 and KV cache: {took['int8+kv']:.0f}", gain])
    return rows


def pictures_of_learning(folder: Path) -> None:
    """Curves of the variants that the page compares first, and of the others."""
    first = "bf16+tis", "int8+tis", "int8+int8kv+tis"
    for name, pattern, shown in (
        ("gsm8k-0.5b", GSM8K, lambda variant: variant in first),
        ("gsm8k-0.5b-others", GSM8K, lambda variant: variant not in first[1:]),
        ("gsm8k-1.5b", GSM8K_LARGER, lambda variant: True),
    ):
        records = [{"runs": [run for run in one["runs"] if shown(run["variant"])]} for one in gsm8k_records(pattern)]
        gsm8k.plot(records, folder / f"{name}.png")


def picture(path: Path) -> None:
    """The README's: mismatch, learning, and a step by phase."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.4), layout="constrained", dpi=110)
    mismatched, learned, whole = figure.subplots(1, 3)
    colours = {"bf16": "C0", "int8": "C1", "int8+int8kv": "C3", "fp8": "C7", FP8_VERL: "C7"}
    names = {"bf16": "BF16", "int8": "INT8", "int8+int8kv": "INT8 and\nKV cache", "fp8": "FP8", FP8_VERL: "verl's FP8"}
    own = {one["variant"]: one["own"][K3_KL] for one in load("mismatch/h200-qwen2.5-coder-1.5b.json")["results"]}
    shown = [name for name in names if name in own]
    bars = mismatched.bar([names[name] for name in shown], [*map(own.get, shown)], color=[*map(colours.get, shown)])
    mismatched.bar_label(bars, fmt="%.1e")
    mismatched.margins(y=0.12)
    mismatched.set(title="mismatch of rollout and trainer, 1.5B", ylabel="k3 KL, nats a token")
    step.bars(load(STEP), whole)
    whole.set(title="a step of Qwen2.5-14B on four H200s")
    for variant in "bf16", "int8+int8kv":
        learned.plot([], color=colours[variant], label=names[variant].replace("\n", " "))
        for record in gsm8k_records(GSM8K) + gsm8k_records(GSM8K_LARGER):
            for curve in (run["series"]["score"] for run in record["runs"] if run["variant"] == f"{variant}+tis"):
                learned.plot(curve["step"], curve["value"], color=colours[variant], linewidth=0.9)
    learned.set(title="GSM8K, a line a run: 1.5B above, 0.5B below", xlabel="training step", ylabel="accuracy")
    learned.legend(frameon=False, loc="center right")
    figure.savefig(path)


TABLES: dict[str, Callable[..., Rows]] = {
    function.__name__: function
    for function in (
        throughput, engines, refits, steps_run, mismatches, mismatch_kv_cache, mismatch_logits, versions,
        learning, learning_by_seed, runs, readme,
    )
}  # fmt: skip


def markdown(rows: Rows) -> str:
    """A Markdown table."""
    return "".join(f"| {' | '.join(row)} |\n" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:]))


def rewritten(text: str) -> str:
    """A page with its tables made anew."""

    def replaced(found: re.Match) -> str:
        name, *arguments = found[2].split()
        return found[1] + markdown(TABLES[name](*arguments)) + found[3]

    return PLACE.sub(replaced, text)


if __name__ == "__main__":
    for page in PAGES:
        write_atomically(page, rewritten(page.read_text()).encode())
    picture(ROOT / "docs" / "results" / "readme.png")
    pictures_of_learning(ROOT / "docs" / "results" / "learning")
