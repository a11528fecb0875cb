# SPDX-License-Identifier: Apache-2.0
"""Figures of `flashrl bench learning`, by hand."""

import datetime
import json
import math
import re
import statistics

import numpy as np
import pytest
from learning_runs import KEY, config, write_metrics, write_record

from benchmarks import learning_report
from benchmarks.learning import arms_of
from benchmarks.learning_report import thin, to_json
from benchmarks.learning_results import collect, estimate, paired, t_quantile, welch
from benchmarks.learning_run import state_of

STEPS = 4
ARMS = "bf16:none,bf16:tis,int8:none,int8:tis"
FINAL = {
    "bf16:none": {0: 0.80, 1: 0.90},
    "bf16:tis": {0: 0.70, 1: 0.90},
    "int8:none": {0: 0.60, 1: 0.80},
    "int8:tis": {0: 0.75},
}
"""Accuracy of the last weights in BF16 by arm and seed; the last run is not there."""


def bf16(value):
    """What ``learning_bf16`` writes, of one accuracy."""
    figure = {"value": value, "low": value - 0.01, "high": value + 0.01}
    return json.dumps({"samples": 8, "metrics": {"mean@8": figure, "pass@8": figure}})


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
        rows[STEPS][KEY] = final + 0.02  # its own engine says something else
        write_metrics(run, {0: {KEY: 0.4}, **rows})
        (run.folder / "bf16.json").write_text(bf16(final))
    (tmp_path / "bf16.json").write_text(bf16(0.3))
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
    assert bf16.own.mean == pytest.approx(0.87) and bf16.curve.mean == pytest.approx((0.61 + 0.66) / 2)
    assert bf16.k3_kl.mean == pytest.approx(2.5e-3) and bf16.step_seconds.mean == 3.0
    assert bf16.effective_sample_size is None and int8.effective_sample_size.mean == 0.9


def test_differences_are_of_one_choice_at_a_time(report):
    found = {
        (str(pair.arm), str(pair.baseline)): pair.paired
        for pair in report.differences()
        if pair.figure == "final, BF16"
    }
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
    assert bf16.finished == 1 and bf16.accuracy.mean == 0.9 and bf16.own.mean == pytest.approx(0.92)


def test_before_anything_is_asked_in_bf16_there_are_curves_only(report):
    for file in report.config.output.rglob("bf16.json"):
        file.unlink()
    found = collected(report.config)
    assert found.arms()[0].accuracy is None and found.arms()[0].own.mean == pytest.approx(0.87) and found.start is None
    assert {pair.figure for pair in found.differences()} == {"mean of curve"}
    assert learning_report.write(found)[1].read_bytes().startswith(b"\x89PNG")


def test_a_run_that_went_on_has_no_more_points_than_one_that_did_not(tmp_path):
    cfg = config(tmp_path, arms=arms_of("int8:tis"), seeds=(0, 1), steps=5)
    straight, stopped = cfg.runs()
    curve = {0: {KEY: 0.3}, 2: {KEY: 0.7}, 4: {KEY: 0.8}, 5: {KEY: 0.9}}
    write_metrics(straight, curve)
    write_metrics(stopped, {**curve, 1: {KEY: 0.5}, 3: {KEY: 0.79}})  # verl validates where it goes on, too
    for run in cfg.runs():
        (run.folder / "config.yaml").write_text("trainer: {test_freq: 2}\nalgorithm: {gamma: 0.5}\n")
    found = collect(cfg, [state_of(run, 5) for run in cfg.runs()])
    assert [run.accuracy() for run in found.runs] == [([0, 2, 4, 5], [0.3, 0.7, 0.8, 0.9])] * 2
    arm = to_json(found)["arms"][0]
    assert arm["curve"]["mean"] == pytest.approx(0.675) and arm["curve"]["standard_error"] == 0
    assert arm["configuration"] == {"trainer.test_freq": 2, "algorithm.gamma": 0.5}


def test_the_last_point_of_an_unfinished_run_is_one_that_others_have(tmp_path):
    cfg = config(tmp_path, arms=arms_of("int8:tis"), seeds=(0,), steps=5)
    (run,) = cfg.runs()
    write_metrics(run, {0: {KEY: 0.3}, 2: {KEY: 0.7}, 3: {KEY: 0.79}})
    (run.folder / "config.yaml").write_text("trainer: {test_freq: 2}\n")
    assert collect(cfg, [state_of(run, 5)]).runs[0].accuracy() == ([0, 2], [0.3, 0.7])


def test_welchs_interval_is_that_of_two_spreads():
    """SE^2 = 1/3 + s^2/4, and the freedom by the formula of Welch and Satterthwaite."""
    found = welch([1.0, 2.0, 3.0], [4.0, 6.0, 8.0, 9.0])
    one, other = 1 / 3, statistics.variance([4.0, 6.0, 8.0, 9.0]) / 4
    assert found.mean == pytest.approx(2 - 6.75) and found.standard_error == pytest.approx(math.sqrt(one + other))
    assert found.freedom == pytest.approx((one + other) ** 2 / (one**2 / 2 + other**2 / 3))
    assert welch([1.0], [2.0, 3.0]).interval is None and welch([], [1.0]) is None
    equal = welch([1.0, 1.0], [2.0, 2.0])
    assert equal.interval == (-1.0, -1.0)


def test_the_detectable_difference_is_found_in_four_of_five_experiments():
    """Drawn: differences of 4 seeds with the very difference that an experiment of known spread says it can detect."""
    rng, n, found = np.random.default_rng(0), 4, []
    exact = (t_quantile(n - 1) + t_quantile(n - 1, 0.6)) / math.sqrt(n)  # spread 1
    for values in rng.normal(exact, 1.0, size=(2000, n)).tolist():
        low, high = estimate(values).interval
        found.append(not low <= 0 <= high)
    assert 0.75 < np.mean(found) < 0.87
    assert estimate([0.0, 2.0]).detectable == pytest.approx(12.7062 + 1.37638, rel=1e-4)


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
    assert "0.850 ± 0.050" in said and "0.870 ± 0.050" in said and "1/2" in said and "3.00" in said
    assert "+0.150" in said and re.search(r"-0\.050 +│ +0\.050 +│ +\[-0\.685, \+0\.585\] +│ +0\.704", said)
    notes = " ".join(learning_report.notes(report))
    for words in ("mean@8", "0.300 [0.290, 0.310]", "one warmed-up model", "up to 1 more", "8 differences", "Welch"):
        assert words in notes


def test_a_failed_run_is_marked_in_the_table(report):
    cfg = report.config
    (run,) = [run for run in cfg.runs() if str(run.arm) == "int8:tis" and run.seed == 1]
    write_record(run, *[{"error": ["ValueError: no"]}] * 2)
    found = collected(cfg).arms()[-1]
    assert (found.finished, found.failed, found.runs) == (1, 1, 2)
    (arms, *_) = learning_report.tables(collected(cfg))
    assert list(arms.columns[1].cells)[-1] == "1/2, 1 FAILED"


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
    assert (
        first["series"]["accuracy"] == {"step": [0, 4], "value": [0.4, 0.82]}
        and first["bf16"]["mean@8"]["value"] == 0.8
    )
    assert first["series"]["k3_kl"] == {"step": [1, 2, 3, 4], "value": [0.001, 0.002, 0.003, 0.004]}
    assert read["settings"]["steps"] == STEPS and read["environment"]["torch"]
    assert first["held_out"] == KEY
    today = datetime.date.today()
    assert datetime.date.fromisoformat(read["date"]) in (
        today,
        today - datetime.timedelta(days=1),
    )  # of before midnight
    assert read["differences"][0]["paired"]["interval"] == [
        pytest.approx(-0.685, abs=1e-3),
        pytest.approx(0.585, abs=1e-3),
    ]


def test_without_any_run_there_is_no_picture(tmp_path):
    assert [path.name for path in learning_report.write(collected(config(tmp_path)))] == ["learning.json"]


def test_a_long_series_is_thinned_to_means():
    steps, values = thin(list(range(1, 251)), [float(i) for i in range(1, 251)], width=3, last=250)
    assert len(steps) == 84 and (steps[0], values[0]) == (3, 2.0) and (steps[-1], values[-1]) == (250, 250.0)
    assert thin([], [], width=3, last=250) == ([], [])


def test_a_lost_step_moves_no_other_of_a_thinned_series():
    kept = [step for step in range(1, 201) if step != 20]
    steps, values = thin(kept, [float(step) for step in kept], width=2, last=200)
    assert steps == [*range(2, 201, 2)] and values[8:11] == [17.5, 19.0, 21.5]
    assert thin([1, 2], [1.0, 2.0], width=1, last=4) == ([1, 2], [1.0, 2.0])


def test_arms_differ_in_line_or_marker_without_colours(report):
    from benchmarks.learning_plot import _arms

    styles = [arm.style for arm in _arms(to_json(report))]
    assert len({(style.line, style.marker) for style in styles}) == len(styles) == 4
