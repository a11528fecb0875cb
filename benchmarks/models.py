# SPDX-License-Identifier: Apache-2.0
"""Models of fewer layers, the tensors that are sent of a model, and a vLLM model without an engine around it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from flashrl_verl.errors import ConfigError
from flashrl_verl.tools.engines import shapes
from flashrl_verl.tools.engines.model import process_group, vllm_config


def load_config(model: str, layers: int | None = None) -> PretrainedConfig:
    """``shapes.load_config``, with ``layers`` decoder layers instead of the model's, for a quick look."""
    config = shapes.load_config(model)
    if layers is not None:
        if layers > config.num_hidden_layers:
            raise ConfigError(
                f"--layers {layers}: {model} has {config.num_hidden_layers}; --layers takes fewer, never more"
            )
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    return config


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


@contextlib.contextmanager
def model(path: Path, **arguments: Any) -> Iterator[tuple[torch.nn.Module, Any]]:
    """Build a vLLM model with dummy weights; yields it with vLLM's configuration. For a process of its own.

    Args:
        path: folder with config.json.
        **arguments: engine arguments, such as quantization and hf_overrides.
    """
    from vllm.model_executor.model_loader import get_model

    with vllm_config(path, **arguments) as config, process_group():
        yield get_model(vllm_config=config), config
