# SPDX-License-Identifier: Apache-2.0
"""The report's table of time and memory: figures worked out by hand, and only what was logged."""

import json

from report_runs import make_run, metrics, two_runs

from flashrl_verl.tools.report import comparison
from flashrl_verl.tools.report.costs import TITLE


def gpu_run(tmp_path, name: str, **more):
    """Three steps of 10, 20 and 30 s; in the refit gathering takes 10, 40 and 20 ms, and 5.5, 7.25 and 6 GiB are
    allocated."""
    rows = [json.loads(line) for line in metrics(0.5, (10.0, 20.0, 30.0))]
    for row, gather, allocated in zip(rows[1:], (0.010, 0.040, 0.020), (5.5, 7.25, 6.0), strict=True):
        row["data"] |= {"flashrl/refit_gather_seconds": gather, "actor/perf/max_memory_allocated_gb": allocated}
        row["data"] |= {"flashrl/weight_bytes": 1.25e9, **more}
    return make_run(tmp_path / name, map(json.dumps, rows))


def table(result) -> list[dict[str, str]]:
    return [dict(zip(result.costs.header, row, strict=True)) for row in result.costs.rows]


def test_times_and_memory_are_those_of_the_file_by_hand(tmp_path):
    (row,) = table(comparison.compare([gpu_run(tmp_path, "gpu")], ["a run"]))
    assert row == {
        "run": "a run",
        "step s": "20.00",
        "rollout s": "12.00",  # 60 %
        "actor update s": "6.00",  # 30 %
        "other s": "2.00",
        "refit: gather ms": "20.0",  # the median
        "allocated GiB": "7.2",
        "weights GB": "1.25",
    }


def test_what_one_run_lacks_is_said_and_what_no_run_has_is_left_out(tmp_path):
    rows = table(comparison.compare([gpu_run(tmp_path, "gpu"), *two_runs(tmp_path)[1:]], ["gpu", "cpu"]))
    assert rows[1]["allocated GiB"] == rows[1]["refit: gather ms"] == "not logged" and rows[1]["step s"] == "2.00"
    assert not {"reserved GiB", "refit: verify ms"} & rows[0].keys()


def test_values_that_are_not_finite_are_told(tmp_path):
    (row,) = table(comparison.compare([gpu_run(tmp_path, "gpu", **{"flashrl/refit_gather_seconds": None})]))
    assert row["refit: gather ms"] == "NOT FINITE (3 of 3)"


def test_the_table_is_in_both_files_and_absent_where_nothing_was_timed(tmp_path):
    comparison.write(comparison.compare([gpu_run(tmp_path, "gpu")]), tmp_path / "out")
    for file in ("report.html", "report.md"):
        text = (tmp_path / "out" / file).read_text()
        assert TITLE in text and "refit: gather ms" in text and "7.2" in text
    bare = make_run(tmp_path / "bare", [json.dumps({"step": 1, "data": {"critic/score/mean": 0.5}})])
    result = comparison.compare([bare])
    assert result.costs is None
    comparison.write(result, tmp_path / "without")
    assert TITLE not in (tmp_path / "without" / "report.html").read_text()
