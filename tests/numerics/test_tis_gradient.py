# SPDX-License-Identifier: Apache-2.0
"""The gradient of DAPO's clipped token-mean loss with TIS weights: verl's own loss against float64 by hand.

For token t of N:  dL / d log pi_theta(a_t) = -1/N w_t A_t r_t  where the clip is inactive, else 0,
with r_t = pi_theta / pi_old, w_t = min(pi_old / pi_rollout, C), and w_t a constant.
"""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict

from flashrl_verl.correction.batch import attach_correction, correct_shard
from flashrl_verl.correction.settings import CorrectionSettings, Level

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
CAP = 2.0
TIS = CorrectionSettings(level=Level.TOKEN, upper=CAP)


def actor_config():
    from verl.workers.config import ActorConfig

    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=CLIP_LOW,
        clip_ratio_high=CLIP_HIGH,
        clip_ratio_c=10.0,
        loss_agg_mode="token-mean",
    )


def jagged(values: torch.Tensor) -> torch.Tensor:
    """One response of all the values."""
    bounds = {"min_seqlen": len(values), "max_seqlen": len(values)}
    return torch.nested.nested_tensor_from_jagged(values, offsets=torch.tensor([0, len(values)]), **bounds)


def ppo_batch(old: torch.Tensor, rollout: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> TensorDict:
    """What one micro-batch of verl's actor holds: a prompt of one token and one response of len(old)."""
    from verl.utils import tensordict_utils as tu

    tokens = torch.arange(len(old))
    data = TensorDict(
        {
            "prompts": jagged(tokens[:1]),
            "responses": jagged(tokens),
            "response_mask": jagged(mask),
            "old_log_probs": jagged(old),
            "rollout_log_probs": jagged(rollout),
            "advantages": jagged(advantages),
        },
        batch_size=1,
    )
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=1)
    return data


def gradients(ratio, importance, advantages, mask=None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Runs attach_correction and verl's ppo_loss.

    Args:
        ratio: pi_theta / pi_old by token. `importance`: pi_old / pi_rollout. `advantages`: A.
        importance: see `ratio`.
        advantages: see `ratio`.
        mask: 0/1 by token; all ones by default.

    Returns:
        Gradients of the loss by log pi_theta, log pi_old and log pi_rollout (None where none arrived).
    """
    from verl.workers.utils.losses import ppo_loss

    ratio, importance, advantages = (torch.tensor(x, dtype=torch.float64) for x in (ratio, importance, advantages))
    mask = torch.ones(len(ratio), dtype=torch.long) if mask is None else torch.tensor(mask)
    old = torch.linspace(-1.0, -2.0, len(ratio), dtype=torch.float64).requires_grad_()
    rollout = (old.detach() - importance.log()).requires_grad_()
    theta = (old.detach() + ratio.log()).requires_grad_()
    data = ppo_batch(old, rollout, advantages, mask)
    attach_correction(data, TIS)
    # The model's output at position i is the log-prob of token i + 1; the last position predicts nothing.
    output = {"log_probs": jagged(torch.cat([theta, theta.new_zeros(1)]))}
    loss, _ = ppo_loss(actor_config(), output, data)
    loss.backward()
    return theta.grad, old.grad, rollout.grad


@pytest.mark.parametrize(
    ("ratio", "importance", "advantages", "by_hand"),
    [
        # token 1 inside the clip, w = 1.5; token 2 above 1 + eps_high with A > 0: clipped
        ((1.1, 1.5), (1.5, 1.2), (1.5, 1.5), (-1.5 * 1.5 * 1.1 / 2, 0.0)),
        # token 1 weighted by the cap 2, not by 3; token 2 below 1 - eps_low with A < 0: clipped
        ((1.0, 0.7), (3.0, 0.5), (2.0, -1.0), (-2.0 * 2.0 * 1.0 / 2, 0.0)),
        # outside the range on the sides where the clip does not act; w = 0.5 and the cap
        ((0.7, 1.5), (0.5, 40.0), (1.0, -1.0), (-0.5 * 1.0 * 0.7 / 2, 2.0 * 1.0 * 1.5 / 2)),
        # between 1 + eps_low and 1 + eps_high: DAPO's higher upper clip leaves it alone
        ((1.25, 1.0), (1.0, 1.0), (1.0, 0.0), (-1.25 / 2, 0.0)),
    ],
)
def test_gradient_is_the_formula(ratio, importance, advantages, by_hand) -> None:
    by_theta, _, _ = gradients(ratio, importance, advantages)
    torch.testing.assert_close(by_theta, torch.tensor(by_hand, dtype=torch.float64), rtol=1e-12, atol=1e-15)


def test_no_gradient_flows_through_the_weight() -> None:
    """pi_old enters through r and w. Only r's part arrives, the negative of theta's; pi_rollout gets none."""
    by_theta, by_old, by_rollout = gradients((1.1, 0.9), (1.5, 0.6), (1.5, -0.5))
    assert by_theta.abs().min() > 0.1
    torch.testing.assert_close(by_old, -by_theta, rtol=1e-12, atol=0.0)
    assert by_rollout is None


def test_masked_tokens_neither_count_nor_get_a_gradient() -> None:
    by_theta, _, _ = gradients((1.1, 1.0, 1.0), (1.5, 1.3, 0.8), (1.5, 2.0, 1.0), mask=(1, 0, 1))
    by_hand = torch.tensor([-1.5 * 1.5 * 1.1 / 2, 0.0, -0.8 / 2], dtype=torch.float64)
    torch.testing.assert_close(by_theta, by_hand, rtol=1e-12, atol=1e-15)


def test_uncapped_weights_remove_the_bias_of_the_sampler() -> None:
    """E over a ~ pi_rollout of the weighted gradient is E over a ~ pi_theta of the policy gradient.

    All actions of a small vocabulary are enumerated, so both expectations are exact; pi_old = pi_theta.
    """
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla

    random = torch.Generator().manual_seed(0)
    logits, noise, advantages = torch.randn(3, 6, dtype=torch.float64, generator=random)
    rollout = (logits + 0.3 * noise).log_softmax(-1)

    def expected_gradient(sampler: torch.Tensor, cap: float | None) -> torch.Tensor:
        parameter = logits.clone().requires_grad_()
        theta = parameter.log_softmax(-1)
        loss = torch.zeros((), dtype=torch.float64)
        for action, probability in enumerate(sampler.exp()):
            log_prob, mask = theta[None, action : action + 1], torch.ones(1, 1)
            weights = None
            if cap is not None:
                settings = CorrectionSettings(level=Level.TOKEN, upper=cap)
                weights = correct_shard(log_prob.detach(), sampler[None, action : action + 1], mask, settings).weights
            action_loss, _ = compute_policy_loss_vanilla(
                old_log_prob=log_prob.detach(),
                log_prob=log_prob,
                advantages=advantages[None, action : action + 1],
                response_mask=mask,
                config=actor_config(),
                rollout_is_weights=weights,
            )
            loss = loss + probability * action_loss
        loss.backward()
        return parameter.grad

    truth = expected_gradient(logits.log_softmax(-1), None)
    uncapped = expected_gradient(rollout, math.inf)
    torch.testing.assert_close(uncapped, truth, rtol=1e-9, atol=1e-12)
    bias = (expected_gradient(rollout, None) - truth).norm() / truth.norm()
    capped_bias = (expected_gradient(rollout, 1.2) - truth).norm() / truth.norm()
    assert bias > 0.1
    assert 0 < capped_bias < bias
