# SPDX-License-Identifier: Apache-2.0
"""The command `flashrl export`."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashrl_verl.errors import ConfigError
from flashrl_verl.settings import Precision
from flashrl_verl.tools.console import new_console

if TYPE_CHECKING:
    from flashrl_verl.tools.export.export import Request

_UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9}

IGNORE = typer.Option(
    help="A layer, or re:pattern, that stays in BF16; may be repeated; none: no layer. Else the run's record."
)
KEEP_FIRST = typer.Option(min=0, help="Decoder layers at the start that stay in BF16. Else what the run recorded.")
KEEP_LAST = typer.Option(min=0, help="Decoder layers at the end that stay in BF16. Else what the run recorded.")


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="<trainer.default_local_dir>/global_step_N, or a Hugging Face folder."
        ),
    ],
    format: Annotated[Precision, typer.Option(help="Weights: BF16, or the rollout's codes as compressed-tensors.")] = (
        Precision.BF16
    ),
    output: Annotated[
        Path | None,
        typer.Option(help="Folder to make; else outputs/export/<run>-<checkpoint>-<format>.", show_default=False),
    ] = None,
    ignore: Annotated[list[str] | None, IGNORE] = None,
    keep_first_layers: Annotated[int | None, KEEP_FIRST] = None,
    keep_last_layers: Annotated[int | None, KEEP_LAST] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest file of weights, and about the memory needed.")] = "5GB",
) -> None:
    """Export a checkpoint for serving: a Hugging Face folder in BF16, or INT8 or FP8 that plain vLLM loads.

    The 8-bit codes and scales are the rollout's own. BF16 needs no GPU; 8 bits need a vLLM that finds its device.
    """
    from flashrl_verl.tools.bar import Bar
    from flashrl_verl.tools.export.export import export as write
    from flashrl_verl.tools.process_tree import Stopped, stoppable

    console = new_console()
    try:
        with stoppable(), quiet(), Bar(console, "tensors") as bar:
            kept = (ignore or [], keep_first_layers, keep_last_layers)
            folder, record = write(_request(console, checkpoint, format, output, kept, _bytes(max_shard_size)), bar)
    except Stopped as stopped:
        console.print("stopped; nothing is left behind")
        raise typer.Exit(stopped.exit_code) from None
    _say_result(console, folder, record)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what verl and torch log while they are imported and read a checkpoint; what goes wrong raises."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)


def _request(
    console: Any,
    checkpoint: Path,
    format: Precision,
    output: Path | None,
    kept: tuple[list[str], int | None, int | None],
    max_shard_bytes: int,
) -> Request:
    from flashrl_verl.tools.export.chosen import layers_of
    from flashrl_verl.tools.export.export import Request
    from flashrl_verl.tools.export.source import open_checkpoint

    given, layers = kept != ([], None, None), None
    if format is not Precision.BF16:
        recorded = open_checkpoint(checkpoint).settings
        layers = layers_of(recorded, *kept)
        say_layers(console, layers, kept, recorded)
    elif given:
        raise ConfigError("--ignore and the kept layers have no effect with --format bf16: leave them out")
    return Request(checkpoint=checkpoint, output=output, format=format, layers=layers, max_shard_bytes=max_shard_bytes)


def _say_result(console: Any, folder: Path, record: dict[str, Any]) -> None:
    size = sum(file["bytes"] for file in record["files"].values())
    of = f" of step {record['step']}" if record["step"] is not None else ""
    say(console, f"{folder}: {record['format']}{of}, {size / 1e9:.2f} GB in {len(record['files'])} files")
    if layers := record.get("quantized_layers"):
        say(console, f"  {layers} layers as codes; the rest BF16. Serve it: vllm serve {folder}")
    if (record["settings"] or {}).get("fp32_lm_head"):
        say(
            console,
            "  the run's logits were FP32 (flashrl.fp32_lm_head), and are BF16 when served: near ties may fall "
            "otherwise",
        )
    say_kv_cache(console, record["settings"], "  ", "the exported model is served with what `vllm serve` is told")
    if record.get("quantized_experts") and record["format"] == Precision.INT8.value:
        say(
            console,
            "  vLLM's CUDA kernels for INT8 experts use the codes as weights only: tokens may differ from a rollout's",
        )


def say_layers(
    console: Any,
    layers: dict[str, Any],
    kept: tuple[list[str], int | None, int | None],
    recorded: dict[str, Any] | None,
) -> None:
    """Say which layers stay in BF16, and who said so of each setting.

    Args:
        console: to print on.
        layers: of ``chosen.layers_of``.
        kept: what the command line says of them, in their order.
        recorded: the checkpoint's record.
    """
    otherwise = "the run's record" if recorded else "the defaults; the checkpoint has no record"
    by: dict[str, list[str]] = {}
    for (key, value), said in zip(layers.items(), kept, strict=True):
        by.setdefault(otherwise if said in ([], None) else "the command line", []).append(f"{key}={value}")
    say(console, "kept in BF16: " + "; ".join(f"{', '.join(values)} (by {source})" for source, values in by.items()))


def say_kv_cache(console: Any, recorded: dict[str, Any] | None, indent: str, instead: str) -> None:
    """Say that a run's 8-bit KV cache is not applied.

    Args:
        console: to print on.
        recorded: the checkpoint's record.
        indent: before the line.
        instead: what holds in its place.
    """
    from flashrl_verl.settings import KVCache
    from flashrl_verl.tools.export.chosen import kv_cache_of

    if (kind := kv_cache_of(recorded)) is not KVCache.AUTO:
        text = (
            f"the run's KV cache was flashrl.kv_cache={kind.value}, which is not applied: {instead}; tokens may differ"
        )
        say(console, f"{indent}{text} from the rollout's")


def say(console: Any, text: str) -> None:
    """Print a line as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+) ?([kmg]b)", text.strip().lower())
    if not found or not int(found[1]):
        raise ConfigError(f"--max-shard-size {text!r} is not a size such as 500MB or 5GB")
    return int(found[1]) * _UNITS[found[2]]
