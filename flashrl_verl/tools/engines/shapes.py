# SPDX-License-Identifier: Apache-2.0
"""Models by name or path: nothing is downloaded."""

from pathlib import Path

from transformers import AutoConfig, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from flashrl_verl.errors import ConfigError

_QWEN = dict(
    vocab_size=152064, max_position_embeddings=32768, rope_theta=1e6, tie_word_embeddings=False, rms_norm_eps=1e-6
)
_QWEN3 = dict(vocab_size=151936, max_position_embeddings=40960, head_dim=128)


def _dense(
    kind: type[PretrainedConfig], hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **other
) -> PretrainedConfig:
    return kind(
        **{**_QWEN, **other},
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        architectures=[kind.__name__.replace("Config", "ForCausalLM")],
    )


# From the config.json of the Hugging Face repositories Qwen/<name> and meta-llama/<name>.
SHAPES = {
    # heads of 32: vLLM's CPU attention has none smaller
    "tiny": lambda: _dense(Qwen2Config, 64, 172, 2, 2, 1, vocab_size=512),
    "qwen2.5-0.5b": lambda: _dense(Qwen2Config, 896, 4864, 24, 14, 2, vocab_size=151936, tie_word_embeddings=True),
    "qwen2.5-1.5b": lambda: _dense(Qwen2Config, 1536, 8960, 28, 12, 2, vocab_size=151936, tie_word_embeddings=True),
    "qwen2.5-7b": lambda: _dense(Qwen2Config, 3584, 18944, 28, 28, 4),
    "qwen2.5-14b": lambda: _dense(Qwen2Config, 5120, 13824, 48, 40, 8),
    "qwen2.5-32b": lambda: _dense(Qwen2Config, 5120, 27648, 64, 40, 8),
    "qwen2.5-72b": lambda: _dense(Qwen2Config, 8192, 29568, 80, 64, 8),
    "llama-3.1-70b": lambda: _dense(LlamaConfig, 8192, 28672, 80, 64, 8, vocab_size=128256),
    "qwen3-1.7b": lambda: _dense(Qwen3Config, 2048, 6144, 28, 16, 8, **_QWEN3, tie_word_embeddings=True),
    "qwen3-8b": lambda: _dense(Qwen3Config, 4096, 12288, 36, 32, 8, **_QWEN3),
    "qwen3-14b": lambda: _dense(Qwen3Config, 5120, 17408, 40, 40, 8, **_QWEN3),
    "qwen3-32b": lambda: _dense(Qwen3Config, 5120, 25600, 64, 64, 8, **_QWEN3),
    "qwen3-30b-a3b": lambda: Qwen3MoeConfig(
        **{**_QWEN, "vocab_size": 151936},
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        architectures=["Qwen3MoeForCausalLM"],
    ),
}
"""Names that ``--model`` takes besides paths."""


def load_config(model: str) -> PretrainedConfig:
    """Return the configuration of a model.

    Args:
        model: a name of ``SHAPES``, or a folder that holds a config.json.

    Raises:
        ConfigError: it is neither.
    """
    if model in SHAPES:
        return SHAPES[model]()
    if not (Path(model) / "config.json").is_file():
        raise ConfigError(f"--model {model!r} is neither a folder with a config.json nor one of {', '.join(SHAPES)}")
    try:
        config = AutoConfig.from_pretrained(model)
    except Exception as error:  # noqa: BLE001 - transformers raises several kinds, of many lines
        line = str(error).strip().splitlines()[0]
        raise ConfigError(f"--model {model}: transformers cannot read its config.json: {line}") from error
    if not config.architectures:
        raise ConfigError(f'{model}/config.json names no architecture; add "architectures": ["...ForCausalLM"]')
    return config
