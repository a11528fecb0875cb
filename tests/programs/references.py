# SPDX-License-Identifier: Apache-2.0
"""What an engine must hold, from the checkpoint's tensors alone, in numpy: shares no code with the package."""

import dataclasses
from typing import Any

import numpy as np
import torch

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_E4M3 = np.array(
    [m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:-1]
)
CODE_MAX = {"int8": 127.0, "fp8": 448.0}


def block_of(columns: int) -> int:
    """Channels that are rotated together in an INT8 layer with so many input channels a rank."""
    return next((block for block in (64, 32, 16) if columns % block == 0), 1)


def hadamard(w: np.ndarray) -> np.ndarray:
    """Sylvester's transform of the last axis, by its definition: sum and difference of the halves' transforms."""
    if w.shape[-1] == 1:
        return w
    low, high = (hadamard(half) for half in np.split(w, 2, axis=-1))
    return np.concatenate([low + high, low - high], axis=-1)


def quantize(rows: torch.Tensor, precision: str, block: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """scale = absmax / code_max, code = round-half-even(w / scale) in float32, of rows rotated by blocks. Codes as
    their values in float64; scales [N, 1]."""
    w = rows.detach().float().cpu().numpy()
    if block > 1:
        w = hadamard(w.reshape(len(w), -1, block)).reshape(w.shape) * np.float32(1 / block)
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
    """The checkpoint's rows of one vLLM parameter: itself, the embedding of a tied head, or parts one under the
    other."""
    if name in weights or name == "lm_head.weight":
        return weights.get(name, weights["model.embed_tokens.weight"])
    prefix, layer, kind = name.rsplit(".", 2)
    return torch.cat([weights[f"{prefix}.{part}.{kind}"] for part in FUSED[layer]])


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
            missing = -len(whole) % 64  # vLLM pads vocabularies to 64
            return self.part(np.pad(whole, [(0, missing), (0, 0)]), 0)
        return whole

    def columns(self, name: str, whole: np.ndarray) -> np.ndarray:
        """Cut [.., N, K] values along K, if the parameter called ``name`` is row-parallel."""
        row_parallel = name.endswith(("o_proj.weight", "down_proj.weight", "w2_weight"))
        return self.part(whole, whole.ndim - 1) if row_parallel else whole


def assert_storage(
    stored: dict[str, torch.Tensor],
    weights: dict[str, torch.Tensor],
    precision: str,
    place: Rank | None = None,
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
            source = sources(name, weights).to(values.dtype).float()
            if place is not None:
                source = torch.from_numpy(place.columns(name, place.rows(name, source.numpy())))
            assert torch.equal(values[: source.shape[0]].float(), source), name
            assert not values[source.shape[0] :].any(), f"{name}: padding"
            counts["copies"] += 1
            continue
        scales = stored[f"{name}_scale"].data.cpu().numpy()
        block = block_of(values.shape[-1]) if precision == "int8" else 1
        if values.dim() == 2:
            codes, expected_scales = quantize(sources(name, weights), precision, block)
            counts["quantized"] += 1
        else:
            codes, expected_scales = experts(name, values.shape[0], weights, precision, block)
            counts["experts"] += 1
        if place is not None:
            codes, expected_scales = place.columns(name, place.rows(name, codes)), place.rows(name, expected_scales)
        np.testing.assert_array_equal(scales, expected_scales, err_msg=name)
        np.testing.assert_array_equal(values.double().numpy(), codes, err_msg=name)
    return counts


def experts(
    name: str, count: int, weights: dict[str, torch.Tensor], precision: str, block: int
) -> tuple[np.ndarray, np.ndarray]:
    base = name.split(".experts.")[0] + ".experts"
    projections = ("gate_proj", "up_proj") if "w13" in name else ("down_proj",)
    pairs = [
        quantize(torch.cat([weights[f"{base}.{e}.{p}.weight"] for p in projections]), precision, block)
        for e in range(count)
    ]
    return np.stack([c for c, _ in pairs]), np.stack([s for _, s in pairs])


def sqnr_db(reference: torch.Tensor, approximation: torch.Tensor) -> float:
    """Signal-to-quantization-noise ratio in dB, ``10 log10(sum x^2 / sum (x - y)^2)``, in float64."""
    x, y = reference.double(), approximation.double()
    return float(10.0 * torch.log10(x.square().sum() / (x - y).square().sum()))
