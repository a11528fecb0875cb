# SPDX-License-Identifier: Apache-2.0
"""Causal attention of packed sequences in float64, one sequence at a time, and the trainer's beside it."""

import types

import torch
import torch.distributed

LENGTHS, HEADS, KV_HEADS, SIZE = (5, 1, 9, 3), 4, 2, 16


def inputs(lengths=LENGTHS, device="cpu", dtype=torch.float64, size=SIZE):
    """[1, heads, tokens, size] thrice, and positions [1, tokens]."""
    torch.manual_seed(0)
    tokens = sum(lengths)
    tensors = [torch.randn(1, h, tokens, size, dtype=torch.float64) for h in (HEADS, KV_HEADS, KV_HEADS)]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return [t.to(device, dtype).requires_grad_() for t in tensors], positions.to(device)


def reference(query, key, value, starts, longest, scaling, window):
    """The kernel's arguments and result, [tokens, heads, size]."""
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

    from flashrl_verl.trainer import varlen_attention

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=ranks)
    set_ulysses_sequence_parallel_group(torch.distributed.group.WORLD)
    varlen_attention._attend = reference
    tensors, positions = inputs()
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    whole = reference(*(t[0].transpose(0, 1) for t in tensors), starts, max(LENGTHS), None, (-1, 0))
    weights = torch.randn(whole.shape, dtype=whole.dtype, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad((whole * weights).sum(), tensors)
    here = slice(rank * len(whole) // ranks, (rank + 1) * len(whole) // ranks)
    mine = [t.detach()[:, :, here].requires_grad_() for t in tensors]
    result, _ = varlen_attention.varlen_attention(
        types.SimpleNamespace(), *mine, None, position_ids=positions[:, here].contiguous()
    )
    torch.testing.assert_close(result[0], whole[here])
    gradients = torch.autograd.grad((result[0] * weights[here]).sum(), mine)
    for found, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found, wanted[:, :, here])
    torch.distributed.destroy_process_group()
