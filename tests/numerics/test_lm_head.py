# SPDX-License-Identifier: Apache-2.0
"""``flashrl.fp32_lm_head``: the product is FP32's of the same operands, on the trainer with the right gradients."""

import engines  # noqa: F401 - chooses verl's platform, which verl reads once
import fsdp_head
import pytest
import torch
from tiny_models import make
from torch import nn

from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.quantization.lm_head import (
    compute_head_in_fp32,
    computes_in_fp32,
    fp32_logits,
    fp32_product,
    require_trainer_heads,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BF16 = torch.bfloat16


def operands(device: str = "cpu", tokens: int = 64, vocabulary: int = 500, width: int = 256):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=g).to(device, BF16)
    return hidden, torch.randn(vocabulary, width, generator=g).to(device, BF16)


@pytest.mark.parametrize("device", DEVICES)
def test_logits_are_the_float64_product_of_the_same_operands_to_1e_6(device):
    hidden, weight = operands(device)
    logits = fp32_product(hidden, weight)
    exact = hidden.double() @ weight.double().t()
    assert logits.dtype == torch.float32
    assert ((logits - exact).abs() <= 1e-6 * (hidden.double().abs() @ weight.double().abs().t())).all()
    torch.testing.assert_close(
        logits, hidden.float() @ weight.float().t(), rtol=1e-6, atol=1e-4 if device == "cuda" else 1e-6
    )


@pytest.mark.parametrize("device", DEVICES)
def test_the_16_bit_product_differs_from_it_by_what_rounding_to_8_bits_predicts(device):
    hidden, weight = operands(device)
    logits = fp32_product(hidden, weight).double()
    rounded = nn.functional.linear(hidden, weight).double()
    ulp = torch.exp2(logits.abs().log2().floor() - 7)
    error = (rounded - logits) / ulp
    assert error.abs().max() < 0.51, "half a unit in the last place, and the order of summation"
    assert error.square().mean().sqrt().item() == pytest.approx(12**-0.5, rel=0.02), "uniform within the unit"


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_and_a_norm_in_fp32_change_nothing(device):
    hidden, weight = operands(device)
    bias = torch.randn(len(weight), dtype=BF16, device=device)
    expected = hidden.float() @ weight.float().t() + bias.float()
    between = hidden.float() + hidden.float().abs() * 2**-11  # rounds to `hidden`
    with torch.autocast(device, BF16):
        for given in (hidden, between, hidden.view(4, 16, -1)):
            logits = fp32_logits(given, weight, bias)
            assert logits.dtype == torch.float32 and logits.shape == (*given.shape[:-1], len(weight))
            torch.testing.assert_close(logits.view(expected.shape), expected, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_those_of_a_float64_head_to_the_operands_precision(device):
    hidden, weight = (t.requires_grad_() for t in operands(device))
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    target = torch.arange(len(hidden), device=device)
    bias = torch.zeros(len(weight), device=device, dtype=BF16).requires_grad_()
    with torch.autocast(device, BF16):
        nn.functional.cross_entropy(fp32_logits(hidden, weight, bias) / 16, target).backward()
    nn.functional.cross_entropy(exact[0] @ exact[1].t() / 16, target).backward()
    for ours, reference in zip((hidden, weight), exact, strict=True):
        assert ours.grad.dtype == BF16
        error = (ours.grad.double() - reference.grad).norm() / reference.grad.norm()
        assert error < 2**-8, "two roundings of at most 2^-8 each, most smaller"
    assert bias.grad.norm() > 0


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_fsdp2s_log_probs_and_gradients_are_those_of_a_float32_head(tmp_path, ranks, tied):
    changes = {"tie_word_embeddings": tied, "initializer_range": 0.2}
    arguments = (ranks, str(tmp_path), "qwen2.5", changes, True)
    torch.multiprocessing.spawn(fsdp_head.run, args=arguments, nprocs=ranks)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]

    # The reference shares the trunk's arithmetic, not the head: autograd through float32 copies of its BF16 operands.
    model = make("qwen2.5", **changes)
    for parameter in model.parameters():  # not the buffers, which FSDP leaves alone
        parameter.data = parameter.data.to(BF16)
    for rank in range(ranks):
        ids = fsdp_head.batch(rank, model.config.vocab_size)
        with torch.autocast("cpu", BF16):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = hidden.float() @ model.lm_head.weight.float().t()
        log_probs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        assert found[rank]["dtype"] == torch.float32
        torch.testing.assert_close(found[rank]["log_probs"], log_probs.detach(), rtol=1e-6, atol=2e-5)
        rounded = logits.to(BF16).float()[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        assert (rounded - log_probs).abs().max() > 1e-3, "BF16 logits would be told apart"
        (fsdp_head.loss_of(log_probs) / ranks).backward()
    grads = dict(model.named_parameters())
    assert set(found[0]["grads"]) == set(grads) and ("lm_head.weight" in grads) is not tied
    for name, grad in found[0]["grads"].items():
        reference = grads[name].grad.float()
        assert grad.dtype == torch.float32
        # The trunk's backward is BF16 in both, and a key's bias, which soft-max nearly ignores, is a difference of
        # large terms.
        limit = 0.01 if name.startswith(("lm_head", "model.norm")) else 0.05
        assert (grad - reference).norm() < limit * reference.norm(), name


def test_a_trainer_whose_log_probs_go_past_the_head_stops():
    model = make("qwen2.5").to(BF16)
    compute_head_in_fp32(model)
    compute_head_in_fp32(model)  # once is enough
    ids = fsdp_head.batch(0, model.config.vocab_size)
    assert model(input_ids=ids).logits.dtype == torch.float32
    head = model.lm_head
    model.lm_head = nn.Linear(
        *reversed(head.weight.shape), bias=False, dtype=BF16
    )  # as a fused kernel: another product
    with pytest.raises(FlashRLError, match=r"fp32_lm_head=true, .*torch.bfloat16 and asked its FP32 head 0 times"):
        model(input_ids=ids)
    model.lm_head.register_forward_hook(lambda module, inputs, output: output.float())  # rounded, then cast
    with pytest.raises(FlashRLError, match="logits in torch.float32 and asked its FP32 head 0 times"):
        model(input_ids=ids)
    model.lm_head = head
    head.register_forward_hook(lambda module, inputs, output: output.to(BF16))
    with pytest.raises(FlashRLError, match="gave logits in torch.bfloat16"):
        model(input_ids=ids)


def test_checkpoints_know_nothing_of_the_head():
    model, plain = make("qwen2.5"), make("qwen2.5")
    compute_head_in_fp32(model)
    assert computes_in_fp32(model) and not computes_in_fp32(plain)
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_a_lora_adapter_on_the_head_is_refused_and_one_elsewhere_is_not():
    from peft import LoraConfig, get_peft_model

    for targets in (["lm_head"], ["q_proj", "lm_head"]):
        with pytest.raises(ConfigError, match=r"fp32_lm_head=true is refused.*take lm_head out of .*target_modules"):
            compute_head_in_fp32(get_peft_model(make("qwen2.5"), LoraConfig(target_modules=targets)))
    model = get_peft_model(make("qwen2.5").to(BF16), LoraConfig(target_modules="all-linear"))
    compute_head_in_fp32(model)
    ids = fsdp_head.batch(0, model.config.vocab_size)
    with torch.autocast("cpu", BF16):
        assert model(input_ids=ids).logits.dtype == torch.float32


@pytest.mark.parametrize("wanted", [True, False])
def test_ranks_that_differ_from_the_setting_stop_the_run(wanted):
    require_trainer_heads(wanted, [wanted, wanted])
    with pytest.raises(FlashRLError, match=r"fp32_lm_head=.*ranks \[1\].*rollout\.custom\.flashrl"):
        require_trainer_heads(wanted, [wanted, not wanted])
