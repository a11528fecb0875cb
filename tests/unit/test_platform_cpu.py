# SPDX-License-Identifier: Apache-2.0
"""The CPU platform is used when it is chosen, and every rank gets cores. The runs of test_recipe.py train on it."""

import os

import pytest
from omegaconf import OmegaConf

from flashrl_verl.errors import ConfigError
from flashrl_verl.platforms import activate
from flashrl_verl.platforms.cores import VARIABLE, bind_ranks, share_cores


def test_a_config_for_the_cpu_contradicting_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "nvidia")
    activate(OmegaConf.create({"trainer": {"device": "cuda"}}))
    with pytest.raises(ConfigError, match="unset it or choose hardware=cuda"):
        activate(OmegaConf.create({"trainer": {"device": "cpu"}}))


def test_ranks_share_all_cores_evenly_and_vllm_reads_them_as_meant():
    from vllm.utils.cpu_resource_utils import parse_id_list

    for cores in ([4], [0, 1], [3, 5, 7], [0, 1, 2, 3]):
        for ranks in (1, 2, 4):
            lists = [parse_id_list(words) for words in share_cores(cores, ranks).split("|")]
            taken, sizes = [core for own in lists for core in own], [len(own) for own in lists]
            assert len(lists) == ranks and set(taken) == set(cores) and max(sizes) - min(sizes) <= 1
            assert len(taken) == max(ranks, len(cores)), "no core twice, unless there are fewer than ranks"


def test_one_rank_and_a_users_own_choice_are_unchanged(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    bind_ranks(1)
    assert VARIABLE not in os.environ
    monkeypatch.setenv(VARIABLE, "nobind")
    bind_ranks(2)
    assert os.environ[VARIABLE] == "nobind"
