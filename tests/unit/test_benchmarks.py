# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' arithmetic, against independent references; the published tables, against the raw data."""

import math
import random
import statistics

import numpy as np
import pytest

from benchmarks import gsm8k, mismatch, rollout, tables


def test_every_table_of_the_results_and_the_readme_is_that_of_the_raw_data():
    """``python -m benchmarks.tables`` writes them."""
    texts = {page.name: page.read_text() for page in tables.PAGES}
    changed = [name for name, text in texts.items() if tables.rewritten(text) != text]
    assert not changed, f"not up to date: {changed}"
    assert sum(len(tables.PLACE.findall(text)) for text in texts.values()) > 10


# ---- gsm8k ----


def of_runs(scores: dict[str, list[float | None]]) -> dict:
    """A ``gsm8k.json`` of runs with these scores in BF16, by variant and seed; validations give the same. None: a run
    that was not evaluated and did not validate thrice."""
    runs = []
    for variant, values in scores.items():
        for seed, score in enumerate(values):
            trained = 3 * [score] if score is not None else [0.5, 0.5]
            curve = {"step": [0, 10, 20, 30][: 1 + len(trained)], "value": [0.2, *trained]}
            series = {"score": curve} | {n: {"step": [1, 2], "value": [1e-3, 3e-3]} for n in gsm8k.SERIES}
            runs.append(
                {
                    "variant": variant,
                    "seed": seed,
                    "step": 30,
                    "bf16_step": score and 30,
                    "bf16": score,
                    "series": series,
                }
            )
    return {"settings": {}, "environment": {}, "runs": runs}


def test_scores_are_compared_with_those_of_the_same_seed_and_call():
    draw = random.Random(0)
    gaps, calls = [[0.01, 0.02], [0.06]], []
    for of_call in gaps:  # a call on a machine of its own, whose common part goes
        base = [draw.random() for _ in of_call]
        calls.append(of_runs({"bf16+tis": base, "int8+tis": [b + g for b, g in zip(base, of_call, strict=True)]}))
    calls[0]["runs"] += of_runs({"bf16+tis": [None, None, 0.9]})["runs"][2:]  # whose partner has not come to its end
    paired = gsm8k.pairs(calls, "int8+tis", "bf16+tis")
    assert [a - b for a, b in gsm8k.scores(paired)] == pytest.approx(sum(gaps, []))
    half = 4.303 * statistics.stdev(sum(gaps, [])) / math.sqrt(3)
    row = dict(zip(gsm8k.HEADER, gsm8k.table(calls)[1], strict=True))
    words = f"{statistics.mean(sum(gaps, [])):+.3f} ± {half:.3f} (3)"
    assert (row["minus the first variant (pairs)"], row["score, minus the first variant"]) == (words, words)
    assert (row["seeds"], row["steps"], row["first"]) == ("3", "30", "0.200 ± 0.000")


def test_runs_that_were_not_both_evaluated_are_compared_by_validations_after_the_same_steps():
    calls = [of_runs({"bf16+tis": [0.3], "int8+tis": [0.4]})]
    bf16, int8 = calls[0]["runs"]
    bf16["series"]["score"] = {"step": [0, 6, 12, 18, 24], "value": [0.0, 0.1, 0.2, 0.3, 0.4]}
    int8["series"]["score"] = {"step": [0, 6, 12, 24, 30], "value": [0.0, 0.2, 0.4, 0.8, 0.1]}
    (score,) = gsm8k.scores(paired := gsm8k.pairs(calls, "int8+tis", "bf16+tis"))
    assert score == pytest.approx(((0.2 + 0.4 + 0.8 + 0.4) / 4, (0.1 + 0.2 + 0.4 + 0.3) / 4))
    assert gsm8k.evaluated(paired) == [(int8, bf16)] == paired
    bf16 |= {"bf16_step": 24}
    assert gsm8k.evaluated(paired) == []
    bf16 |= {"bf16_step": None, "bf16": None}
    assert gsm8k.evaluated(paired) == []
    (score,) = gsm8k.scores(paired)
    assert score == pytest.approx(((0.2 + 0.4 + 0.8) / 3, (0.1 + 0.2 + 0.4) / 3))
    int8["bf16_step"] = 24  # which leaves out what came later, and the first is not trained
    int8["series"]["score"] = {"step": [0, 12, 24, 30], "value": [0.0, 0.4, 0.8, 0.9]}
    bf16["series"]["score"] = {"step": [0, 12, 24, 30], "value": [0.0, 0.2, 0.4, 0.1]}
    assert gsm8k.scores(paired) == []


def test_all_runs_of_a_seed_are_evaluated_after_the_same_step_and_one_that_failed_has_no_say(tmp_path):
    def run(variant: str, seed: int, saved: int, problem: str = "") -> gsm8k.Run:
        folder = tmp_path / f"{variant}{seed}"
        for step in range(8, saved + 1, 8):
            (folder / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
            (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(step))
        return gsm8k.Run(variant, seed, folder, 90, problem=problem)

    whole, longer, failed, late = run("a", 1, 24), run("b", 1, 32), run("c", 1, 16, "killed"), run("d", 1, 32, "killed")
    alone, other, none = run("a", 2, 16, "killed"), run("a", 3, 8), run("b", 3, 0, "not started")
    steps = gsm8k.weights_to_evaluate([whole, longer, failed, late, alone, other, none])
    assert steps == {whole: 24, longer: 24, failed: 16, late: 24, alone: 16, other: 8}


# ---- mismatch ----


def test_log_probs_are_compared_as_the_definitions_say():
    draw = np.random.default_rng(1)
    trainer = [list(-draw.random(length)) for length in (5, 1, 9, 3)]
    engine = [[value + 0.05 * draw.normal() for value in row] for row in trainer]
    found = mismatch.compare(trainer, engine)
    ours, theirs = (np.array([value for row in rows for value in row]) for rows in (trainer, engine))
    d = ours - theirs
    assert found[mismatch.K3_KL] == pytest.approx(np.mean(np.exp(d) - d - 1), rel=1e-6)
    correlation = np.corrcoef(np.exp(ours), np.exp(theirs))[0, 1]
    assert found[mismatch.CORRELATION] == pytest.approx(correlation, rel=1e-5)
    assert (found["tokens"], found["responses"]) == (18, 4)


def test_the_standard_error_of_the_kl_is_what_drawing_responses_anew_gives():
    """The bootstrap over responses, whose tokens are correlated, as the independent reference."""
    draw = np.random.default_rng(2)
    shifts = 0.2 * draw.normal(size=400)  # of whole responses
    engine = [list(-draw.random(int(length))) for length in draw.integers(1, 12, 400)]
    trainer = [[value + shift for value in row] for row, shift in zip(engine, shifts, strict=True)]
    error = mismatch.compare(trainer, engine)["k3_kl_standard_error"]
    lengths = np.array([len(row) for row in engine])
    sums = lengths * (np.exp(shifts) - shifts - 1)
    picks = draw.integers(0, 400, (2000, 400))
    assert error == pytest.approx(np.std(sums[picks].sum(1) / lengths[picks].sum(1)), rel=0.1)


# ---- rollout ----


def test_speeds_are_over_the_first_variant_of_the_same_workload():
    def result(variant: str, seconds: list[float]) -> dict:
        timings = [{"workload": [10, 100, 50], "seconds": seconds, "prefill_seconds": [1.0, 1.0]}]
        return {"variant": variant, "memory": {"kv_tokens": 1000}, "timings": timings}

    head = {"settings": {"model": "m", "gpu_memory_utilization": 0.5}, "environment": {"memory_bytes": 4 << 30}}
    header, row = rollout.table([[head, result("bf16", [4.0, 5.0]), result("int8", [2.0, 2.5])]])
    assert header[3:] == ["bf16, tokens/s", "int8"] and row == ["m", "2", "10 x (100 -> 50)", "112 (6)", "2.00 (6)"]
