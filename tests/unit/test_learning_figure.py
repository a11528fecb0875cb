# SPDX-License-Identifier: Apache-2.0
"""`flashrl bench learning-figure`: curves drawn from a learning.json alone, those of docs/results among them."""

import json
import math
import re

import numpy
import pytest
from result_pages import RESULTS, drawn
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.learning_plot import _draw_final, _metrics, plot
from benchmarks.learning_report import thin
from flashrl_verl.errors import ConfigError
from flashrl_verl.tools.report.figure import new_figure
from flashrl_verl.tools.report.metrics import MISMATCH_KL, STEP_TIME
from flashrl_verl.tools.report.palette import style

PICTURES = ("outliers-32", "outliers-32-again", "outliers-32-third", "outliers-16", "constant-rate")


def series(**found) -> dict:
    names = ("accuracy", "k3_kl", "effective_sample_size", "truncated_share", "step_seconds")
    return {name: dict(zip(("step", "value"), found.get(name, ([], [])), strict=True)) for name in names}


@pytest.mark.parametrize("name", PICTURES)
def test_the_pages_pictures_are_of_their_raw_data(name, tmp_path):
    picture = tmp_path / "learning.png"
    done = CliRunner().invoke(app, ["learning-figure", f"{RESULTS}/learning/{name}.json", "--output", str(picture)])
    assert done.exit_code == 0 and drawn(picture) == drawn(RESULTS / "learning" / f"{name}.png")


def test_another_accuracy_is_another_picture(tmp_path):
    record = json.loads((RESULTS / "learning" / "outliers-16.json").read_text())
    plot(record, tmp_path / "one.png")
    record["runs"][0]["bf16"]["mean@8"]["value"] -= 0.01
    plot(record, tmp_path / "other.png")
    assert drawn(tmp_path / "one.png") != drawn(tmp_path / "other.png")


def test_a_long_run_took_as_long_as_all_of_its_steps():
    steps, seconds = [*range(1, 251)], [*numpy.random.default_rng(7).uniform(1, 9, 250)]
    means = thin(steps, seconds, width=3, last=250)
    found = _metrics({"series": series(step_seconds=means, k3_kl=means)}, 3)
    assert found.clock()[249] == pytest.approx(sum(seconds[:249]) / 3600)  # by threes; the last one is alone
    assert found.clock()[250] == pytest.approx(sum(seconds) / 3600)
    assert len(found.series(STEP_TIME)[0]) == 250 and found.series(MISMATCH_KL)[0][:2] == [3, 6]


def test_a_step_that_was_not_logged_adds_nothing_to_the_clock_of_a_short_run():
    found = _metrics({"series": series(step_seconds=([1, 2, 4], [1.0, 1.0, 8.0]))}, 1)
    assert found.clock()[4] == pytest.approx(10 / 3600) and found.series(STEP_TIME)[0] == [1, 2, 4]


def test_last_weights_are_drawn_whole_and_within_what_an_accuracy_can_be():
    axes = new_figure(4, 3).subplots()
    ends, estimate = [0.2, 0.9, 0.95], {"mean": 0.683, "standard_error": 0.242, "seeds": 3, "freedom": 2}
    runs = [
        {"arm": "int8:none", "status": "finished", "bf16": {"mean@8": {"value": end}, "pass@8": {"value": 1.0}}}
        for end in ends
    ]
    record = {"arms": [{"arm": "int8:none", "accuracy": estimate}], "runs": runs, "start": {"mean@8": {"value": 0.1}}}
    _draw_final(axes, record, {"INT8, no correction": style(0)})
    low, high = axes.get_ylim()
    assert -0.06 < low < 0.0 and 1.0 < high < 1.06, "the interval reaches from below 0 to above 1"
    assert [*axes.lines[0].get_ydata()] == ends and axes.get_title("right") == "start: 0.100"


def test_what_was_not_finite_stays_so():
    found = _metrics({"series": series(k3_kl=([1, 2], [0.5, None]))}, 1)
    assert found.series(MISMATCH_KL)[1][0] == 0.5 and math.isnan(found.series(MISMATCH_KL)[1][1])


def test_the_samples_of_a_validation_are_in_the_title_where_they_are_known(tmp_path):
    run = {"arm": "bf16:none", "seed": 0, "status": "finished", "bf16": None}
    record = {"arms": [{"arm": "bf16:none", "accuracy": None}], "start": None, "runs": [run]}
    run["series"] = series(accuracy=([0, 4], [0.3, 0.8]), step_seconds=([1, 2, 3, 4], [1.0] * 4))
    for held_out, title in (("val-core/toy_chain/acc/mean@2", "accuracy (mean of 2) by"), (None, "accuracy by")):
        run["held_out"] = held_out
        plot(record, tmp_path / "learning.svg")
        assert title in comments(tmp_path)


def comments(folder) -> str:
    """matplotlib draws words as paths, and writes them beside as comments."""
    return " ".join(re.findall(r"<!-- (.*?) -->", (folder / "learning.svg").read_text()))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"runs": [], "arms": 3}'])
def test_what_is_no_result_is_named(text, tmp_path):
    (tmp_path / "learning.json").write_text(text)
    done = CliRunner().invoke(app, ["learning-figure", str(tmp_path), "--output", str(tmp_path / "x.png")])
    assert isinstance(done.exception, ConfigError) and str(tmp_path / "learning.json") in str(done.exception)


def test_what_has_nothing_to_draw_and_no_format_are_refused(tmp_path):
    (tmp_path / "learning.json").write_text('{"runs": [], "arms": [], "start": null}')
    (tmp_path / "a.png").mkdir()
    for output, words in (
        ("x.png", "no run that has validated"),
        ("x.pdf", "neither .png nor .svg"),
        ("learning.json/x.png", "cannot be written"),
        ("a.png", "is a folder"),
    ):
        done = CliRunner().invoke(app, ["learning-figure", str(tmp_path), "--output", str(tmp_path / output)])
        assert isinstance(done.exception, ConfigError) and words in str(done.exception)
