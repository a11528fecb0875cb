# SPDX-License-Identifier: Apache-2.0
"""What the README says of results is what the raw data and their pages have."""

import json
import re
import subprocess
import sys

from learning_figures import over_models, pairs
from result_pages import RESULTS, drawn, page, tables

from flashrl_verl.tools.engines.shapes import load_config
from flashrl_verl.tools.plan import gpus
from flashrl_verl.tools.plan.memory import Engine
from flashrl_verl.tools.plan.planner import make_plan
from flashrl_verl.tools.plan.schedule import Work
from flashrl_verl.tools.plan.shape import shape_of

README = (RESULTS.parents[1] / "README.md").read_text()
SUMMARY = RESULTS.parent / "summary.png"


def test_the_readmes_table_and_picture_are_those_of_the_raw_data(tmp_path):
    """Their script reads raw data alone; the pages' own tests compare what they say with the same."""
    script = RESULTS.parents[1] / "scripts" / "figure_readme.py"
    picture = tmp_path / "summary.png"
    done = subprocess.run([sys.executable, script, picture], capture_output=True, text=True, check=True)
    assert f"## Results\n\n{done.stdout}\n" in README and done.stdout.count("\n") == 9
    assert drawn(SUMMARY) == drawn(picture), "docs/summary.png is of other data: python scripts/figure_readme.py"


def test_the_readmes_words_about_speed_are_those_of_the_raw_data():
    words = " ".join(README.split())
    with_all, with_little = (
        [
            float(r[6])
            for r in tables("throughput.md")[0][1:]
            if "32b" in r[0] and r[2] in memories and r[4] == "int8" and r[6] != "-"
        ]
        for memories in (["126"], ["73", "71"])
    )
    said = (
        "in INT8 is {:.1f} to {:.1f} times as fast as in BF16, with little memory and one GPU an engine {:.1f} to "
        "{:.1f} times"
    )
    assert said.format(min(with_all), max(with_all), min(with_little), max(with_little)) in words
    smaller = [
        float(r[6]) for r in tables("throughput.md")[0][1:] if "32b" not in r[0] and (r[2], r[4]) == ("126", "int8")
    ]
    assert f"28 prompts of 8192 tokens gain {min(with_little):.2f} x with 71 GiB" in words
    assert f"14B and 7B gain {min(smaller):.1f} to {max(smaller):.1f} times with all of the memory" in words
    for place in (
        ("73", "128 x (256 -> 512)"),
        ("73", "64 x (256 -> 1024)"),
        ("71", "256 x (256 -> 384)"),
        ("71", "28 x (8192 -> 192)"),
    ):
        beside_bf16 = [
            row
            for row in tables("throughput.md")[0][1:]
            if "32b" in row[0] and (row[2], row[3]) == place and row[6] != "-"
        ]
        fit = {row[4]: int(row[8]) for row in beside_bf16}
        assert 4.7 < fit["int8"] / fit["bf16"] < 5.7
    assert "room for about five times as many sequences" in words


def test_the_readmes_words_about_accuracy_and_mismatch_are_those_of_the_pages():
    words = " ".join(README.split())
    rows = {row[0]: row[3:5] for row in tables("learning.md")[0][1:]}
    large, less = (f"outlier channels, {factor} times as large" for factor in ("32", "16"))
    gaps = zip(*(rows[name] for name in (large, f"{large}, again", f"{large}, third")), strict=True)
    of_bf16, without = ([cell.split()[0] for cell in cells] for cells in gaps)
    mean, spread, low, high = over_models(pairs("bf16:tis"))
    said = "minus BF16 with TIS {}, {} and {} in three models with outliers 32 times as large".format(*of_bf16)
    over = (
        f"({mean:+.3f} ± {spread:.3f} over models, 95 % interval [{low:+.3f}, {high:+.3f}]), {rows[less][0]} with 16;"
    )
    assert f"{said} {over}" in words
    said = "minus INT8 without TIS {} (one of three stayed behind), {}, {}".format(*without)
    assert f"{said}, and {rows[less][1].split()[0]} with 16." in words
    lost = [float(row[4].split()[0]) for row in tables("learning_differences.md")[1][1:]]
    assert f"In INT8 the same weights lose up to {-min(lost):.2f}, means (" in words
    ends = [float(row[4].split()[-1]) for row in tables("quickstart.md")[0][1:]]
    said = f"[Quickstart](docs/results/quickstart.md), one run an arm: {min(ends):.2f} to {max(ends):.2f}."
    assert said in words and len(ends) == 4
    k3 = {row[0]: row[1].replace("e-0", "e-") for row in tables("recipe.md")[0][1:]}
    assert f"{k3['int8']} with INT8 and {k3['fp8']} with FP8 in the first four" in words


def test_the_readme_says_what_the_plan_says_of_its_own_rows():
    words = " ".join(README.split())
    little = [best_layouts(0.52, 256, 256, 512), best_layouts(0.52, 128, 256, 1024)]
    least = [best_layouts(0.51, 512, 256, 384), best_layouts(0.51, 56, 8192, 192)]
    ratios = [*little, *least]
    assert f"where BF16 takes two GPUs the plan computes {min(ratios)} to {max(ratios)} x for the same works" in words
    assert (
        f"where BF16 takes two GPUs an engine, INT8 is {min(ratios):.1f} to {max(ratios):.1f} times as fast, computed"
        in words
    )
    throughput = " ".join(page("throughput.md").split())
    assert f"`flashrl plan` computes {min(ratios)} to {max(ratios)} times for the same work" in throughput
    assert (
        "{} times with 128 sequences of 512 tokens a GPU, {} with 64 of 1024, computed".format(*ratios[:2])
        in throughput
    )
    assert "with 71 GiB {:.2f} with 256 of 384 and {} with 28 long prompts (0.51;".format(*ratios[2:]) in throughput
    step = json.loads((RESULTS / "step" / "h200.json").read_text())
    assert step["advice"][0].startswith("Stay with BF16 weights: eight bits alone make the rollout 1.08x as fast")
    assert "For the step on 64 H200s `flashrl plan` advises BF16 weights" in words
    assert "INT8's make the rollout 1.08 x as fast" in words
    assert step["advice"][0].partition(". ")[0] in " ".join(page("step.md").split())


def best_layouts(share: float, sequences: int, prompt: int, response: int) -> float:
    """INT8 over BF16 on two GPUs where each takes as many GPUs an engine as are best for it."""
    engine = Engine(gpu_memory_utilization=share)
    work = Work(sequences=sequences // 2, prompt=prompt, response=response)
    made = make_plan("qwen2.5-32b", shape_of(load_config("qwen2.5-32b")), gpus.find("h200"), 2, engine, work)
    return float(re.search(r": ([\d.]+)x is what eight bits gain", made.advice[0])[1])
