# SPDX-License-Identifier: Apache-2.0
"""A report says what the metrics file says, also where the file is torn, doubled, not finite or empty."""

import json
import math

import pytest
from PIL import Image
from rich.console import Console

from flashrl_verl.errors import FlashRLError
from flashrl_verl.settings import GuardConfig
from flashrl_verl.tools import report
from flashrl_verl.tools.log_excerpt import last_error
from flashrl_verl.tools.report import palette

HELD_OUT = "val-core/toy_addition/acc/mean@1"
KL, REJECTED = "rollout_corr/k3_kl", "rollout_corr/rollout_rs_masked_fraction"


def line(step: int, **data) -> str:
    return json.dumps({"step": step, "data": {key.replace("__", "/"): value for key, value in data.items()}})


@pytest.fixture
def run(tmp_path):
    """Three steps with both validations, and a run.json as the quickstart writes it."""
    step = {
        "critic__score__mean": 0.5,
        "timing_s__step": 4.0,
        "timing_s__gen": 3.0,
        "timing_s__update_actor": 0.5,
    }
    lines = [
        json.dumps({"step": 0, "data": {HELD_OUT: 0.375}}),
        *(line(s, rollout_corr__k3_kl=s * 1e-4, **step) for s in (1, 2)),
        json.dumps({"step": 3, "data": {HELD_OUT: 0.75, KL: 3e-4, "flashrl/quantized_layers": 8}}),
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    facts = {
        "total_steps": 3,
        "precision": "int8",
        "seed": 7,
        "versions": {"verl": "0.9.1"},
        "seconds": {"total": 61.26},
    }
    facts |= {"peak_memory_bytes": 3 * 2**30, "memory_kind": "PSS"}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    return tmp_path


def test_a_torn_last_line_is_counted_and_the_rest_read(run):
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "data": {"critic/sco')
    metrics = report.read_metrics(run / "metrics.jsonl")
    assert (metrics.last_step, metrics.unreadable_lines) == (3, 1)
    assert ("unreadable lines in the metrics", "1") in report.load(run).rows()


def test_after_a_resume_the_later_value_of_a_step_wins_and_others_are_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [line(1, a=1.0), line(2, a=2.0, b=5.0), line(3, a=3.0), line(2, a=20.0), line(3, a=30.0)]
    path.write_text("\n".join(lines))
    assert report.read_metrics(path).rows == {1: {"a": 1.0}, 2: {"a": 20.0, "b": 5.0}, 3: {"a": 30.0}}
    assert report.read_metrics(path).series("a") == ([1, 2, 3], [1.0, 20.0, 30.0])


@pytest.mark.parametrize("junk", ["[]", "3", '{"step": "x", "data": {}}', '{"data": {}}', '{"step": 1, "data": 2}'])
def test_lines_that_are_no_record_are_counted_not_fatal(tmp_path, junk):
    path = tmp_path / "metrics.jsonl"
    path.write_text(junk + "\n" + line(1, a=1.0) + "\n\n")
    metrics = report.read_metrics(path)
    assert (metrics.rows, metrics.unreadable_lines) == ({1: {"a": 1.0}}, 1)


def test_null_is_how_the_logger_writes_nan(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, a=None, b="text", c=True))
    row = report.read_metrics(path).rows[1]
    assert math.isnan(row["a"]) and "b" not in row and row["c"] == 1.0


def test_the_table_says_what_came_out(run):
    rows = dict(report.load(run).rows())
    assert rows["steps trained"] == "3 of 3"
    assert rows["held-out accuracy, toy_addition"] == "0.375 -> 0.750 (step 0 -> 3, +37.5 points)"
    assert rows["mismatch KL (k3), last"] == "3.00e-04, largest 3.00e-04"
    assert rows["rollout precision"] == "int8, 8 quantized layers"
    assert rows["peak memory, all processes"] == "3.00 GiB (PSS)"
    assert rows["wall time, total"] == "61.3 s"
    assert (rows["seed"], rows["versions"]) == ("7", "verl 0.9.1")


@pytest.mark.parametrize(
    ("chosen", "layers", "words"),
    [
        ("int8", 0.0, "not quantized, 0 quantized layers: NOT the precision that was chosen"),
        ("bf16", 0.0, "not quantized, 0 quantized layers"),
        (None, 0.0, "not quantized, 0 quantized layers"),
        (None, 8.0, "8 quantized layers, format not recorded"),
        ("bf16", 8.0, "8 quantized layers: NOT bf16, which was chosen"),
        ("fp8", 8.0, "fp8, 8 quantized layers"),
        ("int8", None, "the engine's layers were not logged; chosen: int8"),
        (None, None, "the engine's layers were not logged"),
    ],
)
def test_the_precision_is_what_the_engine_held_not_what_was_chosen(chosen, layers, words):
    assert report.held_precision(chosen, layers) == words
    assert layers != 0 or "int8" not in words


TOKEN_TIS = {"rollout_is": "token", "rollout_is_threshold": 2.0}
GEO_RS = {"rollout_is": None, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}


@pytest.mark.parametrize(
    ("settings", "logged", "words"),
    [
        (TOKEN_TIS, "w", "TIS, cap C = 2.0, per token"),
        (TOKEN_TIS, "", "TIS, cap C = 2.0, per token; weights were NOT logged"),
        (
            {"rollout_is": "sequence", "rollout_is_threshold": "0.5_5.0"},
            "w",
            "IcePop, weights outside 0.5 to 5.0 become 0, per sequence",
        ),
        ({"rollout_is": None, "rollout_is_threshold": 2.0}, "", "none (rollout_is=null)"),
        (GEO_RS, "r", "rejection by seq_mean_k1 beyond 0.999_1.001"),
        (GEO_RS, "", "rejection by seq_mean_k1 beyond 0.999_1.001; rejections were NOT logged"),
        (
            TOKEN_TIS | {"rollout_rs": "token_k3", "rollout_rs_threshold": 0.1},
            "wr",
            "TIS, cap C = 2.0, per token; rejection by token_k3 beyond 0.1",
        ),
        ({"rollout_is": None}, "r", "rejection, criterion not recorded"),
        (
            {"rollout_is": None, "bypass_mode": True, "loss_type": "ppo_clip"},
            "",
            "bypass mode, ppo_clip on the rollout's log-probs",
        ),
        (None, "w", "importance weights, level and threshold not recorded"),
        (None, "", "no importance weights logged"),
        (None, "r", "no importance weights logged; rejection, criterion not recorded"),
    ],
)
def test_the_correction_is_said_as_far_as_it_is_known(settings, logged, words):
    names = {"w": "rollout_corr/rollout_is_mean", "r": REJECTED}
    metrics = report.Metrics(rows={1: {names[letter]: 0.5 for letter in logged}})
    assert report.correction_words(settings, metrics) == words


def test_a_run_says_how_much_it_rejected(run):
    assert "rejected tokens, share, last" not in dict(report.load(run).rows())
    with open(run / "metrics.jsonl", "a") as file:
        file.writelines(line(4 + i, **{REJECTED: share}) + "\n" for i, share in enumerate((None, 0.75, 0.125, None)))
    assert dict(report.load(run).rows())["rejected tokens, share, last"] == "NOT FINITE (nan), largest 0.75"


def test_the_guards_alarm_is_as_far_above_the_line_of_healthy_runs_as_the_palette_says():
    assert GuardConfig().k3_kl_max == pytest.approx(2 * palette.HEALTHY_KL)


def test_wall_time_of_a_resumed_run_is_the_sum_and_says_of_what(run):
    facts = json.loads((run / "run.json").read_text())
    facts["attempts"] = [{"seconds": {"total": 60.0}}, {"seconds": {}}, {"seconds": {"total": 1.26}}]
    (run / "run.json").write_text(json.dumps(facts))
    rows = dict(report.load(run).rows())
    assert rows["wall time, total"] == "61.3 s (sum over the attempts: 2 of 3, the rest was not recorded)"


def test_what_was_not_logged_is_said(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(line(1, a=1.0))
    rows = dict(report.load(tmp_path).rows())
    for label in ("held-out accuracy", "mismatch KL (k3), last", "rollout weights", "step time, median"):
        assert rows[label] == report.MISSING


def test_values_that_are_not_finite_are_shown(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{HELD_OUT: 0.5, KL: 1e-4}, {HELD_OUT: None, KL: None}, {KL: float("inf")}, {KL: 2e-4}]
    path.write_text("\n".join(json.dumps({"step": s, "data": data}) for s, data in enumerate(lines)))
    result = report.load(tmp_path)
    rows = dict(result.rows())
    assert rows["held-out accuracy, toy_addition"] == "0.500 -> NOT FINITE (nan) (step 0 -> 1)"
    assert rows["mismatch KL (k3), last"] == "2.00e-04, largest 2.00e-04, 2 NOT FINITE"
    assert "NOT FINITE" in result.markdown()
    report.write(result)  # the curves can be drawn too


def test_a_run_that_logged_nothing_is_an_error(tmp_path):
    with pytest.raises(FlashRLError, match="metrics.jsonl"):
        report.load(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(FlashRLError, match="holds no step"):
        report.load(tmp_path)


def test_report_and_curves_are_written_beside_the_metrics(run):
    markdown, curves = report.write(report.load(run))
    assert markdown == run / "report.md" and "+37.5 points" in markdown.read_text()
    with Image.open(curves) as image:
        image.load()
        width, height = image.size
        colours = {colour for _, colour in image.convert("RGB").getcolors(maxcolors=width * height)}
    assert image.format == "PNG" and width > 1000
    # Held-out accuracy, mismatch KL, rollout and actor update are drawn, in their colours.
    assert {(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00), (0x56, 0xB4, 0xE9)} <= colours


def test_a_run_without_any_known_metric_still_has_a_picture(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(line(1, a=1.0))
    _, curves = report.write(report.load(tmp_path))
    with Image.open(curves) as image:
        image.verify()


def test_brackets_in_a_value_reach_the_terminal_as_they_are(run):
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(facts | {"hardware": "cpu [bold]2 cores[/bold]"}))
    console = Console(width=120, record=True, file=open("/dev/null", "w"))
    console.print(report.load(run).table())
    assert "cpu [bold]2 cores[/bold]" in console.export_text()


RAY_LOG = """\
(TaskRunner pid=4242) INFO 11-20 starting
Traceback (most recent call last):
  File "/x/main_flashrl.py", line 1, in <module>
ValueError: an unrelated one that was handled
\x1b[36m(Server pid=4243)\x1b[0m (Worker pid=7) ERROR 11-20 15:48:14 [core.py:9] flashrl_verl.errors.RefitError: 2 tensors
\x1b[36m(Server pid=4243, ip=10.0.0.1)\x1b[0m   model.layers.0.mlp.down_proj.weight
(WorkerDict pid=4243) Traceback (most recent call last):
ray.exceptions.RayTaskError(RuntimeError): ray::TaskRunner.run() (pid=4242, ip=10.0.0.1)
RuntimeError: the worker died

Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.
"""  # noqa: E501


def test_of_a_failed_run_our_own_error_is_shown_before_its_consequences():
    assert last_error(RAY_LOG) == [
        "flashrl_verl.errors.RefitError: 2 tensors",
        "  model.layers.0.mlp.down_proj.weight",
    ]


def test_without_an_error_of_ours_the_last_exception_is_shown():
    log = "\n".join(text for text in RAY_LOG.splitlines() if "RefitError" not in text)
    assert last_error(log) == ["RuntimeError: the worker died"]


def test_of_a_failed_engine_its_own_error_is_shown_before_those_that_point_to_it():
    log = """(FlashRLHttpServer pid=77) (EngineCore_DP0 pid=88) ERROR 11-21 11:37:23 [core.py:9] AssertionError: in profiling
(FlashRLHttpServer pid=77) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
ray.exceptions.RayTaskError(RuntimeError): ray::TaskRunnerV1.run() (pid=70)"""  # noqa: E501
    assert last_error(log) == ["AssertionError: in profiling"]
    assert last_error(log.split("\n", 1)[1])[0].startswith("RuntimeError: Engine core initialization failed")


def test_a_log_without_an_exception_ends_with_its_last_lines():
    assert last_error("one\n\ntwo\n") == ["one", "two"]
