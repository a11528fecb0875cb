# SPDX-License-Identifier: Apache-2.0
"""Keys that 8 bits can hold, in front of every attention backend.

A cache with one scale for all channels of a key loses what differs between keys where some channels are large: the
biases of Qwen2.5's ``k_proj`` are many times what its inputs add. Softmax sees neither a constant that is taken
off all keys of a head, which adds the same to every logit of a query, nor a scale that goes from keys to queries:

    softmax(q . k) = softmax((q * s) . ((k - c) / s))

So each attention layer caches (k - c) / s. c and s [KV heads, head size] are taken in every weight update, whose end
empties the cache: the middle of the range of keys, and half of it. Keys are those that the layer itself makes of white
noise behind its norm, at positions at random: what weights alone say, whatever lies between (a bias, a norm of keys,
any rotary embedding). No text is used. Half the range and not the deviation, because one step serves all channels of a
key: rounding moves logits by about max_i(|k_i| / s_i) sqrt(sum_i (q_i s_i)^2), which is least where all channels reach
equally far.

They are computed with in a hook of torch's, which is part of vLLM's compiled graph; nothing of vLLM's is changed. A
constant off all keys is SageAttention's (arXiv 2410.02367), a scale from keys to queries QServe's (arXiv 2405.04532).
"""

import inspect

import torch
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionImpl

MAX_POSITIONS = 20_480
"""Keys are looked at up to here, or to the engine's longest sequence if that is shorter. A rotary embedding turns a
bias by the position, some channels once in millions: more positions widen the range (figures: docs/LOG.md)."""

NOISE = 2048
"""Vectors of noise, half of them the others' negatives, so that a range without a bias has its middle at 0."""

_REMEDY = "Set flashrl.kv_cache=auto"


def install(layer: Attention) -> None:
    """Make a layer compute with an offset and a scale of keys, NaN until ``measure``: no engine samples with keys as
    they come. Called while the layer is built, before its graph is compiled; a second call changes nothing.

    Raises:
        ValueError: it reads another layer's keys.
    """
    if hasattr(layer, "key_offset"):
        return
    if layer.kv_sharing_target_layer_name is not None:
        raise ValueError(
            f"{layer.layer_name} reads the keys of another layer, which no quantized KV cache has been tried with. "
            f"{_REMEDY}"
        )
    # Not persistent: no checkpoint has them.
    shape = layer.num_kv_heads, layer.head_size
    layer.register_buffer("key_offset", torch.full(shape, torch.nan, dtype=torch.float32), persistent=False)
    layer.register_buffer("key_scale", torch.full(shape, torch.nan, dtype=torch.float32), persistent=False)
    layer.register_forward_pre_hook(_equalize)


def equalized(
    query: torch.Tensor, key: torch.Tensor, offset: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``q * s`` and ``(k - c) / s``, in float32 or better, in the inputs' shapes and dtypes.

    Args:
        query: [tokens, heads * head size]; the heads of one KV head are neighbours.
        key: [tokens, KV heads * head size], alike.
        offset: c [KV heads, head size] float32.
        scale: s, alike.
    """
    tokens, (heads, size) = key.shape[0], scale.shape
    queries = query.reshape(tokens, heads, -1, size) * scale.unsqueeze(1)
    keys = (key.reshape(tokens, heads, size) - offset) / scale
    return queries.to(query.dtype).view(query.shape), keys.to(key.dtype).view(key.shape)


def _equalize(layer: Attention, args: tuple) -> tuple:
    query, key, *others = args
    return (*equalized(query, key, layer.key_offset, layer.key_scale), *others)


@torch.no_grad()
def measure(model: torch.nn.Module, config: ModelConfig) -> None:
    """Set the offset and the scale of every layer that ``install`` has seen, from the model's weights. A
    tensor-parallel rank does so for its own heads.

    Args:
        model: vLLM's, with weights.
        config: vLLM's configuration of it.

    Raises:
        ValueError: a layer cannot be asked for its keys; the message names it and the remedy.
    """
    layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "key_offset")}
    if not layers:
        return
    device, generator = next(iter(layers.values())).key_offset.device, torch.Generator().manual_seed(0)
    noise = torch.randn(NOISE // 2, config.get_hidden_size(), generator=generator).to(device, config.dtype)
    # At random: equal distances may be whole turns of some channels.
    positions = torch.randint(min(config.max_model_len, MAX_POSITIONS), (NOISE // 2,), generator=generator).to(device)
    noise, positions = torch.cat([noise, -noise]), positions.repeat(2)
    for name, layer in layers.items():
        offset, scale = layer.key_offset, layer.key_scale
        keys = _keys_of_noise(model, name, layer, noise, positions).float().view(-1, *offset.shape)
        offset.copy_((keys.amax(0) + keys.amin(0)) / 2 * _takes_an_offset(layer.impl))
        # Not below half of BF16's step at the offset, which a channel of nothing but a bias is rounded by.
        scale.copy_((keys - offset).abs().amax(0).maximum(offset.abs() / 256).clamp_min(1e-6))


def _takes_an_offset(attention: AttentionImpl) -> bool:
    """Whether nothing but softmax sees the logits: a cap bends them, and a sink beside them has no key."""
    return not getattr(attention, "logits_soft_cap", None) and getattr(attention, "sinks", None) is None


class _Keys(Exception):  # noqa: N818 - it stops a module, and nothing is wrong
    """Carries a layer's keys out of the module around it."""

    def __init__(self, keys: torch.Tensor):
        self.keys = keys


def _keys_of_noise(
    model: torch.nn.Module, name: str, layer: Attention, noise: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Keys [tokens, ...] as they come to a layer when the module around it reads noise [tokens, hidden size]."""
    around_name = name.rpartition(".")[0]
    around, block = model.get_submodule(around_name), model.get_submodule(around_name.rpartition(".")[0])
    norm = getattr(block, "input_layernorm", None)
    if norm is None and getattr(around, "k_norm", None) is None:  # which gives keys their range whatever comes before
        raise ValueError(
            f"{name}: {type(block).__name__} has no input_layernorm, whose output keys are made of. {_REMEDY}"
        )

    def stop(_: Attention, args: tuple) -> None:
        raise _Keys(args[1])

    handle = layer.register_forward_pre_hook(stop, prepend=True)
    try:
        hidden = noise if norm is None else norm(noise)
        known = {"positions": positions, "position_ids": positions, "hidden_states": hidden}
        around(**{word: known[word] for word in inspect.signature(around.forward).parameters if word in known})
    except _Keys as found:
        return found.keys
    except Exception as error:
        raise ValueError(f"{name}: no keys of it to look at ({type(error).__name__}: {error}). {_REMEDY}") from error
    finally:
        handle.remove()
    raise ValueError(f"{name}: {type(around).__name__} does not call it. {_REMEDY}")
