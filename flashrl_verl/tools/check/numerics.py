# SPDX-License-Identifier: Apache-2.0
"""One layer, quantized on load by our own parameter inside a real vLLM layer, against a float64 product of its BF16
weights."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch

from flashrl_verl.quantization.formats import weight_format
from flashrl_verl.quantization.numerics import sqnr_db
from flashrl_verl.settings import FlashRLConfig, Precision
from flashrl_verl.tools.check.findings import Finding, fail, ok
from flashrl_verl.tools.check.subjects import numerics

LIMIT_DB = {Precision.INT8: 35.0, Precision.FP8: 24.0, Precision.BF16: 45.0}
"""Least signal-to-noise ratio of the layer's output, dB. Of Gaussian rows of some 200 values the largest is about 2.9
deviations: an INT8 step is 2.9/127 of one, its rounding noise step^2/12, 43.6 dB; weights and activations together
    40.6. E4M3
rounds to 3 bits behind the leading one, about 31.5 dB, together 28.5. BF16 rounds the output, 55 dB. Seen on a CPU:
39.7 to 40.7, 27.6 (one token) to 29.5, 54.5 to 56.0. The limits are 3.6 to 10 dB lower: more than twice the noise in
power, which no kernel that does what it says has; a scale that is wrong by a factor of 2 gives 0 to 6 dB, another
weight less than 0."""

_SHAPES = ((384, 256), (200, 136))
"""[N, K] of the layers: one with multiples of 16, which CUTLASS needs, and one without, for the kernel behind it."""

_TOKENS = (1, 32, 257)
"""Tokens of a call: one sequence that is decoded, a small batch, and a prefill of no round number. Kernels differ by
it."""

_DECADES = 3.0
"""Sizes of the rows differ by up to 1000, in an order of chance: a scale that is read for another one shows."""

_ALIKE_DB = 10.0
"""From which ratio on an output is called that of a weight; codes with the scales of a weight of the same sizes are at
20."""


def check_layer(precision: Precision, device: str, gpus: int) -> Iterator[Finding]:
    """Load two weights in turn into a vLLM layer, with a bias and without, and compare its output after each.

    Args:
        precision: of the layer.
        device: ``cpu`` or ``cuda``.
        gpus: how many there are; each gets a layer.
    """
    from flashrl_verl.tools.engines import model as engine_model
    from flashrl_verl.tools.engines import shapes

    least = float("inf")
    with tempfile.TemporaryDirectory() as folder:
        path = shapes.save_config(shapes.load_config("tiny"), Path(folder))
        with engine_model.vllm_config(path), engine_model.process_group():
            for place in places_of(device, gpus):
                for (rows, columns), bias in product(_SHAPES, (False, True)):
                    ratio, wrong = _look(precision, place, rows, columns, bias)
                    if wrong:
                        kind = f"a layer of {rows} x {columns} {'with' if bias else 'without'} a bias on {place}"
                        yield fail(numerics(precision), f"{kind} {wrong}", remedy_for(precision))
                        return
                    least = min(least, ratio)
    limit, places = LIMIT_DB[precision], f", on {gpus} GPU(s)" if gpus else ""
    yield ok(
        numerics(precision), f"{least:.1f} dB against float64 (at least {limit:g}), after a second load too{places}"
    )


def places_of(device: str, gpus: int) -> list[torch.device]:
    """Every GPU, or the CPU."""
    return [torch.device(device, index) for index in range(gpus)] if device == "cuda" else [torch.device("cpu")]


def remedy_for(precision: Precision) -> str:
    """What to do about wrong numbers."""
    other = (
        "flashrl.precision=bf16, to see whether quantization is at fault"
        if weight_format(precision)
        else "another machine"
    )
    return f"do not train with it: tested versions (`flashrl version`), another GPU, {other}; then report it"


def _look(precision: Precision, device: torch.device, rows: int, columns: int, bias: bool) -> tuple[float, str | None]:
    """The lowest ratio of two loads in dB, and what is wrong, None if nothing is."""
    generator = torch.Generator().manual_seed(rows)
    layer = _layer(precision, device, rows, columns, bias)
    if (fmt := weight_format(precision)) and layer.weight.dtype != fmt.dtype:
        return 0.0, f"holds {layer.weight.dtype}, not {fmt.dtype}: it is not quantized"
    before, sizes_before, address, least = None, None, layer.weight.data_ptr(), float("inf")
    for _ in range(2):
        values, sizes = torch.randn(rows, columns, generator=generator), sizes_of(rows, generator)
        weight = (values * sizes).bfloat16()
        added = _bias(weight, generator) if bias else torch.zeros(rows)
        with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            layer.weight.weight_loader(layer.weight, weight.to(device))
            if bias:
                layer.bias.weight_loader(layer.bias, added.to(device))
            layer.quant_method.process_weights_after_loading(layer)
        for count in _TOKENS:
            x = torch.randn(count, columns, generator=generator).bfloat16()
            with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                output = layer(x.to(device)).cpu()
            if not output.isfinite().all():
                return 0.0, f"gives NaN or Inf for {count} token(s)"
            output = output.double() - added.double()
            ratio = _ratio(x, weight, output)
            if ratio < LIMIT_DB[precision]:
                # Whole, or its codes with the new scales, which a packed copy may read where they lie.
                stale = [] if before is None else [before * sizes_before, before * sizes]
                old = any(_ratio(x, other, output) > _ALIKE_DB for other in stale)
                why = ": it computes with the weights before" if old else ""
                return (
                    0.0,
                    f"is at {ratio:.1f} dB against float64 for {count} token(s), below {LIMIT_DB[precision]:g}{why}",
                )
            least = min(least, ratio)
        if layer.weight.data_ptr() != address:
            return 0.0, "moved its weight while it was loaded, which CUDA graphs would not see"
        before, sizes_before = values, sizes
    return least, None


def sizes_of(rows: int, generator: torch.Generator, decades: float = _DECADES) -> torch.Tensor:
    """[N, 1], a factor for each row of a weight, the largest ``10**decades`` times the smallest."""
    return torch.logspace(-decades, 0, rows)[torch.randperm(rows, generator=generator)].unsqueeze(1) * 0.02


def _bias(weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """[N] bfloat16 for a weight [N, K], half of what its row gives of a token: left out it leaves 6 dB, and added it
    makes the rounding of the output 1 dB worse."""
    rows = len(weight)
    return (0.5 * weight.float().norm(dim=1) * torch.randn(rows, generator=generator)).bfloat16()


def _ratio(x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor) -> float:
    """Signal to noise in dB; an output counts in units of what such a sum is by chance: small rows as large ones.

    Args:
        x: [tokens, K].
        weight: [N, K].
        output: [tokens, N].
    """
    x, weight = x.double(), weight.double()
    sizes = (x.square() @ weight.square().T).sqrt()
    return sqnr_db(x @ weight.T / sizes, output.double() / sizes)


def _layer(precision: Precision, device: torch.device, rows: int, columns: int, bias: bool) -> torch.nn.Module:
    """A row-parallel linear [rows, columns] as vLLM makes it for the quantization config ``flashrl``."""
    from vllm.model_executor.layers.linear import RowParallelLinear
    from vllm.model_executor.layers.quantization import get_quantization_config

    from flashrl_verl.quantization.config import NAME, quantization_config_dict

    config = get_quantization_config(NAME).from_config(quantization_config_dict(FlashRLConfig(precision=precision)))
    with device:
        return RowParallelLinear(
            columns, rows, bias=bias, params_dtype=torch.bfloat16, quant_config=config,
            prefix="model.layers.0.mlp.down_proj",
            return_bias=False,
        )  # fmt: skip
