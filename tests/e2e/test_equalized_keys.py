# SPDX-License-Identifier: Apache-2.0
"""Equalized keys in real engines on a CPU, whose caches keep 16 bits, so that the rest is theirs: attention stays what
it was, and the offset and the scale are those of the keys that transformers makes of the same noise.

Structures of keys that users train: biases, norms of keys, a norm's bias, partial, interleaved and scaled rotary
embeddings.
"""

from pathlib import Path

import pytest
import torch
from engines import Refit, engine, in_own_process, runner, teacher_forced
from tiny_models import CONFIGS, LAYERS, VOCAB, wire
from transformers import AutoModelForCausalLM, Gemma2Config, Glm4Config, PhiConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

SHAPE = {k: getattr(CONFIGS["qwen2.5"], k) for k in ("vocab_size", "num_hidden_layers", "num_attention_heads")}
SHAPE |= dict(num_key_value_heads=2, hidden_size=128, intermediate_size=344, max_position_embeddings=256)
SHAPE |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.05)
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
FAMILIES = {
    "biases": CONFIGS["qwen2.5"],
    "norms of keys": CONFIGS["qwen3"],
    "yarn": type(CONFIGS["qwen2.5"])(**{**CONFIGS["qwen2.5"].to_dict(), "rope_parameters": YARN}),
    "one plus the gain, a cap": Gemma2Config(**SHAPE, head_dim=32, query_pre_attn_scalar=32),
    "a norm's bias, partial rotary": PhiConfig(
        **SHAPE | {"num_key_value_heads": 4, "intermediate_size": 512}, partial_rotary_factor=0.5
    ),
    "interleaved": Glm4Config(**SHAPE, head_dim=32, partial_rotary_factor=0.5, attention_bias=True),
}
SEQUENCES = torch.randint(3, VOCAB, (4, 100), generator=torch.Generator().manual_seed(0)).tolist()


def policy(name: str, seed: int) -> PreTrainedModel:
    """A random model whose keys have large biases, and gains of their norms far apart."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(FAMILIES[name], attn_implementation="eager").float().eval()
    model.config.architectures = [type(model).__name__]
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            size = 20.0 if parameter_name.endswith("k_proj.bias") else 0.5
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * size)
    return model


@torch.no_grad()
def keys_of_noise(model: PreTrainedModel, length: int) -> list[torch.Tensor]:
    """Keys [tokens, KV heads, head size] of each layer of noise behind its norm, by transformers in float32."""
    found: list[torch.Tensor] = []

    def keep(module, query, key, value, mask, **_):
        found.append(key[0].transpose(0, 1))
        return query.transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("keep_keys", keep)
    model.config._attn_implementation = "keep_keys"
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1024, model.config.hidden_size, generator=generator)
    hidden = torch.cat([noise, -noise]).bfloat16().float().unsqueeze(0)
    positions = torch.randint(length, (1024,), generator=generator).repeat(2).unsqueeze(0)
    turn = model.model.rotary_emb(hidden, positions)
    for layer in model.model.layers:
        layer.self_attn(hidden_states=layer.input_layernorm(hidden), position_embeddings=turn, attention_mask=None)
    return found


def look(path: Path, name: str, precision: str) -> None:
    from vllm.model_executor.layers.attention import Attention

    from flashrl_verl.quantization import config

    first, second = policy(name, 0), policy(name, 1)
    first.config.save_pretrained(path)
    config.is_quantized_kv_cache = lambda dtype: True  # no CPU has a quantized cache; this process ends with the test
    with engine(path, {"precision": precision}, compiled=precision == "bf16") as llm:  # either way
        send, worker = Refit(llm), runner(llm)
        layers = [m for m in worker.model.modules() if isinstance(m, Attention)]
        (found,) = llm.collective_rpc("flashrl_layers")
        assert found["kv_cache"]["equalized"] == len(layers) == LAYERS
        assert all(layer.key_scale.isnan().all() for layer in layers)  # nothing is sampled before an update
        length = worker.vllm_config.model_config.max_model_len
        for step, model in enumerate((second, first)):  # of the weights as they are, whatever was before
            send(wire(model), step)
            for layer, keys in zip(layers, keys_of_noise(model, length), strict=True):
                # Without a bias noise and its negative cancel; under a cap there is no constant to take off.
                offset = (keys.amax(0) + keys.amin(0)) / 2 * (name != "one plus the gain, a cap")
                scale = (keys - offset).abs().amax(0)
                within = float(keys.abs().max()) / 64  # of the largest key
                torch.testing.assert_close(layer.key_offset, offset, rtol=0, atol=within)
                torch.testing.assert_close(layer.key_scale, scale, rtol=0, atol=within)
        with_them = torch.tensor(sum(teacher_forced(llm, SEQUENCES), []))

        for layer in layers:
            layer.key_offset.zero_()
            layer.key_scale.fill_(1)
        assert llm.reset_prefix_cache()
        without = torch.tensor(sum(teacher_forced(llm, SEQUENCES), []))
        # Keys are rounded to BF16 with the bias before they lose it, and without it once more.
        assert 0 < (with_them - without).abs().mean() < 0.03


@pytest.mark.parametrize("precision", ["bf16", pytest.param("int8", marks=pytest.mark.slow)])
def test_attention_stays_what_it_was_and_the_constants_are_those_of_the_weights(tmp_path, precision):
    in_own_process(look, tmp_path, "biases", precision)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FAMILIES)[1:])
def test_other_structures_of_keys(tmp_path, name):
    in_own_process(look, tmp_path, name, "bf16")
