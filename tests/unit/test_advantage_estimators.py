# SPDX-License-Identifier: Apache-2.0
"""Rejection on the actors is verl's rejection on the driver only for estimators that read the mask for nothing but
places."""

import numpy as np
import pytest
import torch

from flashrl_verl.validation import ROW_ESTIMATORS, WEIGHTED_ESTIMATORS


def advantages(estimator: str, mask: torch.Tensor, **more) -> torch.Tensor:
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    rows, width = mask.shape
    random = torch.Generator().manual_seed(5)
    rewards = torch.zeros(rows, width)
    rewards[:, -1] = torch.rand(rows, generator=random)
    arguments = {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "index": np.repeat(np.arange(rows // 4), 4),
        "config": AlgoConfig(adv_estimator=estimator),
        **more,
    }
    return get_adv_estimator_fn(estimator)(**arguments)[0]


def masks() -> tuple[torch.Tensor, torch.Tensor]:
    """[8, 6], whole and after rejection of a response, of single tokens and of a last token, which carries the
    reward."""
    whole = torch.ones(8, 6)
    kept = whole.clone()
    kept[1], kept[2, 3], kept[5, -1] = 0, 0, 0
    return whole, kept


@pytest.mark.parametrize("estimator", ROW_ESTIMATORS)
def test_accepted_estimators_give_kept_tokens_the_same_advantage_before_and_after_rejection(estimator):
    whole, kept = masks()
    before, after = advantages(estimator, whole), advantages(estimator, kept)
    assert before.abs().max() > 0.1
    torch.testing.assert_close(before * kept, after * kept, rtol=0, atol=0)


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo"])
def test_a_refused_estimator_gives_them_another(estimator):
    whole, kept = masks()
    before, after = advantages(estimator, whole, gamma=1.0), advantages(estimator, kept, gamma=1.0)
    assert (before * kept - after * kept).abs().max() > 1e-3


def test_the_estimators_named_are_verls():
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    assert {*ROW_ESTIMATORS, *WEIGHTED_ESTIMATORS} <= set(ADV_ESTIMATOR_REGISTRY)
