# SPDX-License-Identifier: Apache-2.0
"""A fraction of the replicas is in BF16: the last ones, at least one and not all, whoever counts."""

import pytest

from flashrl_verl.errors import ConfigError
from flashrl_verl.rollout.replicas import bf16_replicas, describe, precisions, settings_of
from flashrl_verl.settings import FlashRLConfig, Precision

INT8, FP8, BF16 = Precision.INT8, Precision.FP8, Precision.BF16


def mixed(fraction: float, precision: Precision = INT8) -> FlashRLConfig:
    return FlashRLConfig(precision=precision, bf16_replica_fraction=fraction)


@pytest.mark.parametrize(
    ("fraction", "replicas", "count"),
    [
        (0.5, 2, 1),
        (0.5, 3, 2),
        (0.5, 5, 3),
        (0.5, 4, 2),
        (0.25, 4, 1),
        (0.75, 4, 3),
        (0.1, 8, 1),
        (0.0, 1, 0),
        (0.0, 8, 0),
    ],
)
def test_halves_are_rounded_up(fraction, replicas, count):
    assert bf16_replicas(mixed(fraction), replicas) == count


def test_every_number_of_replicas_can_be_reached():
    for replicas in range(2, 20):
        assert [bf16_replicas(mixed(n / replicas), replicas) for n in range(replicas)] == list(range(replicas))


@pytest.mark.parametrize(("fraction", "replicas"), [(0.1, 4), (0.9, 4), (0.5, 1), (0.999, 2), (0.01, 40), (0.5, 0)])
def test_what_would_be_no_mixture_is_refused(fraction, replicas):
    with pytest.raises(ConfigError, match="flashrl.bf16_replica_fraction=.*replicas.*Remedy"):
        bf16_replicas(mixed(fraction), replicas)


def test_the_last_replicas_are_in_bf16():
    assert precisions(mixed(0.5, FP8), 3) == [FP8, BF16, BF16]
    assert precisions(FlashRLConfig(precision=BF16), 3) == [BF16] * 3


def test_each_replica_gets_settings_of_its_own_and_nothing_else_changes():
    settings = FlashRLConfig(bf16_replica_fraction=0.5, ignore=("a",), ship_code=False, kv_cache="int8_per_token_head")
    own = [settings_of(settings, replica, 4) for replica in range(4)]
    assert [s.precision for s in own] == [INT8, INT8, BF16, BF16]
    assert [s.kv_cache.value for s in own] == ["int8_per_token_head"] * 2 + ["auto"] * 2
    assert all(s.bf16_replica_fraction == 0 and s.ignore == ("a",) and not s.ship_code for s in own)
    assert settings_of(FlashRLConfig(), 0, 1) == FlashRLConfig()


def test_a_mixture_is_described_with_its_numbers():
    assert describe([INT8]) == describe([INT8] * 4) == "int8" and describe([BF16] * 2) == "bf16"
    assert describe([INT8, BF16]) == "int8 (1 of 2 replicas, the other in bf16)"
    assert describe([FP8, BF16, BF16]) == "fp8 (1 of 3 replicas, the others in bf16)"
