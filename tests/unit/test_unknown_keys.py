# SPDX-License-Identifier: Apache-2.0
"""What a misspelt override was meant to be: a key or group of the configuration that the words choose, nothing far off."""

from pathlib import Path

import pytest
from omegaconf.errors import OmegaConfBaseException

from flashrl_verl import unknown_keys
from flashrl_verl.errors import ConfigError
from flashrl_verl.quickstart import compose
from flashrl_verl.unknown_keys import GROUPS, hints, near_key
from flashrl_verl.validation import validate_config

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "recipe" / "flashrl" / "config"
ROLLOUT = "actor_rollout_ref.rollout"


def meant(*words: str) -> list[str]:
    return [line.partition("Did you mean ")[2].partition("?")[0] for line in hints(words, CONFIGS, "flashrl_trainer")]


def test_every_misspelt_word_is_told_what_it_may_have_been():
    told = {
        "corection=icepop": "correction",
        "precison=int8": "precision",
        "experimnt=quickstart": "experiment",
        "hydra/job_loging=none": "hydra/job_logging",
        "actor@actor_rollout_ref.acto=dp_actor": "actor@actor_rollout_ref.actor",
        "trianer={}": "trainer",
        "trainer/nnodes=2": "trainer.nnodes",
        "trianer.nnodes=2": "trainer.nnodes",
        "save_freq=10": "trainer.save_freq",
        "flashrl.precison=int8": "flashrl.precision",
        "flashrl.gard.action=stop": "flashrl.guard.action",
        "flashrl.guard.actoin=stop": "flashrl.guard.action",
        "trainer.n_gpus_pernode=4": "trainer.n_gpus_per_node",
        "data.train_batch=64": "data.train_batch_size",
        "actor_rollout_ref.actor.lr=1e-6": "actor_rollout_ref.actor.optim.lr",
        f"{ROLLOUT}.gpu_memory_utilisation=0.5": f"{ROLLOUT}.gpu_memory_utilization",
    }
    assert meant(*told) == list(told.values())


def test_a_group_that_a_plus_made_a_key_of_is_refused():
    assert {folder.name for folder in (ROOT / "flashrl_verl" / "configs").iterdir() if folder.is_dir()} - {"__pycache__"} == {
        *GROUPS
    }
    with pytest.raises(ConfigError, match=r"corection=icepop is read by nothing\. Set correction=icepop without a \+"):
        validate_config(compose(["experiment=base", "+corection=icepop"]))
    validate_config(compose(["experiment=base", "+my_own={a: 1}"]))


def test_what_is_there_or_far_from_everything_is_passed_over():
    there = ["correction=icepop", "trainer.nnodes=2", "flashrl.guard={}", "hydra.run.dir=x", "~critic", "+a=1", "--cfg", "job"]
    unlike = ["trainer/x=1", "lr=1", "model=hf_model", "trainer.no_such_key=1", f"{ROLLOUT}.n_sample=8", "data.train=x"]
    assert meant(*there, *unlike, "not an override") == []


def test_keys_are_those_of_the_groups_that_the_words_choose():
    word = "ray_kwargs.ray_init.num_gpu=1"  # hardware=cpu, which the experiment chooses, has num_gpus
    assert meant(word) == []
    assert meant("experiment=quickstart", word) == ["ray_kwargs.ray_init.num_gpus"]


def test_a_misspelt_choice_leaves_the_keys_unknown_and_the_groups_known():
    assert meant("experiment=quikstart", "ray_kwargs.ray_init.num_gpus=1", "flashrl.precison=int8") == []
    assert meant("experiment=quikstart", "hardwear=cpu") == ["hardware"]


def test_what_does_not_compose_has_no_hints(monkeypatch):
    def refuse(*args, **kwargs):
        raise OmegaConfBaseException("a broken interpolation")

    monkeypatch.setattr(unknown_keys, "compose", refuse)
    assert meant("flashrl.precison=int8") == []


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("a.samples", "a.sampled"),  # beside it before the same name elsewhere
        ("b.top", None),  # two that it may be the beginning of
        ("c.top", "c.top_p"),
        ("abcdefg.samplez", "abcdefh.samples"),
        ("a.number", "a.node.number"),
        ("a.value", None),  # in two nodes
        ("a.node", None),  # Hydra takes a node's name
    ],
)
def test_likeness_is_looked_for_beside_a_key_then_throughout_then_deeper(key, found):
    leaves = ["b.samples", "a.sampled", "b.top_p", "b.top_k", "c.top_p", "abcdefh.samples"]
    assert near_key(key, [*leaves, "a.node.number", "a.node.value", "a.other.value"]) == found


def test_one_wrong_letter_in_six_is_a_misspelling():
    there = ["actoin", "guard", "seed", "do_sample"]
    found = {key: near_key(key, there) for key in ("action", "gard", "sead", "n_sample")}
    assert found == {"action": "actoin", "gard": "guard", "sead": None, "n_sample": None}
