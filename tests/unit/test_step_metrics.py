# SPDX-License-Identifier: Apache-2.0
"""Shares of a step sum to one, and speeds are tokens over the seconds of their own phase."""

import math

import pytest

from flashrl_verl.errors import ConfigError
from flashrl_verl.step_metrics import phase_metrics, summarize_layers

SECONDS = {"gen": 5.0, "old_log_prob": 1.0, "adv": 0.25, "update_actor": 2.0, "update_weights": 0.75, "step": 10.0}
WORKER = {
    **{"precision": "int8", "quantized_layers": 8, "head_dtype": "bfloat16", "unquantized_layers": {}},
    **{"weight_bytes": 100, "quantized_bytes": 51, "quantized_bytes_as_bf16": 100},
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


def test_a_phase_of_no_measurable_time_leaves_finite_numbers():
    metrics = phase_metrics({"gen": 0.0, "step": 0.0}, generated_tokens=1, trained_tokens=1)
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("change", [{"precision": "bf16"}, {"quantized_layers": 7}, {"head_dtype": "float32"}])
def test_replicas_that_differ_stop_the_run(change):
    assert summarize_layers([WORKER, WORKER])["flashrl/weight_bytes"] == 200
    with pytest.raises(ConfigError, match="differ"):
        summarize_layers([WORKER, WORKER | change])
