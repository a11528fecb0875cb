# SPDX-License-Identifier: Apache-2.0
"""A report says what the metrics files say, also where one is torn, doubled, not finite or empty: figures by hand."""

import json
import math

import pytest
from rich.console import Console
from typer.testing import CliRunner

from flashrl_verl.cli import app
from flashrl_verl.errors import FlashRLError
from flashrl_verl.tools import report
from flashrl_verl.tools.report.page import common

HELD_OUT, KL, ESS = "val-core/toy_addition/acc/mean@1", "rollout_corr/k3_kl", "rollout_corr/rollout_is_eff_sample_size"
TIS = {"rollout_is": "token", "rollout_is_threshold": 2.0}


def lines(*steps: dict) -> str:
    """Of a metrics file: steps from 0 on."""
    return "".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in enumerate(steps))


def make_run(folder, times=(4.0, 6.0), layers=8, kl=1e-4, last=0.75, **facts):
    """Validated at both ends, 60 % of a step is rollout, 30 % update; a run.json if facts are given."""
    steps = [{HELD_OUT: 0.25}]
    for step, s in enumerate(times, start=1):
        data = {"timing_s/step": s, "timing_s/gen": 0.6 * s, "timing_s/update_actor": 0.3 * s, "critic/score/mean": 0.5}
        data |= {KL: step * kl, ESS: 1 - 0.01 * step, "flashrl/quantized_layers": layers}
        steps.append(data)
    steps[-1][HELD_OUT] = last
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(lines(*steps))
    if facts:
        (folder / "run.json").write_text(json.dumps({"precision": "int8", "correction": TIS, "seed": 0, **facts}))
    return folder


def cells(result: report.Report, column: int = 0) -> dict[str, str]:
    return {label: row[column] for label, row in result.rows()}


# ---- the file ----


def test_after_a_resume_the_later_value_of_a_step_wins_and_others_are_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [(1, {"a": 1.0}), (2, {"a": 2.0, "b": 5.0}), (3, {"a": 3.0}), (2, {"a": 20.0}), (3, {"a": 30.0})]
    path.write_text("\n".join(json.dumps({"step": step, "data": data}) for step, data in rows))
    assert report.read_metrics(path).rows == {1: {"a": 1.0}, 2: {"a": 20.0, "b": 5.0}, 3: {"a": 30.0}}


@pytest.mark.parametrize(
    "junk", ["[]", "3", '{"step": "x", "data": {}}', '{"data": {}}', '{"step": 1, "data": 2}', '{"step": 4, "da']
)
def test_lines_that_are_no_record_are_told_and_the_rest_read(tmp_path, junk):
    run = make_run(tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as file:
        file.write(junk)
    assert cells(report.load(run))["steps trained"] == "2, 1 unreadable lines (first: 4)"


def test_null_is_how_the_logger_writes_nan(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines({"a": None, "b": "text", "c": True}))
    row = report.read_metrics(path).rows[0]
    assert math.isnan(row["a"]) and "b" not in row and row["c"] == 1.0


def test_a_run_that_logged_nothing_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for content, words in ((None, "is not there"), ("", "holds no step"), ("x\n", "not a metrics file")):
        if content is not None:
            path.write_text(content)
        with pytest.raises(FlashRLError, match=words):
            report.load(tmp_path)


# ---- the table ----


def test_the_table_is_what_the_file_says_by_hand(tmp_path):
    result = report.load(make_run(tmp_path / "run", total_steps=5, seconds={"total": 61.26}), names=["mine"])
    assert list(result.groups) == ["mine"]
    assert cells(result) == {
        "rollout": "int8, 8 quantized layers",
        "correction": "token TIS, cap 2.0",
        "steps trained": "2 of 5",
        "held-out accuracy, toy_addition": "0.250 -> 0.750",
        "training score": "0.500 -> 0.500",
        "mismatch KL (k3), last": "2.00e-04",
        "mismatch KL (k3), largest": "2.00e-04",
        "ESS of the weights, last": "0.9800",
        "seconds of a step, mean without the first": "6.00",
        "- rollout": "3.60",
        "- update": "1.80",
        "- other": "0.60",
        "wall time, s": "61",
    }


def test_seeds_of_one_name_are_mean_and_range_and_say_of_how_many(tmp_path):
    runs = [
        make_run(tmp_path / f"seed{i}", times=(4.0, 6.0, 5.0)[:steps], kl=kl, last=last, seed=i)
        for i, (steps, kl, last) in enumerate([(2, 1e-4, 0.5), (3, 3e-4, 0.6), (2, 2e-4, 1.0)])
    ]
    blind = [line for line in (runs[2] / "metrics.jsonl").read_text().splitlines() if KL not in line]
    (runs[2] / "metrics.jsonl").write_text("\n".join([*blind, json.dumps({"step": 2, "data": {HELD_OUT: 1.0}})]))
    other = make_run(tmp_path / "other", layers=0)
    result = report.load(*runs, other, group=True)
    assert {name: len(group) for name, group in result.groups.items()} == {
        "int8, token TIS, cap 2.0": 2,
        "seed2": 1,
        "other": 1,
    }
    result = report.load(*runs, other, names=["INT8"] * 3 + ["BF16"], group=True)
    assert cells(result)["held-out accuracy, toy_addition"] == "0.250 -> 0.700 (0.500 to 1.000)"
    assert cells(result)["mismatch KL (k3), last"] == "5.50e-04 (2.00e-04 to 9.00e-04), 2 of 3 runs"
    assert common(result.groups["INT8"], KL) == ([1, 2], [[1e-4, 3e-4], [2e-4, 6e-4]])
    assert common(result.groups["INT8"], HELD_OUT)[0] == [0]
    assert cells(result, 1)["rollout"] == "0 quantized layers"
    assert list(report.load(*runs[:2]).groups) == [f"int8, token TIS, cap 2.0 #{seed}" for seed in (0, 1)]


@pytest.mark.parametrize(
    ("chosen", "layers", "words"),
    [
        ("int8", 0, "0 quantized layers: NOT int8, which was chosen"),
        ("bf16", 8, "8 quantized layers: NOT bf16, which was chosen"),
        ("bf16", 0, "bf16, 0 quantized layers"),
        ("fp8", 8, "fp8, 8 quantized layers"),
    ],
)
def test_the_precision_is_what_the_engine_held_not_what_was_chosen(tmp_path, chosen, layers, words):
    result = report.load(make_run(tmp_path / "run", layers=layers, precision=chosen))
    assert cells(result)["rollout"] == words
    assert ("NOT" in words) == (list(result.groups) == ["run"])  # nor does its name say it


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rollout_is": "sequence", "rollout_is_threshold": "0.5_5.0"}, "sequence IcePop 0.5-5.0"),
        ({"rollout_is": None, "rollout_is_threshold": 2.0}, "no correction"),
        (TIS | {"rollout_rs": "token_k3"}, "token TIS, cap 2.0, rejection token_k3"),
        ({"rollout_is": None, "bypass_mode": True}, "bypass"),
    ],
)
def test_the_correction_is_said_as_it_was_composed(tmp_path, settings, words):
    assert cells(report.load(make_run(tmp_path / "run", correction=settings)))["correction"] == words


def test_values_that_are_not_finite_or_missing_are_told_and_drawn_around(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines({HELD_OUT: 0.5, KL: 1e-4}, {HELD_OUT: None, KL: None}, {KL: 0.0}, {KL: 2e-4}))
    result = report.load(path)
    rows = cells(result)
    assert rows["held-out accuracy, toy_addition"] == "0.500 -> NOT FINITE (nan)"
    assert rows["mismatch KL (k3), last"] == "2.00e-04" and rows["mismatch KL (k3), largest"] == "NOT FINITE (nan)"
    assert {rows[label] for label in ("training score", "seconds of a step, mean without the first")} == {
        report.MISSING
    }
    report.write(result)
    path.write_text(lines({"unknown": 1.0}))
    report.write(report.load(path))
    path.write_text(lines({HELD_OUT: 1e308, KL: -1e308}, {HELD_OUT: -1e308, KL: 1e308}, {HELD_OUT: 0.5, KL: 1e-308}))
    result = report.load(path)
    assert cells(result)["mismatch KL (k3), largest"] == "NOT FINITE (inf)"
    report.write(result)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["{run}"], "Give each run once"),
        (["{other}", "--name", "a"], "1 --name for 2 runs"),
    ],
)
def test_runs_that_cannot_be_told_apart_are_refused(tmp_path, more, words):
    run, other = make_run(tmp_path / "run"), make_run(tmp_path / "other")
    result = CliRunner().invoke(app, ["report", str(run), *(word.format(run=run, other=other) for word in more)])
    assert isinstance(result.exception, FlashRLError) and words in str(result.exception)


# ---- the files ----


def test_the_page_tells_every_run_whatever_it_is_called(tmp_path):
    runs = [make_run(tmp_path / "a", command="python 'x=<1>' & y|z"), make_run(tmp_path / "b", layers=0)]
    names = ["<b>INT8 | [x]", "BF16 & co"]
    words = [part for name in names for part in ("--name", name)]
    done = CliRunner().invoke(app, ["report", *map(str, runs), *words, "--output", str(tmp_path / "new" / "out")])
    assert done.exit_code == 0, done.output
    out = tmp_path / "new" / "out"
    text = (out / "report.md").read_text()
    assert "2.00e-04" in text and "0.250 -> 0.750" in text and "    command: python 'x=<1>' & y|z" in text
    assert "](curves.png)" in text and (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1 and r"<b>INT8 \| [x]" in table[0]


def test_one_run_is_reported_beside_its_metrics(tmp_path):
    run = make_run(tmp_path / "run")
    done = CliRunner().invoke(app, ["report", str(run)])
    assert done.exit_code == 0
    assert all((run / name).is_file() for name in ("report.md", "curves.png"))


def test_brackets_in_a_name_reach_the_terminal_as_they_are(tmp_path):
    console = Console(width=120, record=True, file=open("/dev/null", "w"))
    console.print(report.load(make_run(tmp_path / "run"), names=["[bold]2 cores[/bold]"]).table())
    assert "[bold]2 cores[/bold]" in console.export_text()
