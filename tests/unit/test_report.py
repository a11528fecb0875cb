# SPDX-License-Identifier: Apache-2.0
"""A report says what the metrics files say, also where one is torn, doubled, not finite or empty: figures by hand."""

import json
import math

import pytest

from flashrl_verl.errors import FlashRLError
from flashrl_verl.tools import report

HELD_OUT, KL, ESS = "val-core/toy_addition/acc/mean@1", "rollout_corr/k3_kl", "rollout_corr/rollout_is_eff_sample_size"


def lines(*steps: dict) -> str:
    """Of a metrics file: steps from 0 on."""
    return "".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in enumerate(steps))


def make_run(folder, layers=8, int8=8):
    """Two steps of 4 and 6 s, validated at both ends; 60 % is rollout, 30 % update."""
    steps = [{HELD_OUT: 0.25}]
    for step, s in enumerate((4.0, 6.0), start=1):
        data = {"timing_s/step": s, "timing_s/gen": 0.6 * s, "timing_s/update_actor": 0.3 * s}
        data |= {KL: step * 1e-4, ESS: 1 - 0.01 * step, "flashrl/quantized_layers": layers}
        data |= {"flashrl/int8_weights": int8} if int8 is not None else {}
        steps.append(data)
    steps[-1][HELD_OUT] = 0.75
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(lines(*steps))
    return folder


def cells(*paths) -> list[dict[str, str]]:
    header, *rows = report.table_rows(report.load(*paths))
    return [dict(zip(header, row, strict=True)) for row in rows]


# ---- the file ----


def test_after_a_resume_the_later_value_of_a_step_wins_and_others_are_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [(1, {"a": 1.0}), (2, {"a": 2.0, "b": 5.0}), (3, {"a": 3.0}), (2, {"a": 20.0}), (3, {"a": 30.0})]
    path.write_text("\n".join(json.dumps({"step": step, "data": data}) for step, data in rows))
    assert report.read_metrics(path).rows == {1: {"a": 1.0}, 2: {"a": 20.0, "b": 5.0}, 3: {"a": 30.0}}


@pytest.mark.parametrize("junk", ["[]", '{"step": "x", "data": {}}', '{"step": 1, "data": 2}', '{"step": 4, "da'])
def test_of_a_run_that_still_writes_or_was_torn_the_rest_is_read(tmp_path, junk):
    run = make_run(tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as file:
        file.write(junk)
    [row] = cells(run)
    assert row["steps"] == "2" and row["accuracy, toy_addition"] == "0.250 -> 0.750"


def test_null_is_how_the_logger_writes_nan_and_no_figure_hides_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines({HELD_OUT: 0.5, KL: 1e-4}, {HELD_OUT: None, KL: None, "a": "text"}, {KL: 0.0}, {KL: 2e-4}))
    row = report.read_metrics(path).rows[1]
    assert math.isnan(row[KL]) and "a" not in row
    [row] = cells(path)
    assert row["accuracy, toy_addition"] == "0.500 -> nan" and row["k3-KL mean"] == row["k3-KL largest"] == "nan"
    report.draw(report.load(path), tmp_path)
    path.write_text(lines({HELD_OUT: 0.5}))
    assert cells(path)[0]["accuracy, toy_addition"] == "0.500", "one validation is no course"


def test_a_run_that_logged_nothing_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for content, words in ((None, "is not there"), ("", "holds no step"), ("x\n", "holds no step")):
        if content is not None:
            path.write_text(content)
        with pytest.raises(FlashRLError, match=words):
            report.load(tmp_path)


def test_a_folder_of_runs_is_its_runs(tmp_path):
    for name in "ab":
        make_run(tmp_path / name)
    (tmp_path / "b" / "metrics.jsonl").rename(tmp_path / "recipe.jsonl")
    (tmp_path / "data.jsonl").write_text('{"question": "no run"}\n')
    assert list(report.load(tmp_path)) == ["a", "recipe"]
    twice = tmp_path / "other" / "a"
    make_run(twice)
    assert list(report.load(tmp_path, twice))[-1] == str(twice / "metrics.jsonl"), "two of a name"


# ---- the table and the picture ----


def test_the_table_is_what_the_files_say_by_hand(tmp_path):
    runs = [make_run(tmp_path / "int8"), make_run(tmp_path / "bf16", layers=0)]
    (tmp_path / "other.jsonl").write_text(lines({"unknown": 1.0}))
    first, second, other = cells(*runs, tmp_path / "other.jsonl")
    assert first == {
        "run": "int8",
        "rollout": "INT8, 8 layers",
        "steps": "2",
        "accuracy, toy_addition": "0.250 -> 0.750",
        "k3-KL mean": "1.5e-04",
        "k3-KL largest": "2.0e-04",
        "ESS least": "0.9800",
        "s/step": "6",
    }
    assert second == first | {"run": "bf16", "rollout": "BF16"}
    assert [cells(make_run(tmp_path / str(of), int8=of))[0]["rollout"] for of in (0, None)] == [
        *("FP8, 8 layers", "8-bit, 8 layers")
    ]
    assert other == dict.fromkeys(first, report.MISSING) | {"run": "other", "steps": "0"}
