# SPDX-License-Identifier: Apache-2.0
"""What an engine must hold, from the checkpoint's tensors alone, in numpy: shares no code with the package."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_E4M3 = np.array(
    [m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:-1]
)
CODE_MAX = {"int8": 127.0, "fp8": 448.0}


def quantize(rows: torch.Tensor, precision: str) -> tuple[np.ndarray, np.ndarray]:
    """DESIGN: scale = absmax / code_max, code = round-half-even(w / scale) in float32. Codes as their values in
    float64; scales [N, 1]."""
    w = rows.detach().float().cpu().numpy()
    scales = (np.abs(w).max(axis=1, keepdims=True) / np.float32(CODE_MAX[precision])).astype(np.float32)
    scales[scales == 0] = 1
    quotients = w / scales
    if precision == "int8":
        return np.clip(np.rint(quotients), -127, 127).astype(np.float64), scales
    magnitude = np.minimum(np.abs(quotients.astype(np.float64)), 448)
    above = np.searchsorted(_E4M3, magnitude)
    below = np.maximum(above - 1, 0)
    to_above, to_below = _E4M3[above] - magnitude, magnitude - _E4M3[below]
    up = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    return np.where(up, _E4M3[above], _E4M3[below]) * np.where(np.signbit(quotients), -1, 1), scales


def sources(name: str, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """The checkpoint's rows of one vLLM linear weight: itself, or its parts one under the other."""
    if name in weights:
        return weights[name]
    prefix, _, last = name.removesuffix(".weight").rpartition(".")
    return torch.cat([weights[f"{prefix}.{part}.weight"] for part in FUSED[last]])


@dataclasses.dataclass(frozen=True)
class Rank:
    """One rank of tensor parallelism, and what it holds of a whole vLLM parameter.

    Args:
        config: the model's Hugging Face configuration.
        rank: its number.
        ranks: tensor-parallel size.
    """

    config: Any
    rank: int
    ranks: int

    def part(self, whole: np.ndarray, axis: int) -> np.ndarray:
        assert whole.shape[axis] % self.ranks == 0
        return np.split(whole, self.ranks, axis)[self.rank]

    def rows(self, name: str, whole: np.ndarray) -> np.ndarray:
        """Cut [.., N, ..] values of a fused, column-parallel or replicated parameter called ``name``."""
        axis = 1 if "experts" in name else 0
        layer = name.split(".")[-1 if axis else -2]
        if layer == "qkv_proj":
            heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
            width = whole.shape[0] // (heads + 2 * kv_heads)
            q, k, v = np.split(whole, [heads * width, (heads + kv_heads) * width])
            # With fewer KV heads than ranks, neighbouring ranks hold the same one.
            copies = max(1, self.ranks // kv_heads)
            k, v = (np.split(x, self.ranks // copies)[self.rank // copies] for x in (k, v))
            return np.concatenate([self.part(q, 0), k, v])
        if layer in ("gate_up_proj", "w13_weight"):
            return np.concatenate([self.part(half, axis) for half in np.split(whole, 2, axis)], axis)
        if layer in ("embed_tokens", "lm_head"):
            padded = np.zeros(
                (-(-len(whole) // 64) * 64, *whole.shape[1:]), whole.dtype
            )  # vLLM pads vocabularies to 64
            padded[: len(whole)] = whole
            return self.part(padded, 0)
        return whole

    def columns(self, name: str, whole: np.ndarray) -> np.ndarray:
        """Cut [.., N, K] values along K, if the parameter called ``name`` is row-parallel."""
        row_parallel = name.endswith(("o_proj.weight", "down_proj.weight", "w2_weight"))
        return self.part(whole, whole.ndim - 1) if row_parallel else whole


def assert_storage(
    stored: dict[str, torch.Tensor], weights: dict[str, torch.Tensor], precision: str, place: Rank | None = None
) -> dict[str, int]:
    """Compare every parameter of one rank of an engine with the checkpoint, exactly.

    Args:
        stored: the rank's parameters by vLLM's name.
        weights: the checkpoint's tensors.
        precision: int8 or fp8.
        place: the rank; None without tensor parallelism.

    Returns:
        How many parameters of each kind were compared.
    """
    counts = {"quantized": 0, "experts": 0, "copies": 0}
    for name, parameter in stored.items():
        if name.endswith("_scale"):
            continue
        values = parameter.data.cpu()
        if f"{name}_scale" not in stored:
            source = weights["model.embed_tokens.weight"] if name not in weights and "lm_head" in name else None
            source = sources_of_bias(name, weights) if source is None else source
            source = source.to(values.dtype).float()
            if place is not None:
                source = torch.from_numpy(place.columns(name, place.rows(name, source.numpy())))
            assert torch.equal(values[: source.shape[0]].float(), source), name
            assert not values[source.shape[0] :].any(), f"{name}: padding"
            counts["copies"] += 1
            continue
        scales = stored[f"{name}_scale"].data.cpu().numpy()
        if values.dim() == 2:
            codes, expected_scales = quantize(sources(name, weights), precision)
            counts["quantized"] += 1
        else:
            codes, expected_scales = experts(name, values.shape[0], weights, precision)
            counts["experts"] += 1
        if place is not None:
            codes, expected_scales = place.columns(name, place.rows(name, codes)), place.rows(name, expected_scales)
        np.testing.assert_array_equal(scales, expected_scales, err_msg=name)
        np.testing.assert_array_equal(values.double().numpy(), codes, err_msg=name)
    return counts


def sources_of_bias(name: str, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    if name in weights:
        return weights[name]
    prefix, _, rest = name.rpartition(".")
    head, _, last = prefix.rpartition(".")
    return torch.cat([weights[f"{head}.{part}.{rest}"] for part in FUSED[last]])


def experts(name: str, count: int, weights: dict[str, torch.Tensor], precision: str) -> tuple[np.ndarray, np.ndarray]:
    base = name.split(".experts.")[0] + ".experts"
    projections = ("gate_proj", "up_proj") if "w13" in name else ("down_proj",)
    pairs = [
        quantize(torch.cat([weights[f"{base}.{e}.{p}.weight"] for p in projections]), precision) for e in range(count)
    ]
    return np.stack([c for c, _ in pairs]), np.stack([s for _, s in pairs])


def computes_w8a8(model: torch.nn.Module, precision: str, ranks: int) -> torch.nn.Module:
    """Make a dense Hugging Face model in BF16 compute its projections in W8A8, as an engine of ``ranks`` ranks does.

    Every rank quantizes the activations it has: before o_proj and down_proj these are its part of each token's, with a
    scale of their own, and the ranks' products are added in BF16. The weights' codes are the same whatever the number
    of ranks.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            parts = ranks if name.endswith(("o_proj", "down_proj")) else 1
            module.forward = _w8a8_linear(module, precision, parts)
    return model


def _w8a8_linear(module: torch.nn.Linear, precision: str, parts: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def dequantized(rows: torch.Tensor) -> torch.Tensor:
        codes, scales = quantize(rows, precision)
        return torch.from_numpy(codes * scales)

    weights = dequantized(module.weight.detach()).chunk(parts, 1)

    def forward(x: torch.Tensor) -> torch.Tensor:
        pieces = x.reshape(-1, x.shape[-1]).chunk(parts, 1)
        products = [dequantized(piece) @ weight.t() for piece, weight in zip(pieces, weights, strict=True)]
        if module.bias is not None:
            products[0] = products[0] + module.bias.detach().double()
        return sum(product.to(x.dtype) for product in products).reshape(*x.shape[:-1], -1)

    return forward


def save_compressed_tensors(
    path: Path, config, weights: dict[str, torch.Tensor], names: list[str], precision: str
) -> None:
    """Write a checkpoint with our codes as compressed-tensors (llm-compressor) stores W8A8, channel / token.

    Args:
        path: folder to write.
        config: the Hugging Face configuration.
        weights: checkpoint tensors.
        names: those of them to write as codes.
        precision: int8 or fp8.
    """
    dtype = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[precision]
    tensors = {}
    for name, tensor in weights.items():
        if name in names:
            codes, scales = quantize(tensor, precision)
            tensors[name] = torch.from_numpy(codes).to(dtype)
            tensors[name.removesuffix("weight") + "weight_scale"] = torch.from_numpy(scales)
        else:
            tensors[name] = tensor.contiguous()
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors")
    number = {"num_bits": 8, "type": "int" if precision == "int8" else "float", "symmetric": True}
    linears = {name.removesuffix(".weight") for name in weights if name.endswith("weight") and weights[name].dim() == 2}
    quantized = {name.removesuffix(".weight") for name in names}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if precision == "int8" else "float-quantized",
        "quantization_status": "compressed",
        "ignore": sorted(linears - quantized - {"model.embed_tokens"}),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**number, "strategy": "channel", "dynamic": False},
                "input_activations": {**number, "strategy": "token", "dynamic": True},
            }
        },
    }
    (path / "config.json").write_text(
        json.dumps({**config.to_dict(), "quantization_config": settings, "dtype": "bfloat16"})
    )
