# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model the rollout quantizes: asked of vLLM's own model, built without storage, and of the rollout's
config.

No list of names is kept here, so an export follows the rollout to every model that it knows.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.settings import FlashRLConfig, Precision

HEAD = "lm_head"
"""Stays in high precision everywhere; named for readers of the checkpoint that would quantize it."""


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The checkpoint's names of layers, without ``.weight``, in the model's order."""

    quantized: tuple[str, ...]
    kept: tuple[str, ...]
    """Linear layers and experts that stay in high precision."""
    experts: bool
    """Whether some of the quantized ones are experts."""


def survey(folder: Path, precision: Precision, layers: dict[str, Any], names: Collection[str]) -> Layers:
    """Ask which layers the rollout would quantize.

    Args:
        folder: with the model's config.json.
        precision: not bf16. Whether this machine has a kernel for it does not matter.
        layers: ``ignore``, ``keep_first_layers`` and ``keep_last_layers``.
        names: the checkpoint's tensors.

    Raises:
        ConfigError: an entry of ``ignore`` matches nothing or a part of a fused layer, or the rollout cannot run the
            model.
        FlashRLError: a layer of vLLM's has no name in the checkpoint.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase

    from flashrl_verl.quantization.config import FlashRLQuantizationConfig

    config = FlashRLQuantizationConfig(FlashRLConfig(precision=precision, **layers))
    quantized: list[str] = []
    kept: list[str] = []
    experts = False
    with _built(folder) as (model, vllm_config):
        config.packed_modules_mapping = vllm_config.quant_config.packed_modules_mapping
        for name, module in model.named_modules():
            if not isinstance(module, LinearBase | RoutedExperts):
                continue
            name = module.layer_name if isinstance(module, RoutedExperts) else name
            chosen = config.quantizes(module, name)
            experts |= chosen and isinstance(module, RoutedExperts)
            (quantized if chosen else kept).extend(_saved_as(name, config.parts(module, name), names))
    config.selection.keeps(HEAD, [], 1 << 30)  # an entry that names it is of use: what it asks for is what happens
    if unused := config.selection.unused():
        raise ConfigError(
            f"--ignore {' '.join(unused)} matches no layer of {folder}. Names are those of the checkpoint"
        )
    if not quantized:
        raise ConfigError(f"--ignore and the kept layers leave nothing to quantize in {folder}. Take --format bf16")
    if HEAD not in kept:
        kept.append(HEAD)
    return Layers(quantized=tuple(quantized), kept=tuple(kept), experts=experts)


def _saved_as(name: str, parts: list[str], names: Collection[str]) -> list[str]:
    """The checkpoint's names of one of vLLM's layers: its parts, or the layer where it is fused on disk too."""
    for candidate in (parts, [name]):
        if candidate and all(f"{part}.weight" in names for part in candidate):
            return candidate
    raise FlashRLError(
        f"vLLM's layer {name} has no weight of that name, nor {', '.join(parts[:3]) or 'any parts'}, in the "
        "checkpoint: this model's 8-bit export is not supported. Export it with --format bf16"
    )


@contextlib.contextmanager
def _built(folder: Path) -> Iterator[tuple[torch.nn.Module, Any]]:
    """vLLM's model of a folder on the meta device, and vLLM's configuration, while it is the current one."""
    from vllm.model_executor.model_loader.utils import initialize_model

    from flashrl_verl.plugins.vllm import register
    from flashrl_verl.quantization.config import NAME, quantization_config_dict
    from benchmarks.legacy_learning.tools.engines import model as engine_model

    register()
    # In BF16: asking which layers are quantized needs no kernel for them.
    overrides = {"quantization_config": quantization_config_dict(FlashRLConfig(precision=Precision.BF16))}
    before = torch.get_default_dtype()
    with (
        engine_model.vllm_config(folder, quantization=NAME, hf_overrides=overrides) as config,
        engine_model.process_group(),
    ):
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("meta"):
                model = initialize_model(vllm_config=config)
        finally:
            torch.set_default_dtype(before)
        yield model, config
