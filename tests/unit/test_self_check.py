# SPDX-License-Identifier: Apache-2.0
"""The self-check's comparison: anything that is not the same is named, and stops the run."""

import dataclasses
import math

import pytest

from flashrl_verl.errors import FlashRLError
from flashrl_verl.refit.self_check import EngineState, differences, prompt, require_same

STATE = EngineState(
    workers=[{"a.weight": (11, 0x1000), "a.scale": (12, 0x2000)}, {"a.weight": (21, 0x3000)}],
    token_ids=[4, 5, 6],
    log_probs=[-0.5, -1.0, -0.25],
)


@pytest.mark.parametrize(
    "change, words",
    [
        (
            {"workers": [{"a.weight": (11, 0x1000), "a.scale": (12, 0x2000)}, {"a.weight": (22, 0x3000)}]},
            "worker 1: with other",
        ),
        (
            {"workers": [{"a.weight": (11, 0x1000), "a.scale": (12, 0x2010)}, {"a.weight": (21, 0x3000)}]},
            "worker 0: moved: a.scale",
        ),
        ({"workers": [{"a.weight": (11, 0x1000)}, {"a.weight": (21, 0x3000)}]}, "worker 0: there only once: a.scale"),
        ({"token_ids": [4, 5, 7]}, "greedy tokens [4, 5, 7] instead of [4, 5, 6]"),
        ({"log_probs": [-0.5, -1.01, -0.25]}, "differ by up to 0.01"),
        ({"log_probs": [-0.5, math.nan, -0.25]}, "log-probs of the same greedy tokens"),
    ],
)
def test_whatever_changed_is_named_with_its_replica(change, words):
    after = dataclasses.replace(STATE, **change)
    assert words in "; ".join(differences(STATE, after))
    with pytest.raises(FlashRLError) as caught:
        require_same([STATE, STATE], [STATE, after], "sleep at level 1")
    message = str(caught.value)
    assert "after sleep at level 1" in message and f"replica 1: {differences(STATE, after)[0]}" in message
    assert "replica 0" not in message and "flashrl.self_check=false" in message


def test_the_same_state_passes_and_rounding_of_log_probs_too():
    require_same([STATE], [dataclasses.replace(STATE, log_probs=[-0.5, -1.0004, -0.25])], "sleep")


@pytest.mark.parametrize("vocabulary", [20, 262, 151_936])
def test_the_prompt_is_made_of_tokens_the_model_has(vocabulary):
    ids = prompt(vocabulary)
    assert len(ids) == 16 and all(0 <= i < vocabulary for i in ids) and len(set(ids)) > 10
