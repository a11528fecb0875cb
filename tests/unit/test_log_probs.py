# SPDX-License-Identifier: Apache-2.0
"""Log-probs of labels against float64 and against verl's own function, which takes a token at a time."""

import pytest
import torch
from verl.utils import torch_functional

from flashrl_verl.plugins import log_probs as ours
from flashrl_verl.plugins import patches


@pytest.fixture
def drawn():
    generator = torch.Generator().manual_seed(torch.initial_seed() % 2**31)
    return torch.randn(37, 211, generator=generator) * 4, torch.randint(211, (37,), generator=generator)


def in_float64(logits, labels, gradient):
    exact = logits.detach().double().requires_grad_()
    result = exact.log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)
    result.backward(gradient.double())
    return result.detach(), exact.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("at_once", [1, 211 * 10, 1 << 26])
def test_log_probs_and_gradients_are_float64s(drawn, dtype, at_once, monkeypatch):
    monkeypatch.setattr(ours, "_ELEMENTS_AT_ONCE", at_once)
    logits, labels = drawn[0].to(dtype).requires_grad_(), drawn[1]
    gradient = torch.randn(37)
    found = ours.log_probs(logits, labels)
    found.backward(gradient)
    expected, slope = in_float64(logits, labels, gradient)
    assert found.dtype is torch.float32 and logits.grad.dtype is dtype
    assert torch.allclose(found.double(), expected, rtol=1e-6, atol=1e-5)
    assert torch.allclose(logits.grad.double(), slope, rtol={torch.float32: 1e-4}.get(dtype, 2**-8), atol=1e-6)


def test_any_shape_is_taken(drawn):
    logits, labels = drawn[0][:36].view(4, 9, 211), drawn[1][:36].view(4, 9)
    assert torch.equal(ours.log_probs(logits, labels).flatten(), ours.log_probs(drawn[0][:36], drawn[1][:36]))
    assert ours.log_probs(logits[:0], labels[:0]).shape == (0, 9)


def test_what_is_not_finite_comes_out(drawn):
    logits, labels = drawn
    logits[3, 5] = float("nan")
    assert ours.log_probs(logits, labels).isnan().nonzero().flatten().tolist() == [3]


def test_verls_function_without_flash_attn_is_replaced_by_one_that_is_nearer(drawn, monkeypatch):
    monkeypatch.setattr(torch_functional, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", False)
    monkeypatch.setattr(torch_functional, "logprobs_from_logits_v2", torch_functional.logprobs_from_logits_v2)
    logits, labels = drawn[0].bfloat16(), drawn[1]
    expected, _ = in_float64(logits, labels, torch.ones(37))
    before = torch_functional.logprobs_from_logits(logits, labels)
    patches.many_tokens_at_once(torch_functional)
    after = torch_functional.logprobs_from_logits(logits, labels)
    assert torch.allclose(before.double(), expected, rtol=2**-7)
    assert (after.double() - expected).abs().max() < 1e-5 < (before.double() - expected).abs().max()


def test_another_verl_is_refused():
    with pytest.raises(patches.FlashRLError, match="logprobs_from_logits_v2"):
        patches.many_tokens_at_once(torch)
