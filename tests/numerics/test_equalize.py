# SPDX-License-Identifier: Apache-2.0
"""Equalized keys leave attention as it is, in float64, and 8 bits keep what a bias would have taken from them.
Constants are taken as for engines (tests/e2e/test_equalized_keys.py), of a module with the names of vLLM's."""

from types import SimpleNamespace

import pytest
import torch

from flashrl_verl.attention.equalize import equalized, install, measure

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


HEADS, HIDDEN = 4, 32
CONFIG = SimpleNamespace(get_hidden_size=lambda: HIDDEN, dtype=torch.float32, max_model_len=64)


class Layer(torch.nn.Module):
    """A rank's attention layer."""

    layer_name, head_size, kv_sharing_target_layer_name, impl = "attn", SIZE, None, SimpleNamespace()

    def __init__(self, heads: int):
        super().__init__()
        self.num_kv_heads = heads

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return query


class SelfAttention(torch.nn.Module):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor):
        super().__init__()
        self.weight, self.bias, self.attn = weight, bias, Layer(len(weight) // SIZE)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        key = hidden_states @ self.weight.t() + self.bias
        return self.attn(key, key * positions[:, None].cos(), key)


def measured(rank: int, ranks: int, norm: str = "input_layernorm") -> tuple[torch.nn.Module, Layer]:
    """A model of one block, of which a rank has its heads; its layer's constants are taken."""
    g = torch.Generator().manual_seed(5)
    weight, bias = torch.randn(HEADS * SIZE, HIDDEN, generator=g), torch.randn(HEADS * SIZE, generator=g) * 50
    rows = slice(rank * HEADS // ranks * SIZE, (rank + 1) * HEADS // ranks * SIZE)
    block, model = torch.nn.Module(), torch.nn.Module()
    block.self_attn = SelfAttention(weight[rows], bias[rows])
    block.add_module(norm, torch.nn.LayerNorm(HIDDEN))
    model.layers = torch.nn.ModuleList([block])
    install(block.self_attn.attn)
    measure(model, CONFIG)
    return model, block.self_attn.attn


def test_a_rank_has_the_constants_of_its_heads():
    _, whole = measured(0, 1)
    for ranks in (2, 4):
        shares = [measured(rank, ranks)[1] for rank in range(ranks)]
        for name in ("key_offset", "key_scale"):
            torch.testing.assert_close(torch.cat([getattr(s, name) for s in shares]), getattr(whole, name))


@pytest.mark.parametrize("impl", [SimpleNamespace(logits_soft_cap=30.0), SimpleNamespace(sinks=torch.zeros(HEADS))])
def test_no_constant_is_taken_off_where_more_than_softmax_sees_the_logits(monkeypatch, impl):
    assert measured(0, 1)[1].key_offset.abs().min() > 0
    monkeypatch.setattr(Layer, "impl", impl)
    assert not measured(0, 1)[1].key_offset.any()


def test_a_layer_that_reads_anothers_keys_is_refused(monkeypatch):
    monkeypatch.setattr(Layer, "kv_sharing_target_layer_name", "model.layers.0.self_attn.attn")
    with pytest.raises(ValueError, match="attn reads the keys of another layer.*flashrl.kv_cache=auto"):
        measured(0, 1)


def test_a_block_of_an_unknown_structure_is_refused():
    with pytest.raises(ValueError, match="has no input_layernorm.*flashrl.kv_cache=auto"):
        measured(0, 1, norm="attention_norm")
