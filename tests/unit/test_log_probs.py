# SPDX-License-Identifier: Apache-2.0
"""Log-probs of labels against float64 and against verl's own function, which takes a token at a time."""

import pytest
import torch
from verl.utils import torch_functional

from flashrl_verl.trainer import log_probs as ours
from flashrl_verl.upstream import patches


@pytest.fixture
def drawn():
    generator = torch.Generator().manual_seed(7)
    return torch.randn(4, 9, 211, generator=generator) * 4, torch.randint(211, (4, 9), generator=generator)


def in_float64(logits, labels):
    exact = logits.detach().double().requires_grad_()
    return exact, exact.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "device, at_once", [("cpu", 1), ("cpu", 211 * 10), ("cpu", 1 << 26), pytest.param("cuda", 1, marks=pytest.mark.gpu)]
)
def test_log_probs_and_gradients_are_float64s(drawn, dtype, device, at_once, monkeypatch):
    monkeypatch.setattr(ours, "_ELEMENTS_AT_ONCE", at_once)
    logits, labels = drawn[0].to(device, dtype).requires_grad_(), drawn[1].to(device)
    gradient = torch.randn(labels.shape, generator=torch.Generator().manual_seed(8)).to(device)
    found, (exact, expected) = ours.log_probs(logits, labels), in_float64(logits, labels)
    found.backward(gradient)
    expected.backward(gradient.double())
    assert found.dtype is torch.float32 and logits.grad.dtype is dtype
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(
        logits.grad.double(), exact.grad, rtol={torch.float32: 1e-4}.get(dtype, 2**-8), atol=1e-6
    )


def test_verls_function_without_flash_attn_is_replaced_by_one_that_is_nearer(drawn, monkeypatch):
    monkeypatch.setattr(torch_functional, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", False)
    monkeypatch.setattr(torch_functional, "logprobs_from_logits_v2", torch_functional.logprobs_from_logits_v2)
    logits, labels = drawn[0].bfloat16(), drawn[1]
    _, expected = in_float64(logits, labels)
    before = torch_functional.logprobs_from_logits(logits, labels)
    patches.patch_logprobs_from_logits(torch_functional, ours.log_probs)
    after = torch_functional.logprobs_from_logits(logits, labels)
    assert torch.allclose(before.double(), expected, rtol=2**-7)
    assert (after.double() - expected).abs().max() < 1e-5 < (before.double() - expected).abs().max()
