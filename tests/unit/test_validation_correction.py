# SPDX-License-Identifier: Apache-2.0
"""A correction that nothing would read, or that is another than its name says, is refused; so is a sampler it cannot follow."""

import json

import pytest
from refusals import ACTOR, CORRECTION, ROLLOUT, assert_refused, changed, composed, names, refusal

from flashrl_verl.validation import validate_config

NO_CORRECTION = {f"{CORRECTION}.rollout_is": None, f"{CORRECTION}.rollout_is_threshold": None}
REJECTION = {f"{CORRECTION}.rollout_rs": "seq_mean_k1", f"{CORRECTION}.rollout_rs_threshold": "0.999_1.001"}
BYPASS = {f"{CORRECTION}.bypass_mode": True, f"{ACTOR}.policy_loss.loss_mode": "bypass_mode"}

REFUSED = [
    # the correction itself
    ({f"{CORRECTION}.bypass_mode": True}, "bypass_mode=true", "correction=bypass"),
    (
        {f"{ACTOR}.policy_loss.loss_mode": "bypass_mode"},
        "loss_mode=bypass_mode",
        f"{ACTOR}.policy_loss.loss_mode=vanilla",
    ),
    (
        {f"{CORRECTION}.rollout_is_threshold": "0.5_5.0", **BYPASS, f"{CORRECTION}.loss_type": "reinforce"},
        "rollout_is_threshold=0.5_5.0",
        f"{CORRECTION}.rollout_is_threshold=2.0",
    ),
    ({**BYPASS}, "rollout_is=token", f"{CORRECTION}.rollout_is=null"),
    (
        {f"{ACTOR}.ppo_mini_batch_size": 7, **BYPASS, f"{CORRECTION}.rollout_is": None},
        "ppo_mini_batch_size=7",
        "divides data.train_batch_size",
    ),
    (
        {**BYPASS, f"{CORRECTION}.rollout_is": None, f"{CORRECTION}.loss_type": "reinforce"},
        "loss_type=reinforce",
        f"{CORRECTION}.rollout_is=token",
    ),
    (
        {**BYPASS, f"{CORRECTION}.loss_type": "reinforce", f"{CORRECTION}.rollout_is_batch_normalize": True},
        "rollout_is_batch_normalize=true",
        f"{CORRECTION}.rollout_is_batch_normalize=false",
    ),
    # settings that nothing would read
    ({f"{CORRECTION}.loss_type": "reinforce"}, "loss_type=reinforce", "correction=bypass"),
    ({f"{CORRECTION}.rollout_rs_threshold": 0.1}, "rollout_rs_threshold=0.1", "correction=geo_rs"),
    (
        {f"{CORRECTION}.rollout_is_batch_normalize": True, f"{CORRECTION}.rollout_is": None},
        "rollout_is_batch_normalize=true",
        "correction=tis",
    ),
    (
        {f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.loss_type": "clip"},
        "loss_type=clip",
        f"{CORRECTION}.loss_type=ppo_clip",
    ),
    ({"algorithm.adv_estimator": "optimal_token_baseline"}, "estimator=optimal_token_baseline", "algorithm.adv_estimator=grpo"),
    (
        {"algorithm.adv_estimator": "reinforce_plus_plus", **REJECTION},
        "estimator=reinforce_plus_plus",
        f"{CORRECTION}.rollout_rs=null",
    ),
    ({f"{CORRECTION}.rollout_is": "word"}, "rollout_is=word", f"{CORRECTION}.rollout_is=token"),
    ({f"{CORRECTION}.rollout_is_threshold": None}, "threshold=null", "rollout_is_threshold=2.0"),
    ({f"{CORRECTION}.rollout_is_threshold": 0}, "threshold=0", "rollout_is_threshold=2.0"),
    ({f"{CORRECTION}.rollout_is_threshold": -2.0}, "threshold=-2.0", "rollout_is_threshold=2.0"),
    ({f"{CORRECTION}.rollout_is_threshold": True}, "threshold=true", "rollout_is_threshold=2.0"),
    ({f"{CORRECTION}.rollout_is_threshold": "two"}, "threshold=two", "rollout_is_threshold=2.0"),
    ({f"{CORRECTION}.rollout_is_threshold": "nan"}, "threshold=nan", "rollout_is_threshold=2.0"),
    ({f"{CORRECTION}.rollout_is_threshold": "5.0_0.5"}, "threshold=5.0_0.5", "0.5_5.0"),
    ({f"{CORRECTION}.rollout_is_threshold": 0.5}, "threshold=0.5", "at least 1"),
    ({f"{CORRECTION}.rollout_rs": "geo"}, "rollout_rs=geo", "correction=geo_rs"),
    ({f"{CORRECTION}.rollout_rs": "token_k1"}, "rollout_rs_threshold=null", f"{CORRECTION}.rollout_rs_threshold="),
    ({**REJECTION, f"{CORRECTION}.rollout_rs_threshold": 0.5}, "rollout_rs_threshold=0.5", "rollout_rs_threshold="),
    ({**REJECTION, f"{ROLLOUT}.top_p": 0.9, f"{CORRECTION}.rollout_is": None}, f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_p=1.0"),
    # TIS needs the log-probs of the policy that sampled, and that policy whole
    ({f"{ROLLOUT}.calculate_log_probs": False}, "probs=false", f"{ROLLOUT}.calculate_log_probs=true"),
    ({f"{ROLLOUT}.top_p": 0.9}, f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_p=1.0"),
    ({f"{ROLLOUT}.top_k": 50}, f"{ROLLOUT}.top_k=50", f"{ROLLOUT}.top_k=-1"),
    ({f"{ROLLOUT}.min_p": 0.05}, f"{ROLLOUT}.min_p=0.05", f"remove {ROLLOUT}.min_p"),
    ({f"{ROLLOUT}.repetition_penalty": 1.1}, "penalty=1.1", f"{ROLLOUT}.repetition_penalty=1.0"),
    ({f"{ROLLOUT}.logprobs_mode": "raw_logprobs"}, "mode=raw_logprobs", "logprobs_mode=processed_logprobs"),
    # metrics without weights (correction=metrics_only) mean the same only under the same rules
    *(
        ({key: value, f"{CORRECTION}.rollout_is": None}, f"{key.rpartition('.')[2]}={json.dumps(value)}", "correction=none")
        for key, value in ((f"{ROLLOUT}.calculate_log_probs", False), (f"{ROLLOUT}.top_p", 0.9), (f"{ROLLOUT}.top_k", 50))
    ),
    # greedy training samples
    ({f"{ROLLOUT}.temperature": 0}, f"{ROLLOUT}.temperature=0", f"{ROLLOUT}.temperature=1.0"),
    ({f"{ROLLOUT}.temperature": -1.0, **NO_CORRECTION}, f"{ROLLOUT}.temperature=-1.0", f"{ROLLOUT}.temperature=1.0"),
]


@pytest.mark.parametrize(("settings", "value", "remedy"), REFUSED, ids=names(REFUSED))
def test_what_makes_the_ratio_another_one_is_refused_with_value_reason_and_remedy(settings, value, remedy):
    assert_refused(settings, value, remedy)


ACCEPTED = [
    {f"{ROLLOUT}.top_k": 0},
    {f"{ROLLOUT}.top_p": 1},
    {f"{ROLLOUT}.min_p": 0.0},
    {f"{ROLLOUT}.repetition_penalty": 1},
    {f"{ROLLOUT}.val_kwargs.top_p": 0.7, f"{ROLLOUT}.val_kwargs.top_k": 20},
    {f"{CORRECTION}.rollout_is": "sequence", f"{CORRECTION}.rollout_is_threshold": "5.0"},
    {f"{CORRECTION}.rollout_is_threshold": "0.5_5.0"},
    NO_CORRECTION,
    {**NO_CORRECTION, f"{ROLLOUT}.top_p": 0.9, f"{ROLLOUT}.calculate_log_probs": False},
    {f"{ROLLOUT}.temperature": 0.6, f"{ROLLOUT}.val_kwargs.temperature": 0},
]


@pytest.mark.parametrize("settings", ACCEPTED, ids=[",".join(row) for row in ACCEPTED])
def test_a_correction_that_is_merely_unusual_is_accepted(settings):
    validate_config(changed(settings))


def test_a_pair_that_yaml_reads_as_a_number_is_explained():
    message = refusal(composed(f"{CORRECTION}.rollout_is_threshold=0.5_5"))
    assert "threshold=0.55" in message and "YAML reads 0.5_5 as the number 0.55" in message
