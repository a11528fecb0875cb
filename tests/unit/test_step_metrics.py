# SPDX-License-Identifier: Apache-2.0
"""What a step's metrics come to, and their file: verl's format, with the history that a resumed run's checkpoint
covers."""

import json
import math

import numpy as np
import pytest

from flashrl_verl.errors import ConfigError
from flashrl_verl.settings import Precision
from flashrl_verl.tools.report import palette
from flashrl_verl.trainer.metrics import (
    PHASES,
    MetricsFile,
    metrics_path,
    phase_metrics,
    refit_metrics,
    summarize_layers,
)

SECONDS = {"gen": 5.0, "old_log_prob": 1.0, "adv": 0.25, "update_actor": 2.0, "update_weights": 0.75, "step": 10.0}
WORKER = {
    **{"precision": "int8", "quantized_layers": 8, "head_dtype": "bfloat16", "unquantized_layers": {}},
    **{"weight_bytes": 100, "quantized_bytes": 51, "quantized_bytes_as_bf16": 100},
    "kv_cache": {"dtypes": {"int8_per_token_head": 2}},
}


def test_shares_are_of_the_whole_step_and_the_engines_speed_is_of_their_own_phase():
    metrics = phase_metrics(SECONDS | {"testing": 30.0}, generated_tokens=600)
    assert metrics.pop("flashrl/tokens_per_second_gen") == pytest.approx(120.0)
    shares = {key.removeprefix("flashrl/share_"): value for key, value in metrics.items()}
    expected = {
        "gen": 0.5,
        "old_log_prob": 0.1,
        "adv": 0.025,
        "update_actor": 0.2,
        "update_weights": 0.075,
        "other": 0.1,
    }
    assert shares == pytest.approx(expected)
    assert sum(shares.values()) == pytest.approx(1.0)


RECEIPT = {
    "bytes": 4 * 10**9,
    "step": 3,
    "sum": 2,
    "tensors": {"a": "bfloat16 [3] checksum 1", "b": "bfloat16 [1] checksum 1"},
}


def test_a_refits_metrics_are_the_slowest_workers():
    def report(total: float, rate: float | None) -> dict:
        seconds = {"total": total, "gather": 1.0, "transfer": 0.25, "load": 0.125, "finish": 0.0625}
        return {"seconds": seconds, "code_change_rate": rate, "quantized": 4}

    metrics = refit_metrics([report(2.0, 0.1), report(8.0, None), report(4.0, 0.3)], RECEIPT)
    assert metrics["flashrl/refit_seconds"] == 8.0 and metrics["flashrl/refit_gigabytes"] == 4.0
    assert metrics["flashrl/refit_gather_seconds"] == 1.0 and metrics["flashrl/refit_verify_seconds"] == 0.0625
    assert metrics["flashrl/receipt_sum"] == 2 and metrics["flashrl/refit_tensors"] == 2
    assert metrics["flashrl/code_change_rate"] == pytest.approx(0.2), "of those that have one"
    assert "flashrl/code_change_rate" not in refit_metrics([report(1.0, None)], RECEIPT)


def test_the_report_draws_the_phases_that_the_metrics_name():
    assert set(palette.PHASES) == set(PHASES) == set(palette.SHADES) - {"other"}


def test_a_phase_of_no_measurable_time_leaves_finite_numbers():
    metrics = phase_metrics({"gen": 0.0, "step": 0.0}, generated_tokens=1)
    assert all(math.isfinite(value) for value in metrics.values())


INT8, BF16 = Precision.INT8, Precision.BF16
UNQUANTIZED = WORKER | {
    **{
        "precision": "bf16",
        "quantized_layers": 0,
        "unquantized_layers": dict.fromkeys("abcdefgh", "RowParallelLinear"),
    },
    **{"weight_bytes": 149, "quantized_bytes": 0, "quantized_bytes_as_bf16": 0},
    "kv_cache": {"dtypes": {"auto": 2}},
}


@pytest.mark.parametrize("change", [{"precision": "bf16"}, {"quantized_layers": 7}, {"head_dtype": "float32"}])
def test_workers_that_differ_stop_the_run(change):
    assert summarize_layers([[WORKER], [WORKER]], [INT8, INT8])["flashrl/weight_bytes"] == 200
    for replicas in ([[WORKER], [WORKER | change]], [[WORKER, WORKER | change], [WORKER, WORKER]]):
        with pytest.raises(ConfigError, match=r"differ.*\['int8', 'int8'\] was asked for"):
            summarize_layers(replicas, [INT8, INT8])


def test_a_mixture_is_summed_up_whole_and_told_by_replica():
    alike = summarize_layers([[WORKER, WORKER]] * 3, [INT8] * 3)
    assert alike["flashrl/bf16_replicas"] == 0 and not any("replica_" in key for key in alike)
    mixed = summarize_layers([[WORKER, WORKER], [WORKER, WORKER], [UNQUANTIZED, UNQUANTIZED]], [INT8, INT8, BF16])
    assert mixed == {
        "flashrl/bf16_replicas": 1,
        "flashrl/quantized_layers": 8,
        "flashrl/unquantized_layers": 0,
        "flashrl/fp32_lm_head": 0,
        "flashrl/kv_cache_bits": 8,
        "flashrl/weight_bytes": 4 * 100 + 2 * 149,
        "flashrl/quantized_bytes": 4 * 51,
        "flashrl/quantized_bytes_as_bf16": 4 * 100,
        **{f"flashrl/replica_{i}_quantized_layers": layers for i, layers in enumerate((8, 8, 0))},
        **{f"flashrl/replica_{i}_weight_bytes": size for i, size in enumerate((200, 200, 298))},
    }
    plain = summarize_layers([[UNQUANTIZED]] * 2, [BF16] * 2)
    assert plain["flashrl/bf16_replicas"] == 2 and plain["flashrl/kv_cache_bits"] == 16


@pytest.mark.parametrize(
    "replicas",
    [
        [[UNQUANTIZED], [WORKER]],  # the other way round
        [[WORKER], [WORKER]],
        [[UNQUANTIZED], [UNQUANTIZED]],
        [[WORKER], [UNQUANTIZED | {"head_dtype": "float32"}]],
        [[WORKER], [UNQUANTIZED | {"quantized_layers": 8}]],
        [[WORKER | {"quantized_layers": 0}], [UNQUANTIZED]],
        [[WORKER], [UNQUANTIZED, WORKER]],
    ],
)
def test_any_other_mixture_than_the_one_asked_for_stops_the_run(replicas):
    with pytest.raises(ConfigError, match=r"differ.*\['int8', 'bf16'\] was asked for"):
        summarize_layers(replicas, [INT8, BF16])


def report(quantized: int, rate: float | None, seconds: float) -> dict:
    receipt = {"step": 1, "tensors": 27, "bytes": 10, "checksums": {"a": 5}}
    parts = dict.fromkeys(("gather", "cast", "transfer", "load", "finish"), 0.1)
    return {
        "receipt": receipt,
        "seconds": {"total": seconds, **parts},
        "code_change_rate": rate,
        "quantized": quantized,
    }


@pytest.mark.parametrize("bf16_seconds", [0.5, 2.0])
def test_in_a_mixture_the_refit_tells_of_quantized_replicas_whichever_was_slower(bf16_seconds):
    metrics = refit_metrics([report(14, 0.2, 1.0), report(14, 0.4, 1.0), report(0, None, bf16_seconds)], RECEIPT)
    assert metrics["flashrl/refit_quantized"] == 14
    assert metrics["flashrl/code_change_rate"] == pytest.approx(0.3)
    assert metrics["flashrl/refit_seconds"] == max(1.0, bf16_seconds)


# ---- the file ----


def write(path, resumed_step, steps) -> list[dict]:
    file = MetricsFile(path, resumed_step)
    for step in steps:
        file.log({"a/b": np.float32(step)}, step)
    file.finish()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_step_and_data_as_verl_writes_it(tmp_path, monkeypatch):
    from verl.utils.tracking import FileLogger

    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "verl.jsonl"))
    theirs = FileLogger("p", "e")
    theirs.log({"a/b": np.float32(3)}, 3)
    theirs.finish()
    write(tmp_path / "ours.jsonl", 0, [3])
    assert (tmp_path / "ours.jsonl").read_bytes() == (tmp_path / "verl.jsonl").read_bytes()


def test_a_fresh_run_starts_a_new_file_and_a_resumed_one_drops_what_it_trains_again(tmp_path):
    path = tmp_path / "folder" / "metrics.jsonl"
    write(path, 0, [0, 7])
    write(path, 0, [0, 1, 2, 3, 4, 5])
    with open(path, "ab") as f:
        f.write(b'{"step": 6, "da')  # torn
    assert [x["step"] for x in write(path, 4, [4, 5, 6])] == [0, 1, 2, 3, 4, 4, 5, 6]
    assert [x["step"] for x in write(tmp_path / "none.jsonl", 5, [6])] == [6]


@pytest.mark.parametrize("variable", ["VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT", None])
def test_the_path_is_the_one_verl_would_use(tmp_path, monkeypatch, variable):
    from verl.utils.tracking import FileLogger

    monkeypatch.chdir(tmp_path)
    for name in ("VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, str(tmp_path / "there"))
    theirs = FileLogger("project", "experiment")
    theirs.finish()
    assert metrics_path("project", "experiment").resolve() == (tmp_path / theirs.filepath).resolve()
