# SPDX-License-Identifier: Apache-2.0
"""Every rank of a CPU engine gets cores, and vLLM reads them as meant."""

import os

import pytest

from flashrl_verl.platforms.cores import VARIABLE, bind_ranks, share_cores


@pytest.mark.parametrize(
    "cores, ranks, expected",
    [
        ([0, 1], 2, "0|1"),
        ([0, 1, 2, 3], 2, "0,1|2,3"),
        ([3, 5, 7], 2, "3|5,7"),
        ([4], 2, "4|4"),
        ([0, 1], 4, "0|1|0|1"),
        ([0, 1], 1, "0,1"),
    ],
)
def test_every_rank_gets_its_own_cores_while_there_are_enough(cores, ranks, expected):
    from vllm.utils.cpu_resource_utils import parse_id_list

    assert share_cores(cores, ranks) == expected
    lists = [parse_id_list(words) for words in expected.split("|")]
    assert len(lists) == ranks and all(lists)
    assert {core for cores in lists for core in cores} == set(cores)


def test_one_rank_and_a_users_own_choice_are_left_alone(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    bind_ranks(1)
    assert VARIABLE not in os.environ
    monkeypatch.setenv(VARIABLE, "nobind")
    bind_ranks(2)
    assert os.environ[VARIABLE] == "nobind"
