# SPDX-License-Identifier: Apache-2.0
"""Rejection on the actors is verl's rejection on the driver only for estimators that read the mask for nothing but
places."""

import numpy as np
import pytest
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from flashrl_verl.validation import ROW_ESTIMATORS


def moved_by_rejection(estimator: str, **more) -> float:
    """How far a rejected response, two tokens, and a last token, which carries the reward, move kept tokens'
    advantages."""
    rewards = torch.zeros(8, 6)
    rewards[:, -1] = torch.rand(8, generator=torch.Generator().manual_seed(5))
    whole = torch.ones(8, 6)
    kept = whole.clone()
    kept[1], kept[2, 3], kept[5, -1] = 0, 0, 0
    config, groups = AlgoConfig(adv_estimator=estimator), np.repeat([0, 1], 4)
    before, after = (
        get_adv_estimator_fn(estimator)(
            token_level_rewards=rewards, response_mask=mask, index=groups, config=config, **more
        )[0]
        for mask in (whole, kept)
    )
    assert before.abs().max() > 0.1
    return float(((before - after) * kept).abs().max())


@pytest.mark.parametrize("estimator", ROW_ESTIMATORS)
def test_accepted_estimators_give_kept_tokens_the_same_advantage_before_and_after_rejection(estimator):
    assert moved_by_rejection(estimator) == 0


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo"])
def test_a_refused_estimator_gives_them_another(estimator):
    assert moved_by_rejection(estimator, gamma=1.0) > 1e-3
