# SPDX-License-Identifier: Apache-2.0
"""What the README says of results is what the raw data and their pages have."""

import re
import subprocess
import sys

from result_pages import RESULTS, page, tables

README = (RESULTS.parents[1] / "README.md").read_text()
SUMMARY = RESULTS.parent / "summary.png"


def test_the_readmes_table_and_picture_are_those_of_the_raw_data(tmp_path):
    """Their script reads raw data alone; the pages' own tests compare what they say with the same."""
    script = RESULTS.parents[1] / "scripts" / "figure_readme.py"
    drawn = tmp_path / "summary.png"
    done = subprocess.run([sys.executable, script, drawn], capture_output=True, text=True, check=True)
    assert f"## Results\n\n{done.stdout}\n" in README and done.stdout.count("\n") == 8
    ours, theirs = (re.search(rb"tEXtSource\0([0-9a-f]{64})", path.read_bytes()) for path in (SUMMARY, drawn))
    assert ours.group(1) == theirs.group(1), "docs/summary.png is of other data: python scripts/figure_readme.py"


def test_the_readmes_words_about_speed_are_those_of_the_raw_data():
    words = " ".join(README.split())
    with_all, with_little = (
        [float(r[6]) for r in tables("throughput.md")[0][1:] if "32b" in r[0] and (r[2], r[4]) == (memory, "int8")]
        for memory in ("126", "73")
    )
    said = "in INT8 is {:.1f} to {:.1f} times as fast as in BF16, with little memory {:.1f} to {:.1f} times"
    assert said.format(min(with_all), max(with_all), min(with_little), max(with_little)) in words
    smaller = [float(r[6]) for r in tables("throughput.md")[0][1:] if "32b" not in r[0] and (r[2], r[4]) == ("126", "int8")]
    assert f"14B and 7B gain {min(smaller):.1f} to {max(smaller):.1f} times with all of the memory" in words
    fit = {row[4]: int(row[8]) for row in tables("throughput.md")[0][1:] if (row[2], row[3]) == ("73", "64 x (256 -> 1024)")}
    assert 4.7 < fit["int8"] / fit["bf16"] < 5 and "nearly five times as many sequences" in words
    refits = {
        (row[0], row[2]): f"{float(row[3].split()[0]):.0f} ms" for row in tables("refit.md")[0][1:] if row[1] == "bfloat16"
    }
    ours = refits["qwen2.5-14b", "flashrl int8"], refits["qwen2.5-32b", "flashrl int8"]
    theirs = refits["qwen2.5-14b", "vllm fp8_per_tensor layerwise"]
    assert "take an engine {} at 14B and {} at 32B, vLLM's layerwise FP8 reload {} at 14B".format(*ours, theirs) in words


def test_the_readmes_words_about_accuracy_and_mismatch_are_those_of_the_pages():
    words = " ".join(README.split())
    summary = {row[0]: row[3] for row in tables("learning.md")[0][1:]}
    outliers = [summary[f"outlier channels, {factor} times as large"] for factor in (32, 16)]
    assert "minus BF16 with TIS {} and {}, with outliers 32 and 16 times as large".format(*outliers) in words
    (bf16,) = [row[2][:5] for row in tables("learning.md")[1][1:] if row[0] == "bf16:tis"]
    assert f"for {bf16} in BF16" in words and "ended at 0.625, 0.972 and 0.951" in page("learning.md")
    assert "without TIS 0.625, 0.972 and 0.951 for" in words
    ends = [float(row[4].split()[-1]) for row in tables("quickstart.md")[0][1:]]
    assert f"ended at {min(ends):.2f} to {max(ends):.2f} in four runs of one seed" in words and len(ends) == 4
    k3 = {row[0]: row[1].replace("e-0", "e-") for row in tables("recipe.md")[0][1:]}
    assert f"{k3['int8']} with INT8 and {k3['fp8']} with FP8 in the first four" in words
