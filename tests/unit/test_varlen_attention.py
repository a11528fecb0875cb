# SPDX-License-Identifier: Apache-2.0
"""The trainer's own attention: packed sequences stay apart, with Ulysses too."""

import types

import packed_attention
import pytest
import torch

from flashrl_verl.errors import ConfigError
from flashrl_verl.trainer import varlen_attention as module
from flashrl_verl.trainer.varlen_attention import varlen_attention

LAYER = types.SimpleNamespace()


def test_two_ranks_of_ulysses_attend_over_whole_sequences(tmp_path):
    torch.multiprocessing.spawn(packed_attention.on_a_rank, args=(2, str(tmp_path)), nprocs=2)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"attention_mask": torch.ones(1, 1)}, "use_remove_padding=false"),
        ({"dropout": 0.1}, "dropout"),
        ({"softcap": 30.0}, "softcap"),
        ({"s_aux": torch.zeros(4)}, "s_aux"),
        ({"position_ids": torch.zeros(3, 1, 18, dtype=torch.int64)}, "position_ids"),
        ({"position_ids": None}, "position_ids"),
    ],
)
def test_what_it_does_not_compute_is_refused(settings, named):
    tensors, positions = packed_attention.inputs()
    with pytest.raises(ConfigError, match=f"{named}.*attn_implementation=flash_attention_2"):
        varlen_attention(LAYER, *tensors, **({"attention_mask": None, "position_ids": positions} | settings))


def test_rows_that_are_not_packed_are_refused_and_none_is_left_out():
    tensors, positions = packed_attention.inputs()
    with pytest.raises(ConfigError, match="more than one row"):
        varlen_attention(LAYER, *(t.expand(2, -1, -1, -1) for t in tensors), None, position_ids=positions)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("kernel", ["PyTorch", "FlashAttention 4"])
def test_result_and_gradients_are_those_of_float64(window, kernel, monkeypatch):
    if kernel == "PyTorch":
        monkeypatch.setattr(module, "_flash_attention_4", lambda: None)
    elif module._flash_attention_4() is None:
        pytest.skip("flash-attn-4 is not installed, or the GPU is older than Hopper")
    lengths = (300, 1, 129, 64)
    tensors, positions = packed_attention.inputs(lengths, "cuda", torch.bfloat16, 128)
    for _ in range(2):  # the second finds where sequences begin
        result, _ = varlen_attention(LAYER, *tensors, None, position_ids=positions, sliding_window=window)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    span = (-1 if window is None else window - 1, 0)
    expected = packed_attention.reference(*(t[0].transpose(0, 1) for t in exact), starts, 300, None, span)
    weights = torch.randn_like(expected)
    torch.testing.assert_close(result[0].double(), expected, rtol=0.02, atol=0.02)
    found = torch.autograd.grad((result[0] * weights).sum(), tensors)
    for one, wanted in zip(found, torch.autograd.grad((expected * weights).sum(), exact), strict=True):
        assert (one.double() - wanted).norm() < 0.01 * wanted.norm()
