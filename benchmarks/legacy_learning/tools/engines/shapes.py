# SPDX-License-Identifier: Apache-2.0
"""Models by name or path, and random weights of their shape made on the device: nothing is downloaded."""

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3MoeConfig,
)

from flashrl_verl.errors import ConfigError

_QWEN = dict(
    vocab_size=152064, max_position_embeddings=32768, rope_theta=1e6, tie_word_embeddings=False, rms_norm_eps=1e-6
)


def _qwen25(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **other) -> Qwen2Config:
    return Qwen2Config(
        **{**_QWEN, **other},
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        architectures=["Qwen2ForCausalLM"],
    )


# From the config.json of the Hugging Face repositories Qwen/<name>.
SHAPES = {
    "tiny": lambda: _qwen25(64, 172, 2, 2, 1, vocab_size=512),  # heads of 32: vLLM's CPU attention has none smaller
    "qwen2.5-0.5b": lambda: _qwen25(896, 4864, 24, 14, 2, vocab_size=151936, tie_word_embeddings=True),
    "qwen2.5-7b": lambda: _qwen25(3584, 18944, 28, 28, 4),
    "qwen2.5-14b": lambda: _qwen25(5120, 13824, 48, 40, 8),
    "qwen2.5-32b": lambda: _qwen25(5120, 27648, 64, 40, 8),
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


def load_config(model: str, layers: int | None = None) -> PretrainedConfig:
    """Return the configuration of a model.

    Args:
        model: a name of ``SHAPES``, a config.json, or a folder that holds one.
        layers: decoder layers instead of the model's, for a quick look.

    Raises:
        ConfigError: it is none of these.
    """
    if model in SHAPES:
        config = SHAPES[model]()
    else:
        path = Path(model)
        folder = path.parent if path.name == "config.json" else path
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"--model {model!r} is neither a folder with a config.json nor one of {', '.join(SHAPES)}"
            )
        try:
            config = AutoConfig.from_pretrained(folder)
        except Exception as error:  # noqa: BLE001 - transformers raises several kinds, of many lines
            line = str(error).strip().splitlines()[0]
            raise ConfigError(f"--model {model}: transformers cannot read {folder / 'config.json'}: {line}") from error
        if not config.architectures:
            raise ConfigError(
                f'{folder / "config.json"} names no architecture; add "architectures": ["...ForCausalLM"]'
            )
    if layers is not None:
        if layers > config.num_hidden_layers:
            raise ConfigError(
                f"--layers {layers}: {model} has {config.num_hidden_layers}; --layers takes fewer, never more"
            )
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    return config


def save_config(config: PretrainedConfig, folder: Path) -> Path:
    """Write config.json for vLLM to read; returns ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=1))
    return folder


def sent_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of all that verl's FSDP engine sends of a model (``get_per_tensor_param``): experts one by
    one, a tied ``lm_head`` too, which the rollout then leaves alone."""
    from verl.utils.model import convert_weight_keys
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    yield from unfuse_moe_params(convert_weight_keys(model.state_dict(), model).items(), model.config.model_type)


def tensor_shapes(config: PretrainedConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """``sent_tensors`` of a model of such a shape, on the meta device."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    yield from sent_tensors(model)


def require_host_memory(config: PretrainedConfig, model: str, copies: int = 1) -> None:
    """Refuse a model whose weights the host cannot hold, where no GPU is to hold them: Linux would end this process, or
    a neighbour, minutes later.

    Args:
        config: its configuration.
        model: what it was called by.
        copies: of so many bytes: weights, gradients.

    Raises:
        ConfigError: its BF16 weights are larger than the memory that is free.
    """
    needed = copies * sum(tensor.nbytes for _, tensor in tensor_shapes(config)) / 2**30
    free = psutil.virtual_memory().available / 2**30
    if needed > free:
        raise ConfigError(
            f"--model {model}: without a GPU, {needed:.0f} GiB of BF16 weights{' and gradients' * (copies > 1)} do not "
            f"fit into the {free:.0f} GiB of memory that are free. Remedy: a GPU, fewer --layers, or --model tiny"
        )


def random_weights(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device, bucket_bytes: int, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Make weights of a model's shape, normal with standard deviation 0.02, on the device.

    They lie behind each other in buffers of ``bucket_bytes``, as in the buckets in which verl sends them.
    """
    generator = torch.Generator(device).manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    pending: list[tuple[str, torch.Size]] = []

    def flush() -> None:
        buffer = torch.empty(sum(shape.numel() for _, shape in pending), dtype=dtype, device=device)
        buffer.normal_(0, 0.02, generator=generator)
        for (name, shape), part in zip(pending, buffer.split([shape.numel() for _, shape in pending]), strict=True):
            weights[name] = part.view(shape)
        pending.clear()

    for name, meta in tensor_shapes(config):
        if pending and (sum(shape.numel() for _, shape in pending) + meta.numel()) * dtype.itemsize > bucket_bytes:
            flush()
        pending.append((name, meta.shape))
    flush()
    return weights
