# SPDX-License-Identifier: Apache-2.0
"""Figures of `flashrl bench learning`, by hand."""

import json
import math

import pytest
from learning_runs import KEY, config, write_metrics, write_record

from flashrl_verl.bench import learning_report
from flashrl_verl.bench.learning import arms_of
from flashrl_verl.bench.learning_report import collect, thin, to_json
from flashrl_verl.bench.learning_state import state_of
from flashrl_verl.bench.learning_statistics import estimate, paired, t_quantile

STEPS = 4
ARMS = "bf16:none,bf16:tis,int8:none,int8:tis"
FINAL = {
    "bf16:none": {0: 0.80, 1: 0.90},
    "bf16:tis": {0: 0.70, 1: 0.90},
    "int8:none": {0: 0.60, 1: 0.80},
    "int8:tis": {0: 0.75},
}
"""Final accuracy by arm and seed; the last run is not there."""


def collected(cfg):
    return collect(cfg, [state_of(run, STEPS) for run in cfg.runs()])


@pytest.fixture
def report(tmp_path):
    cfg = config(tmp_path, arms=arms_of(ARMS))
    for run in cfg.runs():
        final = FINAL[str(run.arm)].get(run.seed)
        if final is None:
            continue
        weights = {"rollout_corr/rollout_is_eff_sample_size": 0.9, "rollout_corr/rollout_is_ratio_fraction_high": 0.01}
        step = {"timing_s/step": 3.0, **(weights if run.arm.correction == "tis" else {})}
        rows = {i: {**step, "rollout_corr/k3_kl": i * 1e-3} for i in range(1, STEPS + 1)}
        rows[STEPS][KEY] = final
        write_metrics(run, {0: {KEY: 0.4}, **rows})
    return collected(cfg)


@pytest.mark.parametrize(("freedom", "t"), [(1, 12.7062), (2, 4.30265), (4, 2.77645), (9, 2.26216), (120, 1.97993)])
def test_quantiles_are_those_of_the_printed_tables(freedom, t):
    assert t_quantile(freedom) == pytest.approx(t, rel=1e-5)


def test_an_estimate_has_the_standard_error_of_its_mean_and_an_interval_by_students_t():
    found = estimate([1.0, 2.0, 6.0])
    assert found.mean == 3.0 and found.standard_error == pytest.approx(math.sqrt(7 / 3))
    assert found.interval == pytest.approx((3 - 4.30265 * math.sqrt(7 / 3), 3 + 4.30265 * math.sqrt(7 / 3)), rel=1e-5)


def test_one_seed_has_no_error_and_none_no_mean():
    one = estimate([0.5])
    assert (one.mean, one.standard_error, one.interval) == (0.5, None, None)
    assert estimate([]) is None and math.isnan(estimate([0.5, math.nan]).mean)


def test_a_difference_is_taken_seed_by_seed_where_both_have_one():
    found = paired({0: 0.5, 1: 0.9, 2: 0.1}, {1: 0.6, 0: 0.4, 7: 0.0})
    assert found.seeds == 2 and found.mean == pytest.approx(0.2) and found.standard_error == pytest.approx(0.1)
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_an_arm_is_the_mean_of_its_finished_runs(report):
    by_name = {str(result.arm): result for result in report.arms()}
    bf16, int8 = by_name["bf16:none"], by_name["int8:tis"]
    assert (bf16.finished, bf16.runs) == (2, 2) and (int8.finished, int8.runs) == (1, 2)
    assert bf16.accuracy.mean == pytest.approx(0.85) and bf16.accuracy.standard_error == pytest.approx(0.05)
    assert bf16.curve.mean == pytest.approx((0.6 + 0.65) / 2)
    assert bf16.k3_kl.mean == pytest.approx(2.5e-3) and bf16.step_seconds.mean == 3.0
    assert bf16.effective_sample_size is None and int8.effective_sample_size.mean == 0.9


def test_differences_are_of_one_choice_at_a_time(report):
    found = {(str(pair.arm), str(pair.baseline)): pair.accuracy for pair in report.differences()}
    assert set(found) == {
        ("bf16:tis", "bf16:none"),
        ("int8:none", "bf16:none"),
        ("int8:tis", "int8:none"),
        ("int8:tis", "bf16:tis"),
    }
    assert found["bf16:tis", "bf16:none"].mean == pytest.approx(-0.05)
    assert found["int8:tis", "int8:none"].mean == pytest.approx(0.15) and found["int8:tis", "int8:none"].seeds == 1


def test_a_run_that_is_not_finished_is_no_part_of_the_means(report):
    cfg = report.config
    run = next(run for run in cfg.runs() if str(run.arm) == "bf16:none" and run.seed == 0)
    write_metrics(run, {0: {KEY: 0.4}, 2: {KEY: 0.99}})
    (bf16, *_) = collected(cfg).arms()
    assert bf16.finished == 1 and bf16.accuracy.mean == 0.9


def test_a_kl_that_is_not_finite_is_told_and_not_left_out(report):
    cfg = report.config
    run = cfg.runs()[0]
    write_metrics(run, {0: {KEY: 0.4}, 1: {"rollout_corr/k3_kl": None}, 4: {"rollout_corr/k3_kl": 1e-3, KEY: 0.8}})
    found = collected(cfg)
    assert math.isnan(found.arms()[0].k3_kl.mean)
    assert to_json(found)["arms"][0]["k3_kl"]["mean"] is None


def test_tables_and_notes_have_every_arm_and_say_how_to_read_them(report):
    from rich.console import Console

    console = Console(width=180, record=True, file=open("/dev/null", "w"))
    for table in learning_report.tables(report):
        console.print(table)
    said = console.export_text()
    assert "0.850 ± 0.050" in said and "1/2" in said and "1200" in said
    assert "+0.150" in said and "-0.050 [-0.685, +0.585]" in said
    notes = learning_report.notes(report)
    assert "rollout's own engine" in notes[0] and "up to 1 more" in notes[0] and notes[1].startswith("4 differences")


def test_an_error_is_in_the_notes(tmp_path):
    cfg = config(tmp_path)
    write_record(cfg.runs()[0], *[{"error": ["ValueError: no"]}] * 2)
    assert "bf16:none seed 0 failed 2 times: ValueError: no" in learning_report.notes(collected(cfg))


def test_files_are_written_and_small(report):
    data, picture = learning_report.write(report)
    assert picture.read_bytes().startswith(b"\x89PNG") and data.stat().st_size < 20_000
    read = json.loads(data.read_text())
    first = read["runs"][0]
    assert first["arm"] == "bf16:none" and first["status"] == "finished"
    assert first["series"]["accuracy"] == {"step": [0, 4], "value": [0.4, 0.8]}
    assert first["series"]["k3_kl"] == {"step": [1, 2, 3, 4], "value": [0.001, 0.002, 0.003, 0.004]}
    assert read["settings"]["steps"] == STEPS and read["environment"]["torch"]
    assert read["differences"][0]["accuracy"]["interval"] == [pytest.approx(-0.685, abs=1e-3), pytest.approx(0.585, abs=1e-3)]


def test_without_any_run_there_is_no_picture(tmp_path):
    assert [path.name for path in learning_report.write(collected(config(tmp_path)))] == ["learning.json"]


def test_a_long_series_is_thinned_to_means():
    steps, values = thin(list(range(1, 251)), [float(i) for i in range(1, 251)], points=100)
    assert len(steps) == 84 and (steps[0], values[0]) == (3, 2.0) and (steps[-1], values[-1]) == (250, 250.0)
    assert thin([], []) == ([], [])


def test_arms_differ_in_line_or_marker_without_colours(report):
    from flashrl_verl.bench.learning_plot import _arms

    styles = [arm.style for arm in _arms(report)]
    assert len({(style.line, style.marker) for style in styles}) == len(styles) == 4
