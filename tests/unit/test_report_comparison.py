# SPDX-License-Identifier: Apache-2.0
"""A comparison says what the runs' files say: figures worked out by hand."""

import json
import re

import pytest
from report_runs import HELD_OUT, KL, cells, make_run, metrics, two_runs

from flashrl_verl.report import arms, comparison, panels


@pytest.fixture
def two(tmp_path):
    return two_runs(tmp_path)


def test_the_table_is_what_the_files_say_by_hand(two):
    result = comparison.compare(two)
    first, second = cells(result, 0), cells(result, 1)
    assert first == {
        "run": "INT8, TIS C=2",
        "precision": "int8, 8 quantized layers",
        "correction": "TIS, cap C = 2.0, per token",
        "steps": "2",
        "held-out accuracy, first -> last": "0.250 -> 0.750",
        "best (step)": "0.750 (2)",
        "k3 KL, last": "2.00e-04",
        "ESS, last": "0.9800",
        "truncated, last": "0.002",
        "s/step, mean": "5.00",  # (4 + 6) / 2
        "updates/hour": "720.0",  # 3600 / 5
        "generation share": "60.0%",
        "refit s, mean": "0.15",
    }
    assert second["run"] == "dapo-bf16" and second["precision"] == "not quantized, 0 quantized layers"
    assert (second["steps"], second["updates/hour"], second["k3 KL, last"]) == ("3", "1800.0", "3.00e-04")
    assert second["ESS, last"] == second["truncated, last"] == "not logged"


def test_time_is_the_sum_of_step_times_and_a_resumed_step_counts_once(tmp_path):
    lines = [*metrics(0.5, (1800.0, 3600.0)), json.dumps({"step": 2, "data": {"timing_s/step": 1800.0, HELD_OUT: 0.5}})]
    [arm] = arms.load_arms([make_run(tmp_path / "run", lines)])
    drawn = arms.curve(arm, arms.of_key(HELD_OUT), against_time=True)
    assert (drawn.x, drawn.y) == ([0.0, 1.0], [0.25, 0.5])


def test_a_step_without_a_time_is_said(tmp_path):
    lines = [line for line in metrics(0.5, (4.0, 6.0, 8.0)) if '"step": 2' not in line]
    result = comparison.compare([make_run(tmp_path / "run", lines)])
    assert "run: 1 of 3 steps have no time in its file; training time lacks them." in result.notes
    assert cells(result, 0)["s/step, mean"] == "6.00"


def test_parts_of_a_step_add_up_to_it(two):
    run = arms.load_arms(two)[0].runs[0]
    parts = panels.step_parts(run.metrics)
    assert parts == pytest.approx({"rollout": 3.0, "actor update": 1.5, "other": 0.5})


def test_smoothing_is_the_mean_of_the_last_values_and_leaves_held_out_values_alone(two):
    assert arms.trailing_mean([1.0, 2.0, 6.0, 4.0], 3) == [1.0, 1.5, 3.0, 4.0]
    plain, smooth = comparison.compare(two), comparison.compare(two, smooth=2)
    assert plain.summary == smooth.summary
    drawn = {p.panel.name: [p.svg, q.svg] for p, q in zip(plain.pictures, smooth.pictures, strict=True)}
    assert drawn["mismatch_kl"][0] != drawn["mismatch_kl"][1]
    assert drawn["toy_addition_acc_mean_1_steps"][0] == drawn["toy_addition_acc_mean_1_steps"][1]
    assert any("last 2 values" in note for note in smooth.notes)


def test_a_group_is_drawn_as_mean_and_range_where_all_of_it_has_values(tmp_path):
    runs = [make_run(tmp_path / str(s), metrics(s / 10, (s,) * (s + 1)), seed=s) for s in (2, 4)]
    [arm] = arms.load_arms(runs, group=True)
    assert arm.label == "INT8, TIS C=2" and [run.label for run in arm.runs] == [f"INT8, TIS C=2, seed {s}" for s in (2, 4)]
    drawn = arms.curve(arm, arms.of_key("critic/score/mean"), against_time=False)
    assert drawn.x == [1.0, 2.0, 3.0] and drawn.y == pytest.approx([0.3] * 3)
    assert (drawn.low, drawn.high) == ([0.2] * 3, [0.4] * 3)
    by_time = arms.curve(arm, arms.of_key("critic/score/mean"), against_time=True)
    assert by_time.x == pytest.approx([step * 3 / 3600 for step in (1, 2, 3)])
    named = arms.load_arms([*runs, make_run(tmp_path / "c", metrics(0.5, (1.0,)))], ["a", "a", "b"], group=True)
    assert [(arm.label, len(arm.runs)) for arm in named] == [("a", 2), ("b", 1)]
    assert len(comparison.compare(runs, group=True).summary.rows) == 2


def test_values_that_are_not_finite_or_not_positive_are_drawn_and_said(tmp_path):
    lines = metrics(0.5, (4.0, 6.0)) + [json.dumps({"step": 3, "data": {KL: None}}), json.dumps({"step": 4, "data": {KL: 0.0}})]
    result = comparison.compare([make_run(tmp_path / "run", lines)])
    assert any("at 1 steps the mismatch KL is not above 0" in note for note in result.notes)
    broken = comparison.compare([make_run(tmp_path / "nan", [*lines, json.dumps({"step": 5, "data": {KL: None}})])])
    assert cells(broken, 0)["k3 KL, last"] == "NOT FINITE (nan)"


def test_runs_without_times_or_without_steps_are_shown_as_far_as_they_go(two, tmp_path):
    untimed = [re.sub(r'"timing_s/\w+": [\d.]+, ', "", line) for line in metrics(0.5, (4.0, 6.0))]
    only_validation = make_run(tmp_path / "validated", metrics(0.5, ()))
    alone = comparison.compare([make_run(tmp_path / "untimed", untimed), only_validation])
    assert not {panel.kind for panel in alone.panels} & {
        panels.Kind.OVER_TIME,
        panels.Kind.AGAINST_SPEED,
        panels.Kind.STEP_BARS,
    }
    assert alone.overview and cells(alone, 0)["updates/hour"] == "not logged"
    assert cells(alone, 1)["held-out accuracy, first -> last"] == "0.250 (step 0 only)"
    beside = comparison.compare([*two, tmp_path / "untimed"]).arms[-1]
    assert arms.curve(beside, arms.of_key(HELD_OUT), against_time=True).x == []


def test_torn_lines_are_left_out_by_number(two):
    with open(two[0] / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "da')
    notes = comparison.compare(two).notes
    assert "INT8, TIS C=2: 1 of its lines are no record and were left out (line 4)." in notes
    assert "INT8, TIS C=2: 2 of 5 planned steps." in notes
