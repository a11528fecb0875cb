# SPDX-License-Identifier: Apache-2.0
"""The tables in docs/results are those of the raw data beside them."""

import json
import re
import statistics

import pytest
from result_pages import RESULTS, page, raw, tables

from benchmarks import rollout as bench
from benchmarks import rollout_report, rollout_steps
from flashrl_verl.settings import Precision
from flashrl_verl.tools.report import comparison

OUR_ATTENTION = "h200-int8-kv.json"
"""Of ``mismatch``; in the older ones ``int8_per_token_head`` was read by vLLM's Triton attention."""


def test_every_cost_of_the_correction_is_in_the_table_with_its_figures():
    from benchmarks.correction import PARTS

    expected = []
    for report in raw("correction"):
        for cost in report["costs"]:
            low, median, high = (f"{f(cost['seconds']):.2f}" for f in (min, statistics.median, max))
            where, peak = PARTS[cost["part"]].format(ranks=report["ranks"]), f"{cost['peak_bytes'] / 2**30:.2f}"
            expected.append([where, f"{cost['tokens']}", f"{cost['rows']}", f"{median} ({low}-{high})", peak])
    (table,) = tables("correction.md")
    assert sorted(table[1:]) == sorted(expected)


def mismatches(kv_heads: int, *, our_attention: bool = False) -> list[dict]:
    """Reports of the toy with so many KV heads, which are not to be compared with those of the other one."""
    models = {2: "toy", 4: "toy with 4 KV heads, for whole blocks"}
    files = sorted((RESULTS / "mismatch").glob("*.json"))
    reports = [json.loads(path.read_text()) for path in files if (path.name == OUR_ATTENTION) is our_attention]
    found = [report for report in reports if report["model"] == models[kv_heads]]
    assert found and all(report["model"] in models.values() for report in reports)
    return found


def far(result: dict) -> list[str]:
    common = result["common"]
    return [
        *(f"{part['rollout_corr/k3_kl']:.1e} ± {part['k3_kl_standard_error']:.0e}" for part in (result["own"], common)),
        f"{common['training/rollout_probs_diff_mean']:.2e}",
        f"{common['training/rollout_actor_probs_pearson_corr']:.5f}",
    ]


def test_every_mismatch_is_in_the_table_with_its_figures():
    expected = [
        [report["device"].split(" (")[0], result["precision"], result["kernels"]["linear"], *far(result)]
        for report in mismatches(kv_heads=2)
        for result in report["results"]
    ]
    assert sorted(tables("mismatch.md")[0][1:]) == sorted(expected)


@pytest.mark.parametrize("kv_heads, our_attention, table", [(4, False, 2), (2, True, 3)])
def test_every_mismatch_of_a_kv_cache_is_in_the_table_with_its_figures(kv_heads, our_attention, table):
    (report,) = mismatches(kv_heads, our_attention=our_attention)
    expected = [[r["precision"], r["kv_cache"].replace("auto", "BF16"), *far(r)] for r in report["results"]]
    shown = tables("mismatch.md")[table][1:]
    assert sorted([*row[:2], *row[3:]] for row in shown) == sorted(expected)


@pytest.mark.parametrize(
    "kv_heads, table, row",
    [(heads, table, row) for heads, table in ((2, 1), (4, 4)) for row in tables("mismatch.md")[table][1:]],
    ids=str,
)
def test_signal_to_noise_ratios_are_the_raw_datas(kv_heads, table, row):
    precision, kind = row[0].split()
    (report,) = [r for r in mismatches(kv_heads) if "H200" in r["device"]]
    result = next(r for r in report["results"] if r["precision"] == precision)
    header = tables("mismatch.md")[table][0][1:]
    assert [noise["kind"] for noise in result["noise"]] == header
    assert row[1:] == [f"{noise[kind]['median']:.1f}" for noise in result["noise"]]


def test_the_page_on_kv_caches_quotes_these_results():
    table = next(rows for rows in tables("../kv_cache.md") if "INT8 weights" in rows[0][0])
    kinds = [cell.strip("`") for cell in table[0][1:]]
    (report,) = mismatches(kv_heads=2, our_attention=True)
    own = {r["kv_cache"]: r["own"]["rollout_corr/k3_kl"] for r in report["results"] if r["precision"] == "int8"}
    assert table[1][1:] == [f"{own[kind]:.1e}" for kind in kinds]
    said = page("../kv_cache.md")
    assert f"added {own['fp8'] / own['auto']:.0f} times the mismatch" in said
    shown = set()
    for name in ("qwen2.5-32b-kv", "qwen2.5-32b-int8-kv"):
        config, measured = bench.measured(RESULTS / "rollout" / f"{name}.jsonl")
        for step in rollout_steps.steps(config, measured):
            if step.arm.precision is Precision.INT8:
                column = 1 + kinds.index(step.arm.kv_cache.value)
                assert table[2][column] == str(measured.of(step.arm)[0].memory["kv_tokens"])
                assert table[3][column].split(",")[0] == f"{step.whole:.2f}"
                shown.add(step.arm.kv_cache.value)
    assert shown == {"auto", "int8_per_token_head"}
    kept = bench.load(RESULTS / "rollout" / "qwen2.5-32b-kv.jsonl")
    (timing,) = next(result.answer.timings for result in kept.results if result.arm == "int8 + fp8 KV")
    step = 1e3 * statistics.median(bench.decode_seconds(timing)) / (timing.work[2] - 1)
    assert f"a step of {step:.2f} ms with `fp8`" in said


def test_the_quickstarts_are_in_the_table_with_their_figures():
    runs = sorted(path for path in (RESULTS / "quickstart").iterdir() if path.is_dir())
    summary = comparison.compare(runs).summary
    shown = [
        [cell.replace("\\", "") for cell in row] for row in tables("quickstart.md")[0]
    ]  # without Markdown's escapes
    assert shown == [summary.header, *summary.rows]


def test_the_recipes_runs_are_in_the_tables_with_their_figures():
    runs = sorted(path for path in (RESULTS / "recipe").iterdir() if path.is_dir())
    compared = comparison.compare(runs)
    mismatch, costs = tables("recipe.md")
    assert sorted(mismatch[1:]) == sorted(
        [run.label.replace("_", "\\_"), *_mismatch(run.metrics)] for run in compared.runs
    )
    assert costs[0] == compared.costs.header
    assert sorted(costs[1:]) == sorted([row[0].replace("_", "\\_"), *row[1:]] for row in compared.costs.rows)


def _mismatch(metrics) -> list[str]:
    def values(key: str) -> list[float]:
        steps, found = metrics.series(key)
        assert list(steps) == list(range(1, 11)), key
        return found

    kl, perplexity, score = map(values, ("rollout_corr/k3_kl", "rollout_corr/rollout_ppl", "critic/score/mean"))
    return [
        f"{statistics.mean(kl[:4]):.1e}",
        f"{kl[-1]:.1e}",
        f"{perplexity[0]:.0f} -> {perplexity[-1]:.1f}",
        f"{min(values('training/rollout_actor_probs_pearson_corr')):.4f}",
        f"{min(values('rollout_corr/rollout_is_eff_sample_size')):.4f}",
        f"{sum(values('flashrl/receipts_verified')):.0f}",
        f"{score[0]:.2f} -> {score[-1]:.2f}",
    ]


def test_how_far_the_recipes_runs_are_in_words():
    runs = sorted(path for path in (RESULTS / "recipe").iterdir() if path.is_dir())
    far = {
        run.label: statistics.mean(run.metrics.series("rollout_corr/k3_kl")[1][:4])
        for run in comparison.compare(runs).runs
    }
    words = re.search(
        r"INT8 is (\d+) times .* BF16, INT8 with an FP8 KV cache (\d+) times, FP8 (\d+)", page("recipe.md"), re.S
    )
    for said, name in zip(words.groups(), ("int8", "int8-kv-fp8", "fp8"), strict=True):
        assert float(said) == pytest.approx(far[name] / far["bf16"], rel=0.05)


def test_every_rollout_is_in_the_tables_with_its_figures():
    memory, speed, steps, headers = [], [], [], set()
    for file in sorted((RESULTS / "rollout").glob("*.jsonl")):
        config, report = bench.measured(file)
        memory += rollout_report.memory_rows(config, report)
        speed += rollout_report.speed_rows(config, report)
        if rows := rollout_steps.rows(config, report):
            headers.add(tuple(rollout_steps.columns(config, report)))
            steps += rows
    shown_memory, shown_speed, shown_steps = (  # without the KV cache that was removed
        [row for row in rows if "int8 + fp8 KV" not in row] for rows in tables("rollout.md")[:3]
    )
    assert shown_memory[0] == [*rollout_report.MEMORY_COLUMNS]
    assert sorted(shown_memory[1:]) == sorted(
        map(list, set(map(tuple, memory)))
    )  # two measurements have the same of an arm
    assert shown_speed[0] == [*rollout_report.SPEED_COLUMNS]
    assert sorted(shown_speed[1:]) == sorted(speed)
    assert {tuple(shown_steps[0])} == headers and sorted(shown_steps[1:]) == sorted(steps)


def test_how_fast_a_decode_step_reads_is_in_words_what_the_profile_has():
    answers = {}
    for name in ("qwen2.5-32b-int8-kv", "qwen2.5-32b-kv"):  # of BF16, which both have, the latter is quoted
        config, report = bench.measured(RESULTS / "rollout" / f"{name}.jsonl")
        answers |= {result.arm: result.answer for result in report.results}
    (work,), shape = config.works, report.settings["config.json"]
    profiles = {arm: answer.timings[0].profile for arm, answer in answers.items()}
    heads, size = shape["num_key_value_heads"], shape["hidden_size"] // shape["num_attention_heads"]
    tokens = work.sequences * profiles["bf16"]["context"]
    cached = 2 * shape["num_hidden_layers"] * heads * size * tokens
    projections = answers["int8"].layers["quantized_bytes_as_bf16"] // 2
    head = 2 * shape["vocab_size"] * shape["hidden_size"]

    def longest(arm: str, kind: str) -> float:
        return max(time for of, _, time, _ in profiles[arm]["kernels"] if of == kind)

    reads = {
        r"FlashAttention 3 reads (\d+) GB of keys and values in ([\d.]+) ms: ([\d.]+) TB/s": (
            2 * cached,
            longest("bf16", "attention"),
        ),
        r"reads half, (\d+) GB, in ([\d.]+) ms: ([\d.]+) TB/s": (cached, longest("int8 + fp8 KV", "attention")),
        r"INT8\*\* with its scales, (\d+) GB, in ([\d.]+) ms: ([\d.]+) TB/s": (
            cached * (size + 4) // size,
            longest("int8 + int8_per_token_head KV", "attention"),
        ),
        r"products\*\* read (\d+) GB in INT8 .*? in ([\d.]+) ms: ([\d.]+) TB/s": (
            projections + head,
            profiles["int8 + fp8 KV"]["milliseconds"]["linear layers"],
        ),
        r"in BF16 (\d+) GB in ([\d.]+) ms, ([\d.]+) TB/s": (
            2 * projections + head,
            profiles["bf16"]["milliseconds"]["linear layers"],
        ),
    }
    words = " ".join(page("rollout.md").split())
    for pattern, (read, milliseconds) in reads.items():
        shown = f"{read / 1e9:.0f}", f"{milliseconds:.1f}", f"{read / milliseconds / 1e9:.1f}"
        assert re.search(pattern, words).groups() == shown
    quantizing = [profiles["int8 + fp8 KV"][of]["activation quantization"] for of in ("milliseconds", "launches")]
    shown = re.search(r"activations\*\* is ([\d.]+) ms, (\d+) launches", words).groups()
    assert shown == (f"{quantizing[0]:.1f}", f"{quantizing[1]:.0f}")
