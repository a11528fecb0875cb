# SPDX-License-Identifier: Apache-2.0
"""One layer, quantized on load by our own parameter inside a real vLLM layer, against a float64 product of its BF16 weights."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from flashrl_verl.check.findings import Finding, fail, ok
from flashrl_verl.check.subjects import numerics
from flashrl_verl.config import FlashRLConfig, Precision
from flashrl_verl.quantization.formats import weight_format
from flashrl_verl.quantization.numerics import sqnr_db

LIMIT_DB = {Precision.INT8: 35.0, Precision.FP8: 24.0, Precision.FP8_BLOCK: 24.0, Precision.BF16: 45.0}
"""Least signal-to-noise ratio of the layer's output, dB. Of Gaussian rows of some 200 values the largest is about 2.9
deviations: an INT8 step is 2.9/127 of one, its rounding noise step^2/12, 43.6 dB; weights and activations together 40.6. E4M3
rounds to 3 bits behind the leading one, about 31.5 dB, together 28.5. BF16 rounds the output, 55 dB. Seen on a CPU: 39.9 to
40.5, 28.6 to 28.7, 55.5. The limits are 4 to 10 dB lower: more than twice the noise in power, which no kernel that does what
it says has; a scale that is wrong by a factor of 2 gives 0 to 6 dB, another weight less than 0."""

_SHAPES = ((384, 256), (200, 136))
"""[N, K] of the layers: one with multiples of 16, which CUTLASS needs, and one without, for the kernel behind it."""

_BLOCK_SHAPES = ((384, 256), (128, 640))
"""The same for a format with blocks: whole ones, several both ways and a single row of them."""

_TOKENS = 32


def check_layer(precision: Precision, device: str, gpus: int) -> Iterator[Finding]:
    """Load two weights in turn into a vLLM layer and compare its output after each.

    Args:
        precision: of the layer.
        device: ``cpu`` or ``cuda``.
        gpus: how many there are; each gets a layer.
    """
    from flashrl_verl.bench import engine_model, shapes

    devices = [torch.device(device, index) for index in range(gpus)] if device == "cuda" else [torch.device("cpu")]
    least = float("inf")
    blocks = (fmt := weight_format(precision)) is not None and fmt.block is not None
    with tempfile.TemporaryDirectory() as folder:
        path = shapes.save_config(shapes.load_config("tiny"), Path(folder))
        with engine_model.vllm_config(path), engine_model.process_group():
            for place in devices:
                for rows, columns in _BLOCK_SHAPES if blocks else _SHAPES:
                    ratio, wrong = _look(precision, place, rows, columns)
                    if wrong:
                        yield fail(numerics(precision), f"a layer of {rows} x {columns} on {place} {wrong}", _remedy(precision))
                        return
                    least = min(least, ratio)
    limit, places = LIMIT_DB[precision], f", on {gpus} GPU(s)" if gpus else ""
    yield ok(numerics(precision), f"{least:.1f} dB against float64 (at least {limit:g}), after a second load too{places}")


def _remedy(precision: Precision) -> str:
    other = "flashrl.precision=bf16, to see whether quantization is at fault" if weight_format(precision) else "another machine"
    return f"do not train with it: tested versions (`flashrl version`), another GPU, {other}; then report it"


def _look(precision: Precision, device: torch.device, rows: int, columns: int) -> tuple[float, str | None]:
    """The lower ratio of two loads in dB, and what is wrong, None if nothing is."""
    generator = torch.Generator().manual_seed(rows)
    layer = _layer(precision, device, rows, columns)
    if (fmt := weight_format(precision)) and layer.weight.dtype != fmt.dtype:
        return 0.0, f"holds {layer.weight.dtype}, not {fmt.dtype}: it is not quantized"
    before, address, least = None, layer.weight.data_ptr(), float("inf")
    for _ in range(2):
        weight = torch.randn(rows, columns, generator=generator).mul(0.02).bfloat16()
        x = torch.randn(_TOKENS, columns, generator=generator).bfloat16()
        with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            layer.weight.weight_loader(layer.weight, weight.to(device))
            layer.quant_method.process_weights_after_loading(layer)
            output = layer(x.to(device)).cpu()
        if not output.isfinite().all():
            return 0.0, "gives NaN or Inf"
        ratio = sqnr_db(x.double() @ weight.double().T, output)
        if ratio < LIMIT_DB[precision]:
            stale = before is not None and sqnr_db(x.double() @ before.double().T, output) > ratio
            why = ": it computes with the weights before" if stale else ""
            return 0.0, f"is at {ratio:.1f} dB against float64, below {LIMIT_DB[precision]:g}{why}"
        if layer.weight.data_ptr() != address:
            return 0.0, "moved its weight while it was loaded, which CUDA graphs would not see"
        before, least = weight, min(least, ratio)
    return least, None


def _layer(precision: Precision, device: torch.device, rows: int, columns: int) -> torch.nn.Module:
    """A row-parallel linear [rows, columns] as vLLM makes it for the quantization config ``flashrl``."""
    from vllm.model_executor.layers.linear import RowParallelLinear
    from vllm.model_executor.layers.quantization import get_quantization_config

    from flashrl_verl.quantization.config import NAME, quantization_config_dict

    config = get_quantization_config(NAME).from_config(quantization_config_dict(FlashRLConfig(precision=precision)))
    with device:
        return RowParallelLinear(
            columns, rows, bias=False, params_dtype=torch.bfloat16, quant_config=config, prefix="model.layers.0.mlp.down_proj",
            return_bias=False,
        )  # fmt: skip
