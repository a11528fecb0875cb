# SPDX-License-Identifier: Apache-2.0
"""Shares of a step sum to one, and speeds are tokens over the seconds of their own phase."""

import math

import pytest

from flashrl_verl.config import Precision
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.report import palette
from flashrl_verl.step_metrics import PHASES, kv_scale_metrics, phase_metrics, refit_metrics, summarize_layers

SECONDS = {"gen": 5.0, "old_log_prob": 1.0, "adv": 0.25, "update_actor": 2.0, "update_weights": 0.75, "step": 10.0}
WORKER = {
    **{"precision": "int8", "quantized_layers": 8, "head_dtype": "bfloat16", "unquantized_layers": {}},
    **{"weight_bytes": 100, "quantized_bytes": 51, "quantized_bytes_as_bf16": 100},
    "kv_cache": {"dtypes": {"fp8": 2}},
}


def test_shares_are_of_the_whole_step_and_sum_to_one():
    metrics = phase_metrics(SECONDS | {"testing": 30.0}, generated_tokens=600, trained_tokens=400)
    shares = {key.removeprefix("flashrl/share_"): value for key, value in metrics.items() if "share_" in key}
    expected = {"gen": 0.5, "old_log_prob": 0.1, "adv": 0.025, "update_actor": 0.2, "update_weights": 0.075, "other": 0.1}
    assert shares == pytest.approx(expected)
    assert sum(shares.values()) == pytest.approx(1.0)


def test_the_engines_speed_counts_what_they_generated_and_the_trainers_what_it_trained_on():
    metrics = phase_metrics(SECONDS, generated_tokens=600, trained_tokens=400)
    speeds = {key.removeprefix("flashrl/tokens_per_second_"): v for key, v in metrics.items() if "tokens_per_second" in key}
    assert speeds == pytest.approx({"gen": 120.0, "step": 40.0, "old_log_prob": 400.0, "update_actor": 200.0})


def test_in_bypass_mode_no_model_computes_old_log_probs():
    metrics = phase_metrics(SECONDS, generated_tokens=600, trained_tokens=400, bypass=True)
    assert "flashrl/tokens_per_second_old_log_prob" not in metrics and "flashrl/tokens_per_second_update_actor" in metrics
    assert metrics["flashrl/share_old_log_prob"] == pytest.approx(0.1)


def test_a_refits_metrics_are_the_slowest_workers():
    def report(total: float, rate: float | None) -> dict:
        seconds = {"total": total, "gather": 1.0, "cast": 0.5, "transfer": 0.25, "load": 0.125, "finish": 0.0625}
        receipt = {"bytes": 4 * 10**9, "tensors": 7, "step": 3, "checksums": {"a": 2**32 - 1, "b": 3}}
        return {
            **{"seconds": seconds, "receipt": receipt, "code_change_rate": rate},
            **{"updated": 7, "quantized": 4, "left_alone": ["x"]},
        }

    metrics = refit_metrics([report(2.0, 0.1), report(8.0, None), report(4.0, 0.3)])
    assert metrics["flashrl/refit_seconds"] == 8.0 and metrics["flashrl/refit_gigabytes_per_second"] == 0.5
    assert metrics["flashrl/refit_quantize_gigabytes_per_second"] == 32.0
    assert metrics["flashrl/receipt_sum"] == 2, "modulo 2^32"
    assert metrics["flashrl/code_change_rate"] == pytest.approx(0.2), "of those that have one"
    assert "flashrl/code_change_rate" not in refit_metrics([report(1.0, None)])


def test_the_largest_scales_of_all_workers_are_logged_and_none_at_all_is_an_error():
    one, two = {"q": 0.5, "k": 0.25, "v": 4.0}, {"q": 1.0, "k": 0.125, "v": 2.0}
    metrics = kv_scale_metrics([[one, two], [None, None]])
    assert [metrics[f"flashrl/kv_cache_{part}_scale"] for part in "qkv"] == [1.0, 0.25, 4.0]
    with pytest.raises(FlashRLError, match="flashrl.kv_cache=fp8, but no engine derived scales"):
        kv_scale_metrics([[None], [None]])


def test_the_report_draws_the_phases_that_the_metrics_name():
    assert set(palette.PHASES) == set(PHASES) == set(palette.SHADES) - {"other"}


def test_a_phase_of_no_measurable_time_leaves_finite_numbers():
    metrics = phase_metrics({"gen": 0.0, "step": 0.0}, generated_tokens=1, trained_tokens=1)
    assert all(math.isfinite(value) for value in metrics.values())


INT8, BF16 = Precision.INT8, Precision.BF16
UNQUANTIZED = WORKER | {
    **{"precision": "bf16", "quantized_layers": 0, "unquantized_layers": dict.fromkeys("abcdefgh", "RowParallelLinear")},
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
    counts = {"updated": 27, "quantized": quantized, "left_alone": []}
    return {"receipt": receipt, "seconds": {"total": seconds, **parts}, "code_change_rate": rate, **counts}


@pytest.mark.parametrize("bf16_seconds", [0.5, 2.0])
def test_in_a_mixture_the_refit_tells_of_quantized_replicas_whichever_was_slower(bf16_seconds):
    metrics = refit_metrics([report(14, 0.2, 1.0), report(14, 0.4, 1.0), report(0, None, bf16_seconds)])
    assert metrics["flashrl/refit_quantized"] == 14
    assert metrics["flashrl/code_change_rate"] == pytest.approx(0.3)
    assert metrics["flashrl/refit_seconds"] == max(1.0, bf16_seconds)
