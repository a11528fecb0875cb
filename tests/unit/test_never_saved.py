# SPDX-License-Identifier: Apache-2.0
"""Weights that are not finite are found before a checkpoint is saved, and none is."""

from types import SimpleNamespace

import engines  # noqa: F401 - chooses verl's platform, which verl reads once
import pytest
import torch

from flashrl_verl.errors import FlashRLError
from flashrl_verl.trainer.trainer import FlashRLTrainer
from flashrl_verl.trainer.worker import FlashRLWorker


def worker_of(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> FlashRLWorker:
    worker = object.__new__(FlashRLWorker)
    worker.actor = SimpleNamespace(engine=SimpleNamespace(module=module, optimizer=optimizer))
    return worker


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_worker_names_its_parameters_and_moments_that_are_not_finite(bad):
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    worker = worker_of(module, optimizer)
    assert worker.flashrl_non_finite() == []
    module.weight.data[1, 2] = bad
    optimizer.state[module.bias]["exp_avg"][0] = bad
    assert worker.flashrl_non_finite() == ["weight", "bias (exp_avg)"]


def test_no_checkpoint_is_saved_of_them():
    trainer = object.__new__(FlashRLTrainer)
    trainer.global_steps = 3
    trainer.actor_rollout_wg = SimpleNamespace(flashrl_non_finite=lambda: [[], ["model.norm.weight"]])
    with pytest.raises(FlashRLError, match=r"step 3: .*NaN or Inf in 1 tensors \(model.norm.weight\); no checkpoint"):
        trainer._save_checkpoint()
