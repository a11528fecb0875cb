# SPDX-License-Identifier: Apache-2.0
"""The probe tells FP32 logits from BF16 ones by their values, whatever tensor they come in."""

import pytest
import torch

from flashrl_verl.rollout.head_probe import head_dtype

WEIGHT = torch.randn(300, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


class Model:
    """Stands where a vLLM model does: only ``compute_logits`` is asked."""

    def __init__(self, compute_logits):
        self.compute_logits = compute_logits


def masked(logits: torch.Tensor) -> torch.Tensor:
    logits[..., 250:] = float("-inf")  # as verl masks tokens past the tokenizer
    return logits


@pytest.mark.parametrize(
    "compute, found",
    [
        (lambda h: h.float() @ WEIGHT.float().t(), "float32"),
        (lambda h: masked(h.float() @ WEIGHT.float().t()), "float32"),
        (lambda h: h @ WEIGHT.t(), "bfloat16"),
        (lambda h: (h @ WEIGHT.t()).float(), "bfloat16"),  # rounded first, cast later
        (lambda h: masked((h @ WEIGHT.t()).float()), "bfloat16"),
        (lambda h: None, "unknown (this rank gets no logits)"),
        (lambda h: WEIGHT[:3, :3] @ h, "unknown (RuntimeError"),
    ],
)
def test_logits_are_told_apart_by_their_values(compute, found):
    assert head_dtype(Model(compute), 64, torch.bfloat16, torch.device("cpu")).startswith(found)


def test_dummy_weights_are_enough():
    """vLLM's ``load_format=dummy``: uniform within 1e-3."""
    weight = (torch.rand(300, 64, generator=torch.Generator().manual_seed(2)) * 2e-3 - 1e-3).bfloat16()
    model = Model(lambda h: h.float() @ weight.float().t())
    assert head_dtype(model, 64, torch.bfloat16, torch.device("cpu")) == "float32"
