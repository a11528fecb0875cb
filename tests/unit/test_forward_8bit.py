# SPDX-License-Identifier: Apache-2.0
"""The trainer's forward pass in 8 bits against its formulas in float64, and who may not have it."""

import copy

import numpy as np
import pytest
import sharded_forward
import torch
from references import quantize
from tiny_models import CONFIGS, make
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Qwen2Config

from flashrl_verl.errors import ConfigError, FlashRLError, RefitError
from flashrl_verl.quantization.formats import FP8, INT8
from flashrl_verl.refit.code_digest import code_digest, require_same_codes
from flashrl_verl.settings import Precision
from flashrl_verl.trainer import forward_8bit
from flashrl_verl.trainer.forward_8bit import compute_in_8_bits, note_codes, noted_codes, quantize_weight

FORMATS = {"int8": (Precision.INT8, INT8), "fp8": (Precision.FP8, FP8)}
CPU, GPU = "cpu", pytest.param("cuda", marks=pytest.mark.gpu)


class Two(nn.Module):
    """Two linear layers with a name of their own."""

    def __init__(self, bias: bool):
        super().__init__()
        self.first, self.second = nn.Linear(48, 32, bias=bias), nn.Linear(32, 16, bias=bias)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def made(model: nn.Module, precision: str = "int8", backward: str = "bf16", names=("first.weight", "second.weight")):
    compute_in_8_bits(model, names, FORMATS[precision][0], Precision(backward))
    return model


def dequantized(tensor: torch.Tensor, precision: str) -> torch.Tensor:
    """By a reference that shares no code with the package."""
    codes, scales = quantize(tensor, precision)
    return torch.from_numpy(codes * scales.astype(np.float64))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("precision", FORMATS)
def test_output_and_gradients_are_the_formulas_in_float64(precision, dtype, within, device, bias):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("the GPU's kernels write 16 bits")
    torch.manual_seed(0)
    layer = nn.Linear(64, 48, bias=bias, dtype=dtype, device=device)
    model = made(nn.Sequential(layer), precision, names=["0.weight"])
    x = torch.randn(3, 5, 64, dtype=dtype, device=device, requires_grad=True)
    out = model(x)
    out_grad = torch.randn_like(out)
    out.backward(out_grad)

    flat, g = x.detach().cpu().reshape(-1, 64), out_grad.cpu().double().reshape(-1, 48)
    weight, tokens = dequantized(layer.weight, precision), dequantized(flat, precision)
    expected = tokens @ weight.t() + (layer.bias.detach().cpu().double() if bias else 0)
    found = {"y": out, "dx": x.grad, "dW": layer.weight.grad} | ({"db": layer.bias.grad} if bias else {})
    wanted = {"y": expected, "dx": g @ weight, "dW": g.t() @ tokens, "db": g.sum(0)}
    for name, value in found.items():
        value = value.detach().cpu().double().reshape(wanted[name].shape)
        assert (value - wanted[name]).norm() < within * wanted[name].norm(), name


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("precision", FORMATS)
def test_an_input_gradient_in_8_bits_is_the_16_bit_one_but_for_its_rounding(precision, device):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(256, 128, dtype=torch.bfloat16, device=device))
    eight = made(copy.deepcopy(model), precision, precision, ["0.weight"])
    sixteen = made(model, precision, "bf16", ["0.weight"])
    x = torch.randn(64, 256, dtype=torch.bfloat16, device=device)
    grads = []
    for one in (eight, sixteen):
        input_ = x.clone().requires_grad_()
        out = one(input_)
        (out * torch.linspace(-1, 1, out.numel(), device=device).view_as(out)).sum().backward()
        grads.append(input_.grad.double().flatten())
    assert torch.nn.functional.cosine_similarity(*grads, dim=0) > 0.999
    assert not torch.equal(*grads)
    assert torch.equal(eight[0].weight.grad, sixteen[0].weight.grad)


def test_a_recomputed_forward_pass_is_the_first_bit_for_bit_without_its_last_product(monkeypatch):
    torch.manual_seed(2)
    plain = made(Two(True).bfloat16())
    counted, (quantize, multiply) = [], forward_8bit.w8a8(INT8)
    monkeypatch.setattr(forward_8bit, "w8a8", lambda fmt: (quantize, lambda *a: counted.append(1) or multiply(*a)))
    again = copy.deepcopy(plain)
    x = torch.randn(7, 48, dtype=torch.bfloat16, requires_grad=True)
    grads = []
    for forward in (plain, lambda v: checkpoint(again, v, use_reentrant=False, determinism_check="default")):
        x.grad = None
        forward(x).square().sum().backward()
        grads.append(x.grad.clone())
    assert torch.equal(*grads) and len(counted) == 2 + 2 + 1
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), again.parameters(), strict=True))


def test_layers_with_one_input_quantize_it_once_and_again_when_it_has_changed(monkeypatch):
    torch.manual_seed(7)
    q, k = (made(nn.Sequential(nn.Linear(48, 16).bfloat16()), names=["0.weight"]) for _ in range(2))
    x, counted = torch.randn(5, 48, dtype=torch.bfloat16), []
    quantize, multiply = forward_8bit.w8a8(INT8)
    monkeypatch.setattr(forward_8bit, "w8a8", lambda fmt: (lambda t: counted.append(1) or quantize(t), multiply))
    alone = k(x.clone())
    q(x)
    assert torch.equal(k(x), alone) and len(counted) == 2
    x[0, 0] = 50.0
    assert not torch.equal(k(x), alone) and len(counted) == 3


def test_autocast_changes_nothing():
    torch.manual_seed(3)
    model, x = made(Two(True).bfloat16()), torch.randn(5, 48)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), model(x.bfloat16()))


def test_a_whole_model_learns_and_only_its_named_layers_change():
    torch.manual_seed(4)
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    names = [n for n, p in model.named_parameters() if p.dim() == 2 and ".layers.1." in n]
    made(model, names=names)
    assert (
        sorted(type(m).__name__ for m in model.model.layers[1].mlp.children() if isinstance(m, nn.Linear))
        == ["Linear8Bit"] * 3
    )
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear and type(model.lm_head) is nn.Linear
    model.gradient_checkpointing_enable()
    model.train()
    optimizer, tokens = torch.optim.SGD(model.parameters(), lr=0.1), torch.arange(24).view(2, 12)
    losses = []
    for _ in range(8):
        losses.append(model(input_ids=tokens, labels=tokens).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.5
    assert sorted(noted_codes(model)) == sorted(names)


@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("name", [name for name in CONFIGS if not name.endswith("moe")])
def test_a_models_logits_are_those_of_a_float64_model_that_quantizes(name, precision):
    model = make(name)
    reference, ids = copy.deepcopy(model).double(), torch.arange(40)[None] + 3
    names = [name for name, p in model.named_parameters() if name.endswith("_proj.weight")]
    for layer in (reference.get_submodule(name.removesuffix(".weight")) for name in names):
        layer.weight.data = dequantized(layer.weight, precision)
        layer.register_forward_pre_hook(lambda _, inputs: dequantized(inputs[0][0], precision)[None])
    with torch.no_grad():
        wanted, plain = reference(input_ids=ids).logits, model(input_ids=ids).logits
        found = made(model, precision, names=names)(input_ids=ids).logits

    def distance(logits: torch.Tensor) -> torch.Tensor:
        """Relative, of the median token: some have an activation whose float32 value is rounded to the next code."""
        return ((logits - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median()

    assert distance(found) < 1e-6 < 1e-2 < distance(plain)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [1, 2])
def test_sharded_over_two_ranks_codes_and_gradients_are_those_of_the_whole(tmp_path, fsdp):
    torch.multiprocessing.spawn(sharded_forward.on_a_rank, args=(2, str(tmp_path), fsdp), nprocs=2)


def test_what_is_no_plain_linear_layer_is_refused():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    for model in (nn.Sequential(Own(4, 4)), nn.Sequential(nn.LayerNorm(4)), nn.Sequential()):
        with pytest.raises(ConfigError, match=r"flashrl.trainer_forward=int8 is refused.*0\.weight.*=bf16"):
            made(model, names=["0.weight"])
        assert not any(hasattr(m, "flashrl_calls") for m in model.modules())


def test_a_forward_pass_past_a_layer_stops():
    model, x = made(Two(False).bfloat16()), torch.randn(5, 48, dtype=torch.bfloat16)
    model(x)
    model.second.forward = lambda x: nn.functional.linear(x, model.second.weight)
    with pytest.raises(FlashRLError, match=r"went past second\.weight.*=bf16"):
        model(x)


def test_codes_are_noted_once_and_compared_with_the_engines():
    torch.manual_seed(5)
    model, x = made(Two(False).bfloat16()), torch.randn(5, 48, dtype=torch.bfloat16)
    assert noted_codes(model) == {}
    model(x)
    noted = noted_codes(model)
    with torch.no_grad():
        model.first.weight[3, 7] *= 4  # the update behind it
    model(x)
    assert noted_codes(model) == noted

    def held(weights: dict[str, torch.Tensor]) -> list:
        """Two workers' digests: one has the upper rows of the first weight, or the left columns of the second."""
        workers = [[], []]
        for name, weight in weights.items():
            codes, scales = quantize_weight(weight, INT8)
            cut = {"first.weight": [(0, 16, 0, 48), (16, 32, 0, 48)], "second.weight": [(0, 16, 0, 8), (0, 16, 8, 32)]}
            for worker, (top, bottom, left, right) in zip(workers, cut[name], strict=True):
                part = codes[top:bottom, left:right], scales[top:bottom]
                worker.append((name, top, left, int(code_digest(*part, top, left))))
        return workers

    before = {"first.weight": model.first.weight.clone(), "second.weight": model.second.weight}
    with torch.no_grad():
        before["first.weight"][3, 7] /= 4
    assert require_same_codes([noted, noted], [held(before), [[], []]], 7) == 4
    workers = held(before)
    workers[1].append(workers[0][1])  # two ranks with the same KV heads hold the same part
    assert require_same_codes([noted], [workers], 7) == 2
    with pytest.raises(RefitError, match=r"step 7.*rank 1.*replica 0.*1 of 2 weights: first\.weight"):
        note_codes(model)
        model(x)
        require_same_codes([noted, noted_codes(model)], [held(before)], 7)
    with pytest.raises(RefitError, match="no quantized weight"):
        require_same_codes([noted], [[[], []]], 7)


@pytest.mark.parametrize("device", [CPU, GPU])
def test_a_digest_adds_up_and_tells_every_change(device):
    torch.manual_seed(6)
    codes, scales = quantize_weight(torch.randn(40, 24, dtype=torch.bfloat16, device=device), INT8)
    whole = int(code_digest(codes, scales))
    value = codes.cpu().view(torch.uint8).numpy().astype(object) * (1 + np.arange(24))
    rows = value.sum(1) + 8209 * scales.cpu().view(torch.int32).numpy()[:, 0].astype(object)
    assert whole % 2**64 == int((rows * (1 + np.arange(40))).sum()) % 2**64
    for parts in ([codes.flip(0), scales], [codes, scales.flip(0)], [codes.flip(1), scales]):
        assert int(code_digest(*parts)) != whole
    other = codes.clone()
    other[11, 5] += 1
    assert int(code_digest(other, scales)) != whole
