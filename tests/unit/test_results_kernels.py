# SPDX-License-Identifier: Apache-2.0
"""What docs/results/rollout.md says of kernels that other tests do not read: FP8's, and activations quantized by Inductor."""

import re
import statistics

from result_pages import RESULTS, page, tables

from flashrl_verl.bench import rollout as bench
from flashrl_verl.bench.rollout_report import words

WORDS = " ".join(page("rollout.md").split())


def milliseconds() -> dict[tuple[str, int], dict[str, float]]:
    """By arm and sequences."""
    config, report = bench.measured(RESULTS / "rollout" / "qwen2.5-32b-arms.jsonl")
    found = {(str(arm), work.sequences): report.timing(arm, work).profile for arm in config.arms for work in config.works}
    return {key: profile["milliseconds"] for key, profile in found.items()}


def test_fp8s_kernels_are_in_words_what_the_profile_has():
    of = milliseconds()
    products = [f"{of[arm, n]['linear layers']:.1f}" for n in (28, 256) for arm in ("fp8", "int8")]
    said = "{} and {} ms at 28 sequences, {} and {} ms at 256".format(*products)
    quantizing = [f"{of[arm, 28]['activation quantization']:.1f}" for arm in ("fp8", "int8")]
    assert said + ", and so does quantizing for them, {} and {} ms at 28".format(*quantizing) in WORDS
    ours = of["int8 + int8_per_token_head KV", 256]["attention"]
    assert f"({of['int8', 256]['attention']:.1f} ms), where ours takes {ours:.1f} ms" in WORDS


def test_what_lies_over_the_floor_is_the_profiles():
    shown = {row[0]: float(row[1]) for row in tables("rollout.md")[3][1:]}
    config, report = bench.measured(RESULTS / "rollout" / "qwen2.5-32b-int8-kv.jsonl")
    arm = next(arm for arm in config.arms if "KV" in str(arm))
    parts = report.timing(arm, config.works[0]).profile["milliseconds"]
    assert f"{shown['attention']} of 7.0 ms" in WORDS
    reads = re.search(r"in INT8 .*? in ([\d.]+) ms: 3.5 TB/s, where 4.2 TB/s would be ([\d.]+) ms", WORDS)
    assert round(float(reads[1]) - float(reads[2]), 1) == shown["products"]
    assert f"{parts['activation quantization']:.1f}" == f"{shown['quantizing activations']}"


def test_the_experiment_with_inductor_is_in_the_table_with_its_figures():
    expected = []
    for name, called in (("custom-op", "vLLM"), ("inductor", "Inductor")):
        config, report = bench.measured(RESULTS / "rollout" / "inductor" / f"{name}.jsonl")
        for work in config.works:
            timing = report.timing(config.arms[0], work)
            speeds = bench.tokens_per_second(timing)
            step = 1e3 * statistics.median(bench.decode_seconds(timing)) / (work.response - 1)
            kernels = [kernel for kernel in timing.profile["kernels"] if "int8_quant" in kernel[1] or "abs_amax" in kernel[1]]
            speed = f"{statistics.median(speeds):.0f} ({min(speeds):.0f}-{max(speeds):.0f})"
            quantizing = f"{sum(kernel[2] for kernel in kernels):.2f}", f"{sum(kernel[3] for kernel in kernels):.0f}"
            expected.append([words(work), called, speed, f"{step:.2f}", *quantizing])
    assert sorted(tables("rollout.md")[4][1:]) == sorted(expected)
