# SPDX-License-Identifier: Apache-2.0
"""The chain task: its steps, its slip, its split and its reward."""

import random
import re

import pytest

from benchmarks.toy.chain import DATA_SOURCE, Chain, ChainConfig, compute_score
from flashrl_verl.errors import ConfigError
from flashrl_verl.quickstart.task import verl_rows

SMALL = ChainConfig(train=300, probe=40, test=60)


def test_a_chain_is_worked_out_step_by_step():
    chain = Chain(52, (-38, 27, -1))
    assert chain.prompt == "52-38+27-1="
    assert chain.answer == "52-38=14;14+27=41;41-1=40;#40" and chain.ground_truth == "40"
    assert chain.borrows == 1


def test_the_slip_forgets_to_borrow_and_goes_on_from_what_it_wrote():
    assert Chain(52, (-38, 27)).worked(random.Random(0), 1.0) == "52-38=24;24+27=51;#51"
    assert Chain(58, (-32, 27)).worked(random.Random(0), 1.0) == "58-32=26;26+27=53;#53", "nothing to borrow"


def test_every_right_response_is_right_and_every_step_follows_from_the_one_before():
    for chain in SMALL.split(1).train:
        steps, _, final = chain.answer.rpartition("#")
        value = chain.first
        for step in steps.split(";")[:-1]:
            a, term, result = re.fullmatch(r"(\d+)([+-]\d+)=(\d+)", step).groups()
            assert int(a) == value and int(a) + int(term) == int(result) and 0 <= int(result) <= 99
            value = int(result)
        assert sum(map(int, re.findall(r"[+-]?\d+", chain.prompt))) == value == int(final)


def test_slips_come_at_their_rate():
    chains, rng = [c for c in SMALL.split(0).train if c.borrows == 1], random.Random(5)
    slipped = sum(chain.worked(rng, 0.6) != chain.answer for chain in chains for _ in range(50))
    assert 0.55 < slipped / (50 * len(chains)) < 0.65


def test_no_held_out_chain_is_trained_on_and_the_seed_decides():
    split = SMALL.split(3)
    assert (len(split.train), len(split.probe), len(split.test)) == (300, 40, 60)
    assert len({*split.train, *split.probe, *split.test}) == 400
    assert split == SMALL.split(3) != SMALL.split(4)


def test_too_few_different_chains_are_refused():
    with pytest.raises(ConfigError, match="4300 different chains .* steps=1 gave"):
        ChainConfig(subtraction_rate=1e-9, steps=1, train=4000, probe=100, test=200).split(0)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("52-38=14;#14", 1.0),
        ("#14", 1.0),
        ("52-38=24;#24", 0.0),
        ("14", 0.0),
        ("#140", 0.0),
        ("#14 ", 0.0),
        ("#14#15", 0.0),
        ("", 0.0),
    ],
)
def test_the_number_behind_the_last_mark_is_rewarded(response, score):
    (row,) = verl_rows([Chain(52, (-38,))], split="test", data_source=DATA_SOURCE)
    assert compute_score(row["data_source"], response, row["reward_model"]["ground_truth"]) == {
        "score": score,
        "acc": score,
    }
    assert row["extra_info"] == {"split": "test", "index": 0, "borrows": 1}
