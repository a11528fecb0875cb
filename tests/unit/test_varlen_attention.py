# SPDX-License-Identifier: Apache-2.0
"""The trainer's own attention: packed sequences stay apart, with Ulysses too."""

import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed
from engines import in_own_process

from flashrl_verl.errors import ConfigError
from flashrl_verl.trainer import varlen_attention as module
from flashrl_verl.trainer.varlen_attention import varlen_attention

LAYER = types.SimpleNamespace()
LENGTHS, HEADS, KV_HEADS, SIZE = (5, 1, 9, 3), 4, 2, 16


def inputs(lengths=LENGTHS, device="cpu", dtype=torch.float64, size=SIZE):
    """[1, heads, tokens, size] thrice, and positions [1, tokens]."""
    torch.manual_seed(0)
    tokens = sum(lengths)
    tensors = [torch.randn(1, h, tokens, size, dtype=torch.float64) for h in (HEADS, KV_HEADS, KV_HEADS)]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return [t.to(device, dtype).requires_grad_() for t in tensors], positions.to(device)


def reference(query, key, value, starts, longest, scaling, window):
    """In float64, one sequence at a time: the kernel's arguments and result, [tokens, heads, size]."""
    parts = []
    for begin, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        q, k, v = (t[begin:end].double().transpose(0, 1) for t in (query, key, value))
        k, v = (t.repeat_interleave(len(q) // len(t), 0) for t in (k, v))
        scores = q @ k.transpose(1, 2) * (scaling or q.shape[-1] ** -0.5)
        ahead = torch.arange(end - begin)[None] - torch.arange(end - begin)[:, None]
        hidden = (ahead > 0) | ((ahead < -window[0]) if window[0] >= 0 else False)
        parts.append((scores.masked_fill(hidden.to(scores.device), -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(parts).to(query.dtype)


def on_a_rank(rank, ranks, folder):
    """With Ulysses a rank has a slice of the tokens; its result and its gradients are that slice of the whole's."""
    from verl.utils.ulysses import set_ulysses_sequence_parallel_group

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=ranks)
    set_ulysses_sequence_parallel_group(torch.distributed.group.WORLD)
    module._attend = reference
    tensors, positions = inputs()
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    whole = reference(*(t[0].transpose(0, 1) for t in tensors), starts, max(LENGTHS), None, (-1, 0))
    weights = torch.randn(whole.shape, dtype=whole.dtype, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad((whole * weights).sum(), tensors)
    here = slice(rank * len(whole) // ranks, (rank + 1) * len(whole) // ranks)
    mine = [t.detach()[:, :, here].requires_grad_() for t in tensors]
    result, _ = varlen_attention(LAYER, *mine, None, position_ids=positions[:, here].contiguous())
    torch.testing.assert_close(result[0], whole[here])
    gradients = torch.autograd.grad((result[0] * weights[here]).sum(), mine)
    for found, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found, wanted[:, :, here])
    torch.distributed.destroy_process_group()


def test_two_ranks_of_ulysses_attend_over_whole_sequences(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda rank: in_own_process(on_a_rank, rank, 2, tmp_path), range(2))) == [None, None]


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
    tensors, positions = inputs()
    with pytest.raises(ConfigError, match=f"{named}.*attn_implementation=flash_attention_2"):
        varlen_attention(LAYER, *tensors, **({"attention_mask": None, "position_ids": positions} | settings))


def test_rows_that_are_not_packed_are_refused_and_none_is_left_out():
    tensors, positions = inputs()
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
    tensors, positions = inputs(lengths, "cuda", torch.bfloat16, 128)
    for _ in range(2):  # the second finds where sequences begin
        result, _ = varlen_attention(LAYER, *tensors, None, position_ids=positions, sliding_window=window)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    span = (-1 if window is None else window - 1, 0)
    expected = reference(*(t[0].transpose(0, 1) for t in exact), starts, 300, None, span)
    weights = torch.randn_like(expected)
    torch.testing.assert_close(result[0].double(), expected, rtol=0.02, atol=0.02)
    found = torch.autograd.grad((result[0] * weights).sum(), tensors)
    for one, wanted in zip(found, torch.autograd.grad((expected * weights).sum(), exact), strict=True):
        assert (one.double() - wanted).norm() < 0.01 * wanted.norm()
