# SPDX-License-Identifier: Apache-2.0
"""Every table of docs/results and the README's table of results, from the raw data in benchmarks/results.

    python -m benchmarks.tables           # writes them in place
    python -m benchmarks.tables --check   # exit code 1 where that would change a page

A table stands between ``<!-- table: name -->`` and ``<!-- end -->``; ``name`` is a function of this file with its
arguments, as in ``mismatch h200.json cpu.json``.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from typing import Annotated, Any

import typer

from benchmarks.common import RESULTS, ROOT, ranged, run
from benchmarks.engine import FP8_VERL
from benchmarks.mismatch import CORRELATION, ESS, K3_KL
from benchmarks.rollout import Rollout, rollouts_of, speed_ups
from flashrl_verl.errors import ConfigError
from flashrl_verl.trainer.atomic_write import write_whole

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs" / "results").glob("*.md")))
PLACE = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)", re.S)

Rows = list[list[str]]
"""Header first."""


def load(file: str) -> Any:
    """A JSON file of ``benchmarks/results``."""
    return json.loads((RESULTS / file).read_text())


def lines(file: str) -> list[Any]:
    """A JSON Lines file of ``benchmarks/results``."""
    return [json.loads(line) for line in (RESULTS / file).read_text().splitlines()]


# ---- rollout and throughput ----


def rollouts(file: str) -> list[Rollout]:
    """A result of ``benchmarks.rollout``: by workload, then by variant."""
    return rollouts_of(lines(f"{file}.jsonl"))


def throughput(*files: str) -> Rows:
    """Tokens/s of BF16, and how many times these others make, by model, memory and workload; sequences that fit."""
    measured = [(lines(f"{file}.jsonl")[0]["settings"], rollouts(file)) for file in files]
    variants = list(dict.fromkeys(one.variant for _, of in measured for one in of))
    rows = [["model", "memory GiB", "sequences x (prompt -> response)", "bf16, tokens/s", *variants[1:]]]
    for settings, of in measured:
        for workload in dict.fromkeys(one.workload for one in of):
            there = {one.variant: one for one in of if one.workload == workload}
            base = there["bf16"]
            words = "{} x ({} -> {})".format(*workload) + (", tail" if settings.get("spread") else "")
            row = [settings["model"], f"{base.memory_gib:.0f}", words]
            row.append(f"{statistics.median(base.tokens_per_second):.0f} ({base.fit})")
            for one in map(there.get, variants[1:]):
                row.append(f"{speed_ups(one, of)[0]} ({one.fit})" if one else "-")
            rows.append(row)
    return rows


def engines_of_four(*files: str) -> Rows:
    """Speed of engines of four GPUs, one a file, BF16 first: of as many sequences each as ran in it."""
    rows = [["sequences x (prompt -> response)", "variant", "seconds", "of them prompts", "tokens/s", "x BF16"]]
    of = [rollouts(file) for file in files]
    for at, base in enumerate(of[0]):
        for one in (engine[at] for engine in of):
            assert one.workload[1:] == base.workload[1:]
            (seconds,), (speed,), (first,) = one.seconds, one.tokens_per_second, base.tokens_per_second
            cells = f"{seconds:.1f}", f"{seconds - one.decode_seconds:.1f}", f"{speed:.0f}", f"{speed / first:.2f}"
            rows.append(["{} x ({} -> {})".format(*one.workload), one.variant, *cells])
    return rows


# ---- refit, step ----


def refit(*files: str) -> Rows:
    """A weight update, by model and way of updating."""
    rows = [["model", "variant", "update ms", "loading ms", "extra MiB"]]
    for record in map(load, files):
        for one in record["results"]:
            form = ".0f" if min(one["refit_seconds"]) > 1 else ".1f"
            update = ranged([1e3 * s for s in one["refit_seconds"]], form)
            loading = f"{1e3 * statistics.median(one['load_seconds']):{form}}"
            rows.append([record["model"], one["arm"], update, loading, f"{one['extra_bytes'] / 2**20:.0f}"])
    return rows


def steps_run(file: str) -> Rows:
    """A result of ``benchmarks.step``."""
    from benchmarks.step import COLUMNS, rows_of  # verl's agent loops come with it

    return [["variant", *COLUMNS], *rows_of(load(file)["results"])]


# ---- mismatch ----


def far_off(k3_kl: float, of: dict[str, Any]) -> str:
    """k3 KL and its standard error."""
    return f"{k3_kl:.1e} ± {of['k3_kl_standard_error']:.0e}"


def mismatch(*files: str) -> Rows:
    """Distance of every engine from the trainer; its excess over BF16's as a share of that of each FP8."""
    rows = [["model", "variant", "k3 KL, own", "k3 KL, common", "excess / fp8's", "/ fp8-verl's", "correlation", "ESS"]]
    for record in map(load, files):
        of = {one["variant"]: one for one in record["results"]}
        excess = {name: one["own"][K3_KL] - of["bf16"]["own"][K3_KL] for name, one in of.items()}
        for name, one in of.items():
            far = [far_off(one[tokens][K3_KL], one[tokens]) for tokens in ("own", "common")]
            shares = [
                f"{excess[name] / excess[fp8]:.2f}" if name != "bf16" and fp8 in of else "-"
                for fp8 in ("fp8", FP8_VERL)
            ]
            rows.append(
                [record["model"], name, *far, *shares, f"{one['own'][CORRELATION]:.5f}", f"{one['own'][ESS]:.4f}"]
            )
    return rows


def mismatch_kv_cache(*files: str) -> Rows:
    """k3 KL of own tokens, by KV cache; with an INT8 one by `int8`'s too."""
    caches = "int8+int8kv", "int8+int8kv-raw"
    rows = [["model", "context", "bf16", "int8", *(word for name in caches for word in (name, "x int8"))]]
    for record in map(load, files):
        of = {one["variant"]: one["own"] for one in record["results"]}
        row = [record["model"], f"{record['context']}", *(far_off(of[n][K3_KL], of[n]) for n in ("bf16", "int8"))]
        for one in map(of.get, caches):
            row += [far_off(one[K3_KL], one), f"{one[K3_KL] / of['int8'][K3_KL]:.2f}"] if one else ["-", "-"]
        rows.append(row)
    return rows


# ---- runs of the recipe ----


def metrics(file: str) -> dict[str, list[float]]:
    """What verl logged, by key, in the order of steps."""
    found: dict[str, list[float]] = {}
    for row in lines(file):
        for key, value in row["data"].items():
            found.setdefault(key, []).append(value)
    return found


def quickstart(*files: str) -> Rows:
    """The quickstart's runs, by seed; their first step counts in no time."""
    header = ["seed", "held-out accuracy, first -> last", "points", "k3 KL, mean (largest)", "ESS, least", "s/step"]
    rows = [[*header, "refit ms"]]
    for file in files:
        found = metrics(file)
        score, kl = (found[key] for key in ("val-core/toy_addition/acc/mean@1", "rollout_corr/k3_kl"))
        points = f"{100 * (score[-1] - score[0]):+.0f}"
        far = f"{statistics.fmean(kl):.1e} ({max(kl):.1e})"
        size = f"{min(found['rollout_corr/rollout_is_eff_sample_size']):.4f}"
        seconds = f"{statistics.median(found['timing_s/step'][1:]):.1f}"
        refits = f"{1e3 * statistics.median(found['flashrl/refit_seconds'][1:]):.0f}"
        seed, scores = re.search(r"\d+", file)[0], f"{score[0]:.3f} -> {score[-1]:.3f}"
        rows.append([seed, scores, points, far, size, seconds, refits])
    return rows


def recipe(*folders: str) -> Rows:
    """Ten steps of the recipe: mismatch."""
    header = ["run", "k3 KL, steps 1 to 4", "last", "perplexity, first -> last", "correlation, least", "ESS, least"]
    rows = [[*header, "receipts", "score, first -> last"]]
    for folder in folders:
        found = metrics(f"{folder}/metrics.jsonl")
        kl, perplexity, score = (
            found[key] for key in ("rollout_corr/k3_kl", "rollout_corr/rollout_ppl", "critic/score/mean")
        )
        least = (
            f"{min(found[key]):.4f}"
            for key in ("training/rollout_actor_probs_pearson_corr", "rollout_corr/rollout_is_eff_sample_size")
        )
        far = f"{statistics.fmean(kl[:4]):.1e}", f"{kl[-1]:.1e}", f"{perplexity[0]:.0f} -> {perplexity[-1]:.1f}"
        receipts = f"{sum(found['flashrl/receipts_verified']):.0f}"
        rows.append([folder.rpartition("/")[2], *far, *least, receipts, f"{score[0]:.2f} -> {score[-1]:.2f}"])
    return rows


# ---- the README's ----


def readme() -> Rows:
    """At most five rows: a pretrained model's mismatch, rollouts of 32B, a whole step."""
    rows = [["one H200", "before", "after", ""]]
    far = load("mismatch/h200-qwen2.5-coder-1.5b.json")
    k3_kl = {one["variant"]: one["own"][K3_KL] for one in far["results"]}
    rows.append(
        [
            f"{far['model']}, mismatch of rollout and trainer, k3 KL: verl's FP8, INT8",
            *(f"{k3_kl[name]:.1e}" for name in (FP8_VERL, "int8")),
            f"[{k3_kl[FP8_VERL] / k3_kl['int8']:.1f} x closer](docs/results/mismatch.md)",
        ]
    )
    tail, rotated = "rollout/qwen2.5-32b-long-tail", "rollout/h200-rotation-long-tail"
    words = "Qwen2.5-32B, a rollout of long-tailed lengths, tokens/s: BF16, INT8 weights"
    memory = "Qwen2.5-32B, a rollout of one length in an A100-80GB's memory, tokens/s: BF16, INT8 weights*"
    for file, variant, said in (
        (rotated, "int8", words),
        (tail, "int8+int8kv", f"{words}* and KV cache"),
        ("throughput/qwen2.5-32b-71gib-two-arms", "int8", memory),
    ):
        of = {one.variant: one for one in rollouts(file) if one.workload in ((384, 256, 1024), (256, 256, 384))}
        speeds = (f"{statistics.median(of[name].tokens_per_second):.0f}" for name in ("bf16", variant))
        speed_up = speed_ups(of[variant], of.values())[0]
        rows.append([said, *speeds, f"[{speed_up} x](docs/results/throughput.md)"])
    header, *steps = steps_run("step/qwen3-1.7b-4xh200.json")
    seconds = {row[0]: row[header.index("step")] for row in steps}
    words = "Qwen3-1.7B, a whole DAPO step, s: verl in BF16, this recipe with INT8 weights* and KV cache, asynchronous"
    ratio = float(seconds["stock"]) / float(seconds["int8+kv+async"])
    rows.append([words, seconds["stock"], seconds["int8+kv+async"], f"[{ratio:.2f} x](docs/results/step.md)"])
    return rows


TABLES: dict[str, Callable[..., Rows]] = {
    function.__name__: function
    for function in (
        throughput, engines_of_four, refit, steps_run,
        mismatch, mismatch_kv_cache, quickstart, recipe, readme,
    )
}  # fmt: skip


def markdown(rows: Rows) -> str:
    """A Markdown table."""
    return "".join(f"| {' | '.join(row)} |\n" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:]))


def rewritten(text: str) -> str:
    """A page with its tables made anew.

    Raises:
        ConfigError: there is no such table.
    """

    def replaced(found: re.Match) -> str:
        name, *arguments = found[2].split()
        if name not in TABLES:
            raise ConfigError(f"there is no table {name!r}: one of {', '.join(TABLES)}")
        return found[1] + markdown(TABLES[name](*arguments)) + found[3]

    return PLACE.sub(replaced, text)


def tables(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 where a page would change.")] = False,
) -> None:
    """Write every table of docs/results and the README from benchmarks/results."""
    old = []
    for page in PAGES:
        text = page.read_text()
        if (new := rewritten(text)) != text:
            old.append(str(page.relative_to(ROOT)))
            if not check:
                write_whole(page, new.encode())
    print(f"{'not up to date' if check else 'written'}: {', '.join(old) or 'none'}")
    raise typer.Exit(int(check and bool(old)))


if __name__ == "__main__":
    run(tables)
