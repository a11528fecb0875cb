# SPDX-License-Identifier: Apache-2.0
"""Equalized keys leave attention as it is, in float64, and 8 bits keep what a bias would have taken from them."""

import pytest
import torch

from flashrl_verl.attention.equalize import equalized

TOKENS, SIZE = 40, 16


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    """Causal, by its definition; [tokens, heads * SIZE] in and out."""
    q, k, v = (x.view(TOKENS, -1, SIZE).transpose(0, 1) for x in (query, key, value))
    k, v = (x.repeat_interleave(heads // kv_heads, 0) for x in (k, v))
    logits = (q @ k.mT) * SIZE**-0.5 + torch.full((TOKENS, TOKENS), -torch.inf).triu(1)
    return (logits.softmax(-1) @ v).transpose(0, 1).flatten(1)


def draws(heads: int, kv_heads: int) -> list[torch.Tensor]:
    """Query, key with a large bias that turns with the position, value; offset and scale of the key."""
    g = torch.Generator().manual_seed(heads * 8 + kv_heads)
    query, key, value = (torch.randn(TOKENS, n * SIZE, generator=g).double() for n in (heads, kv_heads, kv_heads))
    turn = torch.linspace(0, 0.5, TOKENS).double().view(-1, 1, 1)
    bias = 50 * torch.randn(2, kv_heads, SIZE, generator=g).double() * (torch.arange(SIZE) % 5 == 0)
    key += (bias[0] * turn.cos() + bias[1] * turn.sin()).flatten(1)
    keys = key.view(TOKENS, kv_heads, SIZE)
    offset = (keys.amax(0) + keys.amin(0)) / 2
    return [query, key, value, offset, (keys - offset).abs().amax(0)]


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (6, 1)])
def test_attention_is_what_it_was(heads, kv_heads):
    query, key, value, offset, scale = draws(heads, kv_heads)
    q, k = equalized(query, key, offset, scale)
    assert (q.shape, k.shape) == (query.shape, key.shape) and q.dtype == k.dtype == torch.float64
    assert k.abs().max() <= 1 + 1e-12
    expected = attention(query, key, value, heads, kv_heads)
    torch.testing.assert_close(attention(q, k, value, heads, kv_heads), expected, rtol=0, atol=1e-12)


def test_8_bits_with_one_scale_a_token_lose_a_fiftieth_of_what_they_lost():
    query, key, value, offset, scale = draws(4, 2)

    def in_8_bits(x: torch.Tensor) -> torch.Tensor:
        step = x.view(TOKENS, 2, SIZE).abs().amax(-1, keepdim=True) / 127
        return ((x.view(TOKENS, 2, SIZE) / step).round() * step).flatten(1)

    exact = attention(query, key, value, 4, 2)
    q, k = equalized(query, key, offset, scale)
    lost = (attention(query, in_8_bits(key), value, 4, 2) - exact).square().mean()
    assert (attention(q, in_8_bits(k), value, 4, 2) - exact).square().mean() < lost / 50
