# SPDX-License-Identifier: Apache-2.0
"""Experts, quantized on load inside a real vLLM model of one layer, against float64 products of their BF16 weights."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from flashrl_verl.errors import ConfigError
from flashrl_verl.quantization.formats import weight_format
from flashrl_verl.quantization.numerics import sqnr_db
from flashrl_verl.settings import FlashRLConfig, Precision
from flashrl_verl.tools.check.findings import Finding, fail, ok, warn
from flashrl_verl.tools.check.numerics import places_of, remedy_for, sizes_of
from flashrl_verl.tools.check.subjects import experts

LIMIT_DB = {Precision.INT8: 28.0, Precision.FP8: 19.0}
"""Least signal-to-noise ratio of the output, dB. Seen on a CPU, of five draws: 30.9 to 32.2 and 20.6 (one token) to
24.8; of the one that is drawn here 30.9 and 22.7. It is lower than that of a linear layer (``numerics.py``): noise of
two products adds up, and what the gate leaves has few large values, which make the steps of a token wide. A limit is 3
to 4 dB lower, twice the noise in power. A GPU's kernel rounds to BF16 between the products, 52 dB, which is lost in the
rest."""

_EXPERTS, _TOP_K, _HIDDEN, _INTERMEDIATE = 6, 2, 256, 128

_TOKENS = (1, 33, 257)
"""Of a call, as in ``numerics.py``."""

_GATE_DECADES = 1.0
"""Sizes of the first projection's rows differ by up to 10: by 1000 the large ones alone would be left behind it."""


def check_experts(precision: Precision, device: str, gpus: int) -> Iterator[Finding]:
    """Load two sets of weights in turn and compare the output after each.

    Args:
        precision: of 8 bits.
        device: ``cpu`` or ``cuda``.
        gpus: how many there are; each gets experts.
    """
    from flashrl_verl.tools.engines import model as engine_model
    from flashrl_verl.tools.engines import shapes

    name, least = experts(precision), float("inf")
    with tempfile.TemporaryDirectory() as folder:
        path = shapes.save_config(_config(), Path(folder))
        with engine_model.vllm_config(path), engine_model.process_group():
            for place in places_of(device, gpus):
                try:
                    layer, load = _layer(precision, path, place)
                except ConfigError as error:
                    text, _, remedy = str(error).partition(". Set ")
                    yield warn(name, f"models with experts are refused here: {text}", f"set {remedy or str(error)}")
                    return
                ratio, wrong = _look(precision, place, layer, load)
                if wrong:
                    yield fail(name, f"{_EXPERTS} experts on {place} {wrong}", remedy_for(precision))
                    return
                least = min(least, ratio)
    text = f"{least:.1f} dB against float64 (at least {LIMIT_DB[precision]:g}), after a second load too"
    yield ok(name, text + (f", on {gpus} GPU(s)" if gpus else ""))


def _config() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"], vocab_size=128, num_hidden_layers=1, hidden_size=_HIDDEN,
        intermediate_size=256,
        moe_intermediate_size=_INTERMEDIATE, num_experts=_EXPERTS, num_experts_per_tok=_TOP_K, norm_topk_prob=True,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip


def _layer(precision: Precision, path: Path, place: torch.device) -> tuple[torch.nn.Module, Any]:
    """vLLM's experts for the quantization config ``flashrl``, and what loads (name, tensor) pairs into them."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.model_loader.utils import initialize_model

    from flashrl_verl.quantization.config import NAME, quantization_config_dict
    from flashrl_verl.tools.engines import model as engine_model

    overrides = {"quantization_config": quantization_config_dict(FlashRLConfig(precision=precision))}
    before = torch.get_default_dtype()
    with engine_model.vllm_config(path, quantization=NAME, hf_overrides=overrides) as config, _on(place), place:
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = initialize_model(vllm_config=config)
        finally:
            torch.set_default_dtype(before)
    return next(module for module in model.modules() if isinstance(module, RoutedExperts)), model.load_weights


def _on(place: torch.device) -> contextlib.AbstractContextManager:
    return torch.cuda.device(place) if place.type == "cuda" else contextlib.nullcontext()


def _look(precision: Precision, place: torch.device, layer: torch.nn.Module, load: Any) -> tuple[float, str | None]:
    """The lowest ratio of two loads in dB, and what is wrong, None if nothing is."""
    fmt, generator, least = weight_format(precision), torch.Generator().manual_seed(1), float("inf")
    if layer.w13_weight.dtype != fmt.dtype:
        return 0.0, f"hold {layer.w13_weight.dtype}, not {fmt.dtype}: they are not quantized"
    addresses = layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr()
    for _ in range(2):
        w13 = _drawn(2 * _INTERMEDIATE, _HIDDEN, generator, _GATE_DECADES) * 4
        w2 = _drawn(_HIDDEN, _INTERMEDIATE, generator)
        parts = {"gate_proj": w13[:, :_INTERMEDIATE], "up_proj": w13[:, _INTERMEDIATE:], "down_proj": w2}
        with torch.no_grad(), _on(place):
            load(
                (f"model.layers.0.mlp.experts.{expert}.{part}.weight", weights[expert].to(place))
                for part, weights in parts.items()
                for expert in range(_EXPERTS)
            )
            layer.quant_method.process_weights_after_loading(layer)
        for count in _TOKENS:
            x = torch.randn(count, _HIDDEN, generator=generator).bfloat16()
            logits = torch.randn(count, _EXPERTS, generator=generator)
            output = _output(layer, x.to(place), logits.to(place)).cpu()
            if not output.isfinite().all():
                return 0.0, f"give NaN or Inf for {count} token(s)"
            ratio = _ratio(x, logits, w13, w2, output)
            if ratio < LIMIT_DB[precision]:
                return 0.0, f"are at {ratio:.1f} dB against float64 for {count} token(s), below {LIMIT_DB[precision]:g}"
            least = min(least, ratio)
        if addresses != (layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr()):
            return 0.0, "moved their weights while they were loaded, which CUDA graphs would not see"
    return least, None


def _drawn(rows: int, columns: int, generator: torch.Generator, decades: float = 3.0) -> torch.Tensor:
    """[experts, rows, columns] bfloat16 whose rows are of different sizes."""
    sizes = torch.stack([sizes_of(rows, generator, decades) for _ in range(_EXPERTS)])
    return (torch.randn(_EXPERTS, rows, columns, generator=generator) * sizes).bfloat16()


def _output(layer: torch.nn.Module, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """[tokens, hidden], from the method that the engine calls, behind vLLM's choice of experts."""
    method = layer.quant_method
    with torch.no_grad(), _on(x.device):
        if method.is_monolithic:
            return method.apply_monolithic(layer, x, logits)
        method.moe_quant_config = method.get_fused_moe_quant_config(layer)
        weights, chosen = _chosen(logits)
        return method.apply(layer, x, weights, chosen.int())


def _chosen(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and numbers [tokens, top k] of the experts."""
    weights, chosen = logits.softmax(-1).topk(_TOP_K)
    return weights / weights.sum(-1, keepdim=True), chosen


def _ratio(x: torch.Tensor, logits: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, output: torch.Tensor) -> float:
    """Signal to noise in dB; as in ``numerics.py`` an output counts in units of what such a sum is by chance."""
    weights, chosen = _chosen(logits.double())
    share = torch.zeros_like(logits, dtype=torch.float64).scatter(1, chosen, weights)
    gate, up = torch.einsum("th,enh->ten", x.double(), w13.double()).chunk(2, dim=-1)
    hidden = torch.nn.functional.silu(gate) * up * share.unsqueeze(-1)
    expected = torch.einsum("tei,ehi->th", hidden, w2.double())
    units = torch.einsum("tei,ehi->th", hidden.square(), w2.double().square()).sqrt()
    return sqnr_db(expected / units, output.double() / units)
