# SPDX-License-Identifier: Apache-2.0
"""``flashrl export``: one pass over a checkpoint's tensors, from the ranks' files to a Hugging Face folder."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import flashrl_verl
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.refit.wire import wire_dtype
from flashrl_verl.settings import Precision
from flashrl_verl.tools.bar import sha256
from flashrl_verl.tools.export.folder import INDEX
from flashrl_verl.tools.export.source import RECORD, Checkpoint, open_checkpoint
from flashrl_verl.tools.export.writer import ShardWriter

Progress = Callable[[str, int, int], None]

_WEIGHT_FILES = ("*.safetensors", INDEX, "*.bin", "*.bin.index.json", "*.pt", "*.pth", RECORD, "config.json")
"""Not copied from the folder of configuration and tokenizer: weights of another time, and what is written anew."""

_ROOM_TO_SPARE = 64 << 20
"""Bytes asked of the disk beyond the weights: headers, tokenizer, file system."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be exported."""

    checkpoint: Path
    """See ``open_checkpoint``."""
    output: Path | None = None
    """A folder that does not exist; None for ``outputs/export/<run>-<checkpoint>-<format>``."""
    format: Precision = Precision.BF16
    layers: dict[str, Any] | None = None
    """``ignore``, ``keep_first_layers``, ``keep_last_layers`` (``chosen.layers_of``); not used by BF16."""
    max_shard_bytes: int = 5 * 10**9
    """Largest file of weights; about what is held in memory."""


def export(request: Request, progress: Progress = lambda doing, done, total: None) -> tuple[Path, dict[str, Any]]:
    """Write the folder; it appears whole or not at all.

    Args:
        request: what.
        progress: told of every tensor: what is done, how many are, and how many there are.

    Returns:
        The folder, and its record (``export.json``).

    Raises:
        ConfigError: the checkpoint cannot be exported so, the output is there already, or the disk is too small;
            nothing was written.
        FlashRLError: the checkpoint is damaged or holds NaN or Inf, or the disk filled up; nothing is left behind.
    """
    checkpoint = open_checkpoint(request.checkpoint)
    output = request.output or Path("outputs/export") / f"{checkpoint.name}-{request.format.value}"
    output = output.expanduser().resolve()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} is there already and is not overwritten. Remove it, or choose another --output")
    shapes = checkpoint.shapes()
    layers = _layers(checkpoint, request, shapes)
    _require_room(output, shapes, layers)
    # Before anything is read: a checkpoint that is written to meanwhile would make a folder of two steps.
    before = checkpoint.fingerprint()
    scratch = output.with_name(f".{output.name}.{uuid.uuid4().hex}.part")
    try:
        scratch.mkdir(parents=True)
        writer = ShardWriter(scratch, request.max_shard_bytes)
        for name, tensor in _encoded(_counted(checkpoint.tensors(), len(shapes), progress), layers, request.format):
            writer.add(name, tensor)
        files = writer.close()
        if checkpoint.fingerprint() != before:
            raise FlashRLError(f"{checkpoint.path} was written to while it was read. Export it again when it is whole")
        _copy_rest(checkpoint, scratch, layers, request.format)
        record = _record(checkpoint, request, layers, before) | {"files": _checksums(files, progress)}
        (scratch / RECORD).write_text(json.dumps(record, indent=1) + "\n")
        if output.exists():
            output.rmdir()  # it is empty, or this fails
        os.replace(scratch, output)
    except OSError as error:
        raise FlashRLError(
            f"{output} could not be written: {error.strerror or error}. Nothing is left behind; make room or allow "
            "writing there, or choose another --output"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return output, record


def as_sent(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors as a BF16 rollout gets them: rounded to BF16, but for MoE routers and integers
    (``wire_dtype``).

    Raises:
        FlashRLError: one holds NaN or Inf, or gets Inf by rounding.
    """
    for name, tensor in weights:
        if tensor.is_floating_point():
            tensor = tensor.to(wire_dtype(name, tensor.dtype, torch.bfloat16))
            if not (finite := tensor.isfinite()).all():
                count = tensor.numel() - int(finite.sum())
                raise FlashRLError(
                    f"{name} holds NaN or Inf at {count} of {tensor.numel()} places: the training had gone wrong when "
                    "this was saved. Take an earlier checkpoint"
                )
        yield name, tensor


def _layers(checkpoint: Checkpoint, request: Request, shapes: dict[str, torch.Size]) -> Any:
    if request.format is Precision.BF16:
        return None
    from flashrl_verl.tools.export.layers import survey

    layers = request.layers or {"ignore": [], "keep_first_layers": 0, "keep_last_layers": 0}
    return survey(checkpoint.folder, request.format, layers, set(shapes))


def _encoded(weights: Iterator[tuple[str, torch.Tensor]], layers: Any, precision: Precision) -> Iterator:
    if layers is None:
        return as_sent(weights)
    from flashrl_verl.quantization.formats import weight_format
    from flashrl_verl.tools.export.scheme import encode

    return encode(as_sent(weights), layers, weight_format(precision))


def _counted(weights: Iterator[tuple[str, torch.Tensor]], total: int, progress: Progress) -> Iterator:
    for done, pair in enumerate(weights, 1):
        yield pair
        progress("exporting", done, total)


def _require_room(output: Path, shapes: dict[str, torch.Size], layers: Any) -> None:
    quantized = set() if layers is None else {f"{layer}.weight" for layer in layers.quantized}
    need = _ROOM_TO_SPARE
    for name, shape in shapes.items():
        # FP32 is the widest that a trainer saves, and what a router may keep.
        kept = wire_dtype(name, torch.float32, torch.bfloat16)
        need += shape.numel() + 4 * shape[0] if name in quantized else kept.itemsize * shape.numel()
    there = next(folder for folder in (output, *output.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if free < need:
        raise ConfigError(
            f"{output} needs {need / 1e9:.1f} GB, and {there} has {free / 1e9:.1f}. Make room there, or set another "
            "--output"
        )


def _copy_rest(checkpoint: Checkpoint, folder: Path, layers: Any, precision: Precision) -> None:
    """Tokenizer, generation settings, a custom model's code; and config.json in the new format."""
    for file in checkpoint.folder.iterdir():
        if file.is_file() and not any(file.match(pattern) for pattern in _WEIGHT_FILES):
            shutil.copyfile(file, folder / file.name)
    config = {**checkpoint.config, "dtype": "bfloat16"}
    config.pop("quantization_config", None)  # null, or the checkpoint would have been refused
    if "torch_dtype" in config:
        config["torch_dtype"] = "bfloat16"
    if layers is not None:
        from flashrl_verl.quantization.formats import weight_format
        from flashrl_verl.tools.export.scheme import quantization_config

        config["quantization_config"] = quantization_config(layers, weight_format(precision))
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _record(checkpoint: Checkpoint, request: Request, layers: Any, fingerprint: list) -> dict[str, Any]:
    eight = {}
    if layers is not None:
        eight = {
            "scheme": (
                "compressed-tensors W8A8: weights by channel, absmax scales in float32; activations by token, dynamic"
            ),
            "quantized_layers": len(layers.quantized),
            "quantized_experts": layers.experts,
            "layers": request.layers,
        }
    return {
        "source": str(checkpoint.path),
        "source_files": fingerprint,
        "step": checkpoint.step,
        "format": request.format.value,
        **eight,
        "settings": checkpoint.settings,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": {
            "flashrl_verl": flashrl_verl.__version__,
            **{name: importlib.metadata.version(name) for name in ("torch", "transformers", "verl", "safetensors")},
        },
    }


def _checksums(files: list[Path], progress: Progress) -> dict[str, Any]:
    found = {}
    for done, file in enumerate(files, 1):
        found[file.name] = {"bytes": file.stat().st_size, "sha256": sha256(file)}
        progress("checksums", done, len(files))
    return found
