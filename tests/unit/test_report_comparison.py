# SPDX-License-Identifier: Apache-2.0
"""A comparison says what the runs' files say: figures worked out by hand."""

import json
import re

import pytest
from report_runs import CUT, DROPPED, HELD_OUT, KL, REJECTED, cells, make_run, metrics, two_runs

from flashrl_verl.tools.report import arms, comparison, panels, step_time


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
    parts = step_time.step_parts(run.metrics)
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
    assert arm.label == "INT8, TIS C=2" and [run.label for run in arm.runs] == [
        f"INT8, TIS C=2, seed {s}" for s in (2, 4)
    ]
    drawn = arms.curve(arm, arms.of_key("critic/score/mean"), against_time=False)
    assert drawn.x == [1.0, 2.0, 3.0] and drawn.y == pytest.approx([0.3] * 3)
    assert (drawn.low, drawn.high) == ([0.2] * 3, [0.4] * 3)
    by_time = arms.curve(arm, arms.of_key("critic/score/mean"), against_time=True)
    assert by_time.x == pytest.approx([step * 3 / 3600 for step in (1, 2, 3)])
    named = arms.load_arms([*runs, make_run(tmp_path / "c", metrics(0.5, (1.0,)))], ["a", "a", "b"], group=True)
    assert [(arm.label, len(arm.runs)) for arm in named] == [("a", 2), ("b", 1)]
    assert len(comparison.compare(runs, group=True).summary.rows) == 2


def test_a_mean_of_fewer_runs_than_the_group_has_is_said_where_it_is_shown(tmp_path):
    lines = metrics(0.5, (2.0, 4.0))
    blind = [line for line in lines if HELD_OUT not in line] + [json.dumps({"step": 2, "data": {KL: 1e-4}})]
    untimed = [re.sub(r'"timing_s/step": [\d.]+, ', "", line) for line in lines]
    contents = {"whole": lines, "blind": blind, "untimed": untimed}
    runs = [make_run(tmp_path / name, content, seed=0) for name, content in contents.items()]
    result = comparison.compare(runs, group=True)
    arm = result.arms[0]
    counts = {key: arms.curve(arm, arms.of_key(key), against_time=False).runs for key in (KL, HELD_OUT, "absent")}
    assert counts == {KL: 3, HELD_OUT: 2, "absent": 0}
    captions = {picture.panel.name: picture.caption for picture in result.pictures}
    said = "INT8, TIS C=2: mean of {} of its 3 runs (the others logged no such values"
    assert captions["toy_addition_acc_mean_1_steps"].endswith(said.format(2) + ").")
    assert captions["toy_addition_acc_mean_1_time"].endswith(said.format(1) + ", or no step time).")
    assert captions["updates_per_hour"].endswith(said.format(2) + ").")
    silent = set(captions) - {name for name, text in captions.items() if "of its 3 runs" in text}
    assert silent >= {"mismatch_kl", "training_score", "toy_addition_acc_mean_1_speed", "step_time"}
    title = "Held-out accuracy by step; Updates per hour by step."
    assert f"{said.format(2)}) in: {title}" in result.notes
    assert not any("of its" in note for note in comparison.compare(runs).notes)


def test_runs_of_a_group_without_a_common_step_are_not_drawn_and_that_is_said(tmp_path):
    lines = [json.dumps({"step": step, "data": {KL: 1e-4, HELD_OUT: 0.5}}) for step in (1, 2)]
    runs = [make_run(tmp_path / name, [line], seed=0) for name, line in zip("ab", lines, strict=True)]
    result = comparison.compare(runs, ["x", "x"], group=True)
    assert "x: not drawn (its 2 runs with values have no step in common) in: " in "\n".join(result.notes)
    [alt] = [picture.alt for picture in result.pictures if picture.panel.name == "mismatch_kl"]
    assert alt.endswith("x not drawn.")


def test_of_icepop_the_dropped_share_is_shown_and_not_its_part_above_the_upper_bound(two, tmp_path):
    lines = metrics(0.5, (1.0, 1.0), **{DROPPED: 0.5, CUT: 0.15})
    correction = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
    result = comparison.compare([*two, make_run(tmp_path / "icepop", lines, correction=correction)])
    assert [cells(result, i)["truncated, last"] for i in range(3)] == ["0.002", "not logged", "0.5 dropped"]
    alts = {picture.panel.name: picture.alt for picture in result.pictures}
    assert "INT8, TIS C=2 from 0.001 to 0.002" in alts["truncated_share"]
    assert alts["truncated_share"].endswith("INT8, IcePop 0.5-5.0 not logged.")
    assert "INT8, TIS C=2 not logged" in alts["dropped_share"] and alts["dropped_share"].endswith("from 0.5 to 0.5.")
    assert "Tokens dropped for their importance weight (IcePop)" in comparison.compare(two).absent


def test_what_only_some_runs_log_has_a_column_and_a_picture_where_any_does(two, tmp_path):
    plain = comparison.compare(two)
    more = {REJECTED: 0.25, "flashrl/tokens_per_second_gen": 12345.6}
    result = comparison.compare([*two, make_run(tmp_path / "more", metrics(0.5, (1.0, 1.0), **more))])
    shown = {"rejected, last": "0.25", "rollout tokens/s, mean": "12346"}
    assert {name: cells(result, 2)[name] for name in shown} == shown
    assert {cells(result, 0)[name] for name in shown} == {"not logged"} and not set(shown) & set(plain.summary.header)
    drawn = [panel.name for panel in result.panels]
    assert drawn[drawn.index("throughput") + 1] == "rollout_speed" and "rejected_share" in drawn
    assert {"Rollout speed", "Tokens rejected"} <= set(plain.absent)


def test_values_that_are_not_finite_or_not_positive_are_drawn_and_said(tmp_path):
    lines = metrics(0.5, (4.0, 6.0)) + [
        json.dumps({"step": 3, "data": {KL: None}}),
        json.dumps({"step": 4, "data": {KL: 0.0}}),
    ]
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
