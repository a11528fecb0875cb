# SPDX-License-Identifier: Apache-2.0
"""The gradient of DAPO's clipped token-mean loss with importance weights: verl's own loss against float64 by hand.

For token t of N:  dL / d log pi_theta(a_t) = -1/N w_t A_t r_t  where the clip is inactive, else 0,
with r_t = pi_theta / pi_old, and the constant w_t = min(pi_old / pi_rollout, C), or 0 where t is rejected.
"""

import pytest
import torch
from tensordict import TensorDict

from flashrl_verl.correction.batch import attach_correction
from flashrl_verl.correction.settings import CorrectionSettings, Level


def jagged(values: torch.Tensor) -> torch.Tensor:
    """One response of all the values."""
    bounds = {"min_seqlen": len(values), "max_seqlen": len(values)}
    return torch.nested.nested_tensor_from_jagged(values, offsets=torch.tensor([0, len(values)]), **bounds)


VARIANTS = {
    "TIS": (CorrectionSettings(level=Level.TOKEN, upper=2.0), lambda w: w.clamp(max=2.0)),
    "IcePop": (CorrectionSettings(level=Level.TOKEN, lower=0.5, upper=5.0), lambda w: w * (w >= 0.5) * (w <= 5.0)),
    # Tokens are rejected by pi_rollout / pi_old.
    "TIS and rejection": (
        CorrectionSettings(level=Level.TOKEN, upper=2.0, rejections="token_k1", rejection_thresholds="0.25_1.6"),
        lambda w: w.clamp(max=2.0) * (1 / w >= 0.25) * (1 / w <= 1.6),
    ),
    "none": (CorrectionSettings(level=None), torch.ones_like),
}
"""Settings, and by hand the weight of a token from its pi_old / pi_rollout."""


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_gradient_is_the_formula_and_none_flows_through_the_weight(variant):
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    settings, weight = VARIANTS[variant]
    draws = torch.rand(5, 400, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    ratio, importance = ((2 * scale * draw - scale).exp() for scale, draw in zip((0.6, 2.5), draws[:2], strict=True))
    advantages, mask = 3 * draws[2] - 1.5, (draws[3] < 0.8).long()
    old = (-3 * draws[4]).requires_grad_()
    rollout = (old.detach() - importance.log()).requires_grad_()
    theta = (old.detach() + ratio.log()).requires_grad_()

    # What one micro-batch of verl's actor holds: a prompt of one token and one response.
    tokens = torch.arange(len(old))
    fields = {"prompts": tokens[:1], "responses": tokens, "response_mask": mask, "advantages": advantages}
    fields |= {"old_log_probs": old, "rollout_log_probs": rollout}
    data = TensorDict({name: jagged(field) for name, field in fields.items()}, batch_size=1)
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=1)
    attach_correction(data, settings)
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=10.0,
        loss_agg_mode="token-mean",
    )
    # The model's output at position i is the log-prob of token i + 1; the last position predicts nothing.
    loss, _ = ppo_loss(config, {"log_probs": jagged(torch.cat([theta, theta.new_zeros(1)]))}, data)
    loss.backward()

    clipped = torch.where(advantages > 0, ratio > 1.28, ratio < 0.8)
    by_hand = -weight(importance) * advantages * ratio * mask * ~clipped / mask.sum()
    torch.testing.assert_close(theta.grad, by_hand, rtol=1e-12, atol=1e-15)
    # pi_old enters through r and w. Only r's part arrives, the negative of theta's; pi_rollout gets none.
    torch.testing.assert_close(old.grad, -by_hand, rtol=1e-12, atol=1e-15)
    assert rollout.grad is None
    assert 0.1 < (by_hand != 0).double().mean() < 0.8
