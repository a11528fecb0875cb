# SPDX-License-Identifier: Apache-2.0
"""``flashrl.fp32_lm_head``: the product is FP32's of the same operands, on the trainer with the right gradients."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from engines import in_own_process
from tiny_models import VOCAB, make
from torch import nn

from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.fp32_head import compute_head_in_fp32, fp32_logits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BF16, RANKS = torch.bfloat16, 2


@pytest.mark.parametrize("device", DEVICES)
def test_logits_and_gradients_are_those_of_a_float64_head_under_autocast_too(device):
    g = torch.Generator().manual_seed(0)
    leaves = [torch.randn(*shape, generator=g).to(device, BF16).requires_grad_() for shape in ((64, 256), (500, 256))]
    bias = torch.randn(500, generator=g).to(device, BF16).requires_grad_()
    hidden, weight = leaves
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = exact[0] @ exact[1].t() + bias.double().detach()
    rounded = hidden.detach().double().abs() @ weight.detach().double().abs().t()
    with torch.autocast(device, BF16):
        logits = fp32_logits(hidden.view(4, 16, -1), weight, bias)
        of_fp32_norm = fp32_logits(hidden.float() * (1 + 2**-11), weight, bias)  # rounds to `hidden`
    assert logits.dtype == torch.float32 and logits.shape == (4, 16, 500)
    for found in (logits.view(64, 500), of_fp32_norm):
        assert ((found - expected).abs() <= 1e-6 * rounded).all()
    target = torch.arange(64, device=device)
    nn.functional.cross_entropy(logits.view(64, 500) / 16, target).backward()
    nn.functional.cross_entropy(expected / 16, target).backward()
    for ours, reference in zip(leaves, exact, strict=True):
        error = (ours.grad.double() - reference.grad).norm() / reference.grad.norm()
        assert ours.grad.dtype == BF16 and error < 2**-8, "two roundings of at most 2^-8 each, most smaller"
    assert bias.grad.norm() > 0


def batch(rank: int) -> torch.Tensor:
    return torch.randint(VOCAB, (3, 12), generator=torch.Generator().manual_seed(100 + rank))


def log_probs_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def loss_of(log_probs: torch.Tensor) -> torch.Tensor:
    """A policy gradient's form: tokens weighted by advantages of both signs."""
    return (log_probs * torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(7))).mean()


def rank_of_fsdp2(rank: int, folder: Path, changes: dict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A trainer's rank as verl wraps it: its log-probs, and the whole gradients."""
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from verl.utils.fsdp_utils import apply_fsdp2

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=RANKS)
    mesh = torch.distributed.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    model, ids = make("qwen2.5", **changes), batch(rank)
    apply_fsdp2(model, {"mesh": mesh, "mp_policy": policy, "offload_policy": None, "reshard_after_forward": True}, {})
    compute_head_in_fp32(model)
    with torch.autocast("cpu", BF16):  # as verl's FSDP engine does
        log_probs = log_probs_of(model(input_ids=ids, use_cache=False).logits, ids)
        loss_of(log_probs).backward()
    return log_probs.detach(), {name: p.grad.full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
def test_fsdp2s_log_probs_and_gradients_are_those_of_a_float32_head(tmp_path, monkeypatch, tied):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    changes = {"tie_word_embeddings": tied, "initializer_range": 0.2}
    with ThreadPoolExecutor(RANKS) as pool:
        ranks = [pool.submit(in_own_process, rank_of_fsdp2, rank, tmp_path, changes) for rank in range(RANKS)]
    # The reference shares the trunk's arithmetic, not the head's: autograd through float32 copies of its operands.
    model = make("qwen2.5", **changes)
    for parameter in model.parameters():  # not the buffers, which FSDP leaves alone
        parameter.data = parameter.data.to(BF16)
    for rank, found in enumerate(ranks):
        ids = batch(rank)
        with torch.autocast("cpu", BF16):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = hidden.float() @ model.lm_head.weight.float().t()
        log_probs, rounded = (log_probs_of(z, ids) for z in (logits, logits.to(BF16).float()))
        torch.testing.assert_close(found.result()[0], log_probs.detach(), rtol=1e-6, atol=2e-5)
        assert (rounded - log_probs).abs().max() > 1e-3, "BF16 logits would be told apart"
        (loss_of(log_probs) / RANKS).backward()
    grads, gathered = {name: p.grad.float() for name, p in model.named_parameters()}, ranks[0].result()[1]
    assert gathered.keys() == grads.keys() and ("lm_head.weight" in grads) is not tied
    for name, grad in gathered.items():
        # The trunk's backward is BF16 in both, and a key's bias, which soft-max nearly ignores, is a difference of
        # large terms.
        limit = 0.01 if name.startswith(("lm_head", "model.norm")) else 0.05
        assert (grad - grads[name]).norm() < limit * grads[name].norm(), name


def test_a_trainer_whose_log_probs_go_past_the_head_stops():
    model = make("qwen2.5").to(BF16)
    for _ in range(2):  # once is enough
        compute_head_in_fp32(model)
    ids, head = batch(0), model.lm_head
    assert model(input_ids=ids).logits.dtype == torch.float32
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


def test_a_lora_adapter_on_the_head_is_refused():
    from peft import LoraConfig, get_peft_model

    with pytest.raises(ConfigError, match=r"fp32_lm_head=true is refused.*take lm_head out of .*target_modules"):
        compute_head_in_fp32(get_peft_model(make("qwen2.5"), LoraConfig(target_modules=["q_proj", "lm_head"])))
