# SPDX-License-Identifier: Apache-2.0
"""Products of ``fp8_block`` on the device at hand against W8A8 in float64: linear layers by every kernel, and experts."""

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from flashrl_verl.quantization import numerics
from flashrl_verl.quantization.formats import Kernel
from flashrl_verl.quantization.formats.fp8_block import FORMAT
from flashrl_verl.quantization.gemm import BlockScaledGemm, EmulatedGemm, emulated_multiply
from flashrl_verl.quantization.moe import expert_loop, expert_quant_config

B = FORMAT.block
EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, TOP_K = 6, 2 * B, B, 33, 2


def random_weight(*shape: int) -> torch.Tensor:
    """Blocks of sizes that differ by up to 1000, so that a scale of another block shows."""
    g = torch.Generator().manual_seed(sum(shape))
    weight = torch.randn(*shape, generator=g) * 0.02
    factors = 10 ** (3 * torch.rand(*shape[:-2], shape[-2] // B, shape[-1] // B, generator=g) - 3)
    return (weight * factors.repeat_interleave(B, -2).repeat_interleave(B, -1)).bfloat16()


def tokens_as_codes(x: torch.Tensor) -> torch.Tensor:
    """Quantization of every 128 values of a token, in float64."""
    groups = x.double().unflatten(-1, (-1, B))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return ((groups / scale).to(torch.float8_e4m3fn).double() * scale).flatten(-2)


def dequantized(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return codes.double() * scales.double().repeat_interleave(B, -2).repeat_interleave(B, -1)


def product(gemm, tokens: int, bias: bool, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What a kernel gives and what it should, for a weight [3 blocks, 5 blocks]."""
    weight = random_weight(3 * B, 5 * B)
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 5 * B, generator=g).bfloat16() * (1 + torch.arange(tokens).unsqueeze(1))
    added = torch.randn(3 * B, generator=g).bfloat16() if bias else None
    codes, scales = numerics.quantize(weight, FORMAT)
    layer = SimpleNamespace(weight=codes.to(device), weight_scale=scales.to(device))
    out = gemm.apply(layer, x.to(device), None if added is None else added.to(device))
    exact = tokens_as_codes(x) @ dequantized(codes, scales).t()
    return out.cpu(), exact if added is None else exact + added.double()


@pytest.mark.parametrize("bias", [False, True])
def test_the_emulated_linear_layer_is_exact_up_to_the_rounding_of_its_output(bias):
    out, exact = product(EmulatedGemm(FORMAT), 7, bias, "cpu")
    assert numerics.sqnr_db(exact, out) > 48


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [Kernel.CUTLASS, Kernel.TRITON])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7, 64, 129])
@pytest.mark.parametrize("bias", [False, True])
def test_the_cuda_kernels_are_w8a8_by_block_for_any_number_of_tokens(kernel, tokens, bias):
    """CUTLASS on Hopper has one way for multiples of four tokens and another for the rest."""
    if kernel is Kernel.CUTLASS and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("CUTLASS has this kernel from Hopper on")
    out, exact = product(BlockScaledGemm(FORMAT, kernel), tokens, bias, "cuda")
    # vLLM's quantization of activations may take the scale by a reciprocal: a code on the other side of a tie here and there.
    assert numerics.sqnr_db(exact, out) > 38


def moe_case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    x, logits = torch.randn(TOKENS, HIDDEN, generator=g).bfloat16(), torch.randn(TOKENS, EXPERTS, generator=g)
    return random_weight(EXPERTS, 2 * INTERMEDIATE, HIDDEN), random_weight(EXPERTS, HIDDEN, INTERMEDIATE), x, logits


def exact_experts(w13: torch.Tensor, w2: torch.Tensor, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    d13, d2 = (dequantized(*numerics.quantize(w, FORMAT)) for w in (w13, w2))
    probabilities, out = logits.double().softmax(-1), torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for token in range(TOKENS):
        chosen = probabilities[token].topk(TOP_K).indices.tolist()
        for e in chosen:
            gate, up = (d13[e] @ tokens_as_codes(x[token : token + 1])[0]).split(INTERMEDIATE)
            hidden = tokens_as_codes((torch.nn.functional.silu(gate) * up).unsqueeze(0))[0]
            out[token] += probabilities[token, e] / probabilities[token, chosen].sum() * (d2[e] @ hidden)
    return out


@pytest.mark.skipif(torch.cuda.is_available(), reason="the loop over experts is for CPUs")
def test_emulated_experts_are_exact_up_to_the_rounding_of_their_output():
    w13, w2, x, logits = moe_case()
    (c13, s13), (c2, s2) = (numerics.quantize(w, FORMAT) for w in (w13, w2))
    layer = SimpleNamespace(
        use_grouped_topk=False,
        top_k=TOP_K,
        renormalize=True,
        topk_group=None,
        num_expert_group=None,
        custom_routing_function=None,
        scoring_func="softmax",
        routed_scaling_factor=1.0,
        e_score_correction_bias=None,
        activation=MoEActivation.SILU,
        apply_router_weight_on_input=False,
    )
    out = expert_loop(
        layer,
        x,
        logits,
        lambda e, rows: emulated_multiply(rows.float(), c13[e], s13[e], FORMAT),
        lambda e, rows: emulated_multiply(rows.float(), c2[e], s2[e], FORMAT),
    )
    assert numerics.sqnr_db(exact_experts(w13, w2, x, logits), out) > 45


def test_vllm_is_told_of_blocks_and_of_no_rows():
    """That [E, N / B, K / B] scales are read as such is the fused kernel's own test, on a GPU."""
    scales = torch.ones(EXPERTS, 2 * INTERMEDIATE // B, HIDDEN // B), torch.ones(EXPERTS, HIDDEN // B, INTERMEDIATE // B)
    config = expert_quant_config(FORMAT, *scales)
    assert config.block_shape == [B, B] and config.use_fp8_w8a8
    assert not config.per_act_token_quant and not config.per_out_ch_quant


@pytest.mark.gpu
def test_the_fused_cuda_experts_are_w8a8_by_block():
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    w13, w2, x, logits = moe_case()
    (c13, s13), (c2, s2) = (tuple(t.cuda() for t in numerics.quantize(w, FORMAT)) for w in (w13, w2))
    weights, chosen = logits.softmax(-1).topk(TOP_K)
    weights = (weights / weights.sum(-1, keepdim=True)).cuda()
    out = fused_experts(x.cuda(), c13, c2, weights, chosen.int().cuda(), quant_config=expert_quant_config(FORMAT, s13, s2))
    # The kernel rounds to BF16 between the projections, before it quantizes.
    assert numerics.sqnr_db(exact_experts(w13, w2, x, logits), out.cpu()) > 30
