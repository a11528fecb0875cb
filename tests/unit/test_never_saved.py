# SPDX-License-Identifier: Apache-2.0
"""Weights that are not finite are found before a checkpoint is saved, and none is."""

from types import SimpleNamespace

import pytest
import torch

from flashrl_verl.errors import FlashRLError
from flashrl_verl.trainer.trainer import FlashRLTrainer
from flashrl_verl.trainer.worker import FlashRLWorker


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_no_checkpoint_is_saved_of_parameters_or_moments_that_are_not_finite(bad):
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1).bfloat16())
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    worker = object.__new__(FlashRLWorker)
    worker.actor = SimpleNamespace(engine=SimpleNamespace(module=module, optimizer=optimizer))
    assert worker.flashrl_non_finite() == []
    module[0].weight.data[1, 2] = module[1].bias.data[0] = optimizer.state[module[0].bias]["exp_avg"][0] = bad
    named = sorted(worker.flashrl_non_finite())
    assert named == ["0.bias (exp_avg)", "0.weight", "1.bias"]

    trainer = object.__new__(FlashRLTrainer)
    trainer.global_steps = 3
    trainer.actor_rollout_wg = SimpleNamespace(flashrl_non_finite=lambda: [[], named])
    with pytest.raises(FlashRLError, match=r"step 3: .*NaN or Inf in 3 tensors \(0.bias .*0.weight.*; no checkpoint"):
        trainer._save_checkpoint()
