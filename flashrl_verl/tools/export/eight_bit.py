# SPDX-License-Identifier: Apache-2.0
"""INT8 and FP8 on disk: compressed-tensors W8A8, the rollout's codes and FP32 scales by output channel.

vLLM and transformers read it without this package. vLLM keeps ``weight_scale`` in FP32, so it multiplies bit by bit
what the rollout multiplied, and quantizes activations by token as it runs, as the rollout does.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.input_files import INDEX, weight_files
from flashrl_verl.quantization.formats import weight_format
from flashrl_verl.quantization.numerics import WeightFormat, quantize_rows
from flashrl_verl.refit.wire import wire_dtype
from flashrl_verl.settings import FlashRLConfig, Precision
from flashrl_verl.tools.export.checkpoint import new_folder

HEAD = "lm_head"
"""Stays in high precision everywhere; named for readers of the checkpoint that would quantize it."""

_WEIGHTS = ("*.safetensors", INDEX, "*.bin", "*.bin.index.json", "*.pt", "*.pth", "config.json")
"""Not copied: weights, and what is written anew."""


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The checkpoint's names of layers, without ``.weight``, in the model's order."""

    quantized: tuple[str, ...]
    kept: tuple[str, ...]
    """Linear layers and experts that stay in high precision."""


def quantize(source: Path, output: Path, settings: FlashRLConfig, shard_size: int | str = "5GB") -> Layers:
    """Write a model as 8-bit codes and scales; the folder appears whole or not at all.

    Args:
        source: a Hugging Face folder in high precision.
        output: does not exist, or is empty.
        settings: precision, and which layers stay in high precision.
        shard_size: largest file of weights; about what is held in memory.

    Returns:
        What was quantized.

    Raises:
        ConfigError: the layers to keep leave nothing; nothing was written.
        FlashRLError: the source is damaged, or holds NaN or Inf; nothing is left behind.
    """
    fmt = weight_format(settings.precision, rotation=False)
    where = locate(source)
    layers = survey(source, settings, where)
    chosen = {f"{layer}.weight" for layer in layers.quantized}
    with new_folder(output) as scratch:
        shards = split_torch_state_dict_into_shards(_planned(where, chosen, fmt), max_shard_size=shard_size)
        weight_map: dict[str, str] = {}
        total = 0
        with tqdm(total=len(where), desc="quantizing", unit="tensor") as progress:
            for file, names in shards.filename_to_tensors.items():
                held: dict[str, torch.Tensor] = {}
                for name in names:
                    tensor = _read(where[name], name)
                    tensor = tensor.to(wire_dtype(name, tensor.dtype, torch.bfloat16))
                    held |= _encode(name, tensor, fmt) if name in chosen else {name: tensor}
                    progress.update()
                save_file(held, scratch / file, metadata={"format": "pt"})
                (scratch / file).chmod(0o644)  # safetensors' 0600 would hide the weights from whoever serves them
                weight_map |= dict.fromkeys(held, file)
                total += sum(tensor.nbytes for tensor in held.values())
        if shards.is_sharded:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (scratch / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        for file in source.iterdir():  # tokenizer, generation settings, a model's own code
            if file.is_file() and not any(file.match(pattern) for pattern in _WEIGHTS):
                shutil.copyfile(file, scratch / file.name)
        config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
        config["quantization_config"] = quantization_config(layers, fmt)
        (scratch / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return layers


def quantization_config(layers: Layers, fmt: WeightFormat) -> dict[str, Any]:
    """Return config.json's ``quantization_config``."""
    number = {"num_bits": 8, "type": "int" if fmt.rounds_to_integers else "float", "symmetric": True}
    kind = "int-quantized" if fmt.rounds_to_integers else "float-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": list(layers.kept),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": kind,
                "weights": {**number, "strategy": "channel", "dynamic": False},
                "input_activations": {**number, "strategy": "token", "dynamic": True},
            }
        },
    }


# ---- the source's tensors ----


def locate(folder: Path) -> dict[str, Path]:
    """File of every tensor of a model's ``weight_files``.

    Raises:
        FlashRLError: a file is damaged or not there.
    """
    return {name: file for file in weight_files(folder) for name in _names(file)}


def _names(file: Path) -> list[str]:
    with _open(file) as stream:
        return list(stream.keys())


def _read(file: Path, name: str) -> torch.Tensor:
    with _open(file) as stream:
        return stream.get_tensor(name)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise FlashRLError(
            f"{file} is damaged or not there: {error}. Copy it again (a file of git-lfs: run `git lfs pull`)"
        ) from None


def _planned(where: dict[str, Path], chosen: Collection[str], fmt: WeightFormat) -> dict[str, torch.Tensor]:
    """The sizes that will be written, as tensors without storage; codes and their scales count as one."""
    planned: dict[str, torch.Tensor] = {}
    for name, file in where.items():
        with _open(file) as stream:
            shape = stream.get_slice(name).get_shape()
        if name in chosen:
            planned[name] = torch.empty(shape[0], shape[1] + 4, dtype=fmt.dtype, device="meta")
        else:
            planned[name] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return planned


def _encode(name: str, weight: torch.Tensor, fmt: WeightFormat) -> dict[str, torch.Tensor]:
    codes, scales = quantize_rows(weight, fmt)
    if not scales.isfinite().all():
        raise FlashRLError(f"{name} holds NaN or Inf: the training had gone wrong when it was saved. Take another step")
    return {name: codes, f"{name}_scale": scales}


# ---- which layers ----


def survey(folder: Path, settings: FlashRLConfig, names: Collection[str]) -> Layers:
    """Ask vLLM's own model, built without storage, and the rollout's config which layers the rollout quantizes.

    No list of names is kept here, so an export follows the rollout to every model that it knows.

    Args:
        folder: with the model's config.json.
        settings: precision (not bf16) and the layers to keep. Whether this machine has a kernel does not matter.
        names: the checkpoint's tensors.

    Raises:
        ConfigError: an entry of ``ignore`` matches a part of a fused layer, or nothing is left to quantize.
        FlashRLError: a layer of vLLM's has no name in the checkpoint.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.model_loader.utils import initialize_model

    from flashrl_verl.plugins.vllm import register
    from flashrl_verl.quantization.config import NAME, FlashRLQuantizationConfig, quantization_config_dict
    from flashrl_verl.tools.engines import model as engine_model

    register()
    config = FlashRLQuantizationConfig(settings)
    # Built in BF16: asking which layers are quantized needs no kernel for them.
    overrides = {"quantization_config": quantization_config_dict(FlashRLConfig(precision=Precision.BF16))}
    quantized: list[str] = []
    kept: list[str] = []
    with (
        engine_model.vllm_config(folder, quantization=NAME, hf_overrides=overrides) as vllm_config,
        engine_model.process_group(),
    ):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("meta"):
                model = initialize_model(vllm_config=vllm_config)
        finally:
            torch.set_default_dtype(before)
            rotary_embedding._ROPE_DICT.clear()  # of this process: an engine would take the tables without data
        config.packed_modules_mapping = vllm_config.quant_config.packed_modules_mapping
        for name, module in model.named_modules():
            if isinstance(module, LinearBase | RoutedExperts):
                name = module.layer_name if isinstance(module, RoutedExperts) else name
                saved = _saved_as(name, config.parts(module, name), names)
                (quantized if config.quantizes(module, name) else kept).extend(saved)
    if not quantized:
        raise ConfigError(f"flashrl.ignore and the kept layers leave nothing to quantize in {folder}. --format bf16")
    return Layers(quantized=tuple(quantized), kept=tuple(dict.fromkeys([*kept, HEAD])))


def _saved_as(name: str, parts: list[str], names: Collection[str]) -> list[str]:
    """The checkpoint's names of one of vLLM's layers: its parts, or the layer where it is fused on disk too."""
    for candidate in (parts, [name]):
        if candidate and all(f"{part}.weight" in names for part in candidate):
            return candidate
    raise FlashRLError(
        f"vLLM's layer {name} has no weight of that name, nor {', '.join(parts[:3]) or 'any parts'}, in the "
        "checkpoint: this model's 8-bit export is not supported. Export it with --format bf16"
    )
