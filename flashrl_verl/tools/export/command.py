# SPDX-License-Identifier: Apache-2.0
"""The command `flashrl export`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from omegaconf import OmegaConf

from flashrl_verl.errors import ConfigError
from flashrl_verl.settings import FlashRLConfig, Precision


def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A run, its global_step_<N>, or a Hugging Face folder.")
    ],
    format: Annotated[Precision, typer.Option(help="BF16, or the rollout's 8-bit codes as compressed-tensors.")] = (
        Precision.BF16
    ),
    output: Annotated[
        Path | None, typer.Option(help="Folder to make; else outputs/export/<name>-<format>.", show_default=False)
    ] = None,
) -> None:
    """Export a checkpoint for serving: a Hugging Face folder in BF16, or INT8 or FP8 that plain vLLM loads.

    BF16 is verl's merger; routers of MoE models keep the trainer's precision. FP8 has the rollout's own codes and
    scales, INT8 those of a rollout without rotation, which plain vLLM does not know. Layers that the run kept in BF16
    stay in it.
    """
    from flashrl_verl.tools.export.checkpoint import find

    found = find(checkpoint)
    folder = (output or Path("outputs/export") / f"{found.name}-{format.value}").expanduser().resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already and is not overwritten. Remove it, or choose another --output")
    if format is Precision.BF16:
        if not found.sharded:
            raise ConfigError(f"{found.path} is a Hugging Face folder already. Serve it as it is, or name --format")
        from flashrl_verl.tools.export.merge import merge

        merge(found, folder)
        typer.echo(f"{folder}: BF16 of step {found.step}")
        return
    ignore = FlashRLConfig.from_mapping(OmegaConf.load(found.config).flashrl if found.config else {}).ignore
    from flashrl_verl.tools.export.eight_bit import quantize

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.bf16-", dir=folder.parent) as scratch:
        source = found.path
        if found.sharded:
            from flashrl_verl.tools.export.merge import merge

            source = Path(scratch) / "bf16"
            merge(found, source)
        layers = quantize(source, folder, FlashRLConfig(precision=format, ignore=ignore))
    typer.echo(
        f"{folder}: {len(layers.quantized)} matrices of the checkpoint in {format.value}, {len(layers.kept)} in BF16 "
        f"(ignore={ignore})"
    )
    typer.echo(f"Serve it: vllm serve {folder}")
    if format is Precision.INT8:
        typer.echo(
            "Its layers are not rotated, which plain vLLM cannot do: further from the trainer than INT8 rollouts are. "
            "As those: export --format bf16, and serve that with this package (docs/evaluation.md)"
        )
