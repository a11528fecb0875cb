# SPDX-License-Identifier: Apache-2.0
"""`flashrl bench learning-figure`: curves drawn from a learning.json alone, those of docs/results among them."""

import json
import math
import random
import re

import pytest
from result_pages import RESULTS, drawn
from typer.testing import CliRunner

from flashrl_verl.bench.learning_plot import _metrics, plot
from flashrl_verl.bench.learning_report import thin
from flashrl_verl.cli import app
from flashrl_verl.errors import ConfigError
from flashrl_verl.report.metrics import MISMATCH_KL, STEP_TIME

PICTURES = ("outliers-32", "outliers-32-again", "outliers-32-third", "outliers-16", "constant-rate")


def series(**found) -> dict:
    names = ("accuracy", "k3_kl", "effective_sample_size", "truncated_share", "step_seconds")
    return {name: dict(zip(("step", "value"), found.get(name, ([], [])), strict=True)) for name in names}


@pytest.mark.parametrize("name", PICTURES)
def test_the_pages_pictures_are_of_their_raw_data(name, tmp_path):
    picture = tmp_path / "learning.png"
    done = CliRunner().invoke(app, ["bench", "learning-figure", f"{RESULTS}/learning/{name}.json", "--output", str(picture)])
    assert done.exit_code == 0 and drawn(picture) == drawn(RESULTS / "learning" / f"{name}.png")


def test_another_accuracy_is_another_picture(tmp_path):
    record = json.loads((RESULTS / "learning" / "outliers-16.json").read_text())
    plot(record, tmp_path / "one.png")
    record["runs"][0]["bf16"]["mean@8"]["value"] -= 0.01
    plot(record, tmp_path / "other.png")
    assert drawn(tmp_path / "one.png") != drawn(tmp_path / "other.png")


def test_a_long_run_took_as_long_as_all_of_its_steps():
    steps, seconds = [*range(1, 251)], [random.uniform(1, 9) for _ in range(250)]
    found = _metrics({"series": series(step_seconds=thin(steps, seconds, points=100), k3_kl=thin(steps, seconds, points=100))})
    assert found.clock()[249] == pytest.approx(sum(seconds[:249]) / 3600)  # by threes; the last one is alone
    assert found.clock()[250] == pytest.approx(sum(seconds) / 3600)
    assert len(found.series(STEP_TIME)[0]) == 250 and found.series(MISMATCH_KL)[0][:2] == [3, 6]


def test_what_was_not_finite_stays_so():
    found = _metrics({"series": series(k3_kl=([1, 2], [0.5, None]))})
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
    done = CliRunner().invoke(app, ["bench", "learning-figure", str(tmp_path), "--output", str(tmp_path / "x.png")])
    assert isinstance(done.exception, ConfigError) and str(tmp_path / "learning.json") in str(done.exception)


def test_what_has_nothing_to_draw_and_no_format_are_refused(tmp_path):
    (tmp_path / "learning.json").write_text('{"runs": [], "arms": [], "start": null}')
    for output, words in (("x.png", "no run that has validated"), ("x.pdf", "neither a .png nor a .svg")):
        done = CliRunner().invoke(app, ["bench", "learning-figure", str(tmp_path), "--output", str(tmp_path / output)])
        assert isinstance(done.exception, ConfigError) and words in str(done.exception)
