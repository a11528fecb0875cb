# SPDX-License-Identifier: Apache-2.0
"""A fraction of the replicas is in BF16: the last ones, at least one and not all; each server gets its own settings,
and CUDA graphs for as many sequences as may run."""

import pytest

from flashrl_verl.errors import ConfigError
from flashrl_verl.rollout import server
from flashrl_verl.rollout.replicas import bf16_replicas, precisions, settings_of
from flashrl_verl.rollout.server import FlashRLHttpServer
from flashrl_verl.settings import FlashRLConfig, Precision
from flashrl_verl.tools.recipe_process import compose

INT8, FP8, BF16 = Precision.INT8, Precision.FP8, Precision.BF16


def mixed(fraction: float, precision: Precision = INT8) -> FlashRLConfig:
    return FlashRLConfig(precision=precision, bf16_replica_fraction=fraction)


def test_every_number_of_replicas_can_be_reached_and_halves_are_rounded_up():
    for replicas in range(2, 20):
        assert [bf16_replicas(mixed(n / replicas), replicas) for n in range(replicas)] == list(range(replicas))
    assert [bf16_replicas(mixed(0.5), replicas) for replicas in (2, 3, 5)] == [1, 2, 3]
    assert bf16_replicas(mixed(0.0), 1) == 0


@pytest.mark.parametrize(("fraction", "replicas"), [(0.1, 4), (0.9, 4), (0.5, 1), (0.999, 2), (0.01, 40), (0.5, 0)])
def test_what_would_be_no_mixture_is_refused(fraction, replicas):
    with pytest.raises(ConfigError, match="flashrl.bf16_replica_fraction=.*replicas.*Remedy"):
        bf16_replicas(mixed(fraction), replicas)


def test_the_last_replicas_are_in_bf16_and_nothing_else_of_their_settings_changes():
    assert precisions(mixed(0.5, FP8), 3) == [FP8, BF16, BF16]
    assert precisions(FlashRLConfig(precision=BF16), 3) == [BF16] * 3
    settings = FlashRLConfig(bf16_replica_fraction=0.5, ignore=("a",), ship_code=False, kv_cache="int8_per_token_head")
    own = [settings_of(settings, replica, 4) for replica in range(4)]
    same = {"ignore": ("a",), "ship_code": False}
    assert own[:2] == [FlashRLConfig(kv_cache="int8_per_token_head", **same)] * 2
    assert own[2:] == [FlashRLConfig(precision=BF16, **same)] * 2
    assert settings_of(FlashRLConfig(), 0, 1) == FlashRLConfig()


@pytest.mark.parametrize(
    ("device", "words", "chosen", "largest"),
    [
        ("cuda", ["max_num_seqs=1024"], {}, 1024),
        ("cuda", ["max_num_seqs=512"], {}, None),  # vLLM's own
        ("cpu", ["max_num_seqs=1024"], {}, None),
        ("cuda", ["max_num_seqs=1000"], {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, 1008),
        ("cuda", ["max_num_seqs=256"], {"max_num_seqs": 600}, 608),
        ("cuda", ["max_num_seqs=1024"], {"max_cudagraph_capture_size": 600}, 600),
        ("cuda", ["max_num_seqs=1024"], {"compilation_config": '{"cudagraph_capture_sizes": [8]}'}, None),
        ("cuda", ["max_num_seqs=1024"], {"speculative_config": {"method": "ngram"}}, None),
        ("cuda", ["max_num_seqs=1024", "cudagraph_capture_sizes=[8]"], {}, None),
    ],
)
def test_cuda_graphs_are_captured_for_as_many_sequences_as_may_run(monkeypatch, device, words, chosen, largest):
    monkeypatch.setattr(server, "vllm_device", lambda: device)
    engine = object.__new__(FlashRLHttpServer)
    composed = compose(["experiment=smoke", *(f"actor_rollout_ref.rollout.{word}" for word in words)])
    engine.config, engine.flashrl = composed.actor_rollout_ref.rollout, FlashRLConfig()
    engine._preprocess_engine_kwargs(arguments := dict(chosen))
    assert arguments.get("max_cudagraph_capture_size") == largest
    assert chosen.items() <= arguments.items()
