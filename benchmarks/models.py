# SPDX-License-Identifier: Apache-2.0
"""The tensors that are sent of a model, and a vLLM model without an engine around it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from flashrl_verl.tools.engines.model import process_group, vllm_config

BUCKET_BYTES = 2 << 30
"""Bytes of weights handed over at once, as verl's 2048 MB buckets."""

Weights = list[tuple[str, torch.Tensor]]


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


def buckets(folder: Path, device: torch.device) -> Iterator[Weights]:
    """Yield what is sent of a Hugging Face folder, on the device; where it has a config.json alone, BF16 weights from a
    normal distribution with standard deviation 0.02: codes that nobody wrote are zeros, with which a GPU takes less
    power and clocks higher."""
    from flashrl_verl.refit.sender import cast_for_rollout

    with torch.device("cpu"):  # vLLM's worker has made the GPU the default
        if any(folder.glob("*.safetensors")):
            loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
            weights = cast_for_rollout(list(sent_tensors(loaded)), torch.bfloat16)
        else:
            weights = tensor_shapes(AutoConfig.from_pretrained(folder))
    generator = torch.Generator(device).manual_seed(0)
    bucket: Weights = []
    for name, tensor in weights:
        if bucket and sum(t.nbytes for _, t in bucket) + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket = []
        if tensor.is_meta:
            random = torch.empty(tensor.shape, dtype=torch.bfloat16, device=device)
            bucket.append((name, random.normal_(0, 0.02, generator=generator)))
        else:
            bucket.append((name, tensor.to(device)))
    yield bucket


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
