# SPDX-License-Identifier: Apache-2.0
"""Where a precision's error comes from: signal-to-noise ratios of every quantized matrix, gathered by type of layer.

Two numbers a matrix. Of the *weight*: codes times scales against the BF16 weight. Of the *output*: the emulated W8A8
product (per-token activations) of the inputs that the model has on real tokens, rounded to BF16 as the kernels do,
against the exact product of BF16 weight and BF16 input; biases left out. Both in float64. For BF16 itself the output is
PyTorch's BF16 product.
"""

import math
import re
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from benchmarks.mismatch_trainer import Trainer
from flashrl_verl.quantization.numerics import WeightFormat, quantize_rows, sqnr_db

_DECODER = re.compile(r"(^|\.)layers\.\d+\.")
ORDER = (
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "down_proj",
    "experts",
)
"""How types of layers are listed; others follow."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Ratios of the matrices of one type, in dB."""

    median: float
    lowest: float
    lowest_layer: str


@dataclass(frozen=True, kw_only=True)
class TypeNoise:
    """One type of layer under one precision."""

    kind: str
    matrices: int
    weight: Spread
    """Infinite for BF16."""
    output: Spread | None
    """None where no token came by (experts)."""


@dataclass
class _Matrix:
    weight: float
    output: float | None = None


@dataclass
class NoiseMeter:
    """Measures matrices one by one.

    Args:
        formats: what is measured, by name; None is BF16.
    """

    formats: Mapping[str, WeightFormat | None]
    _found: dict[str, dict[str, _Matrix]] = field(default_factory=dict)

    def add(self, name: str, weight: torch.Tensor, inputs: torch.Tensor | None) -> None:
        """Measure one matrix.

        Args:
            name: of the layer, once.
            weight: [N, K] bfloat16.
            inputs: [tokens, K] bfloat16, or None when nothing came by.
        """
        exact = None if inputs is None or not len(inputs) else inputs.double() @ weight.double().t()
        self._found[name] = {
            precision: _Matrix(
                weight=weight_sqnr(weight, fmt),
                output=None if exact is None else output_sqnr(weight, inputs, fmt, exact),
            )
            for precision, fmt in self.formats.items()
        }

    def names(self) -> Collection[str]:
        """Names of the matrices that were measured."""
        return self._found.keys()

    def by_type(self, precision: str) -> list[TypeNoise]:
        """Gather the matrices of one precision by type of layer."""
        kinds: dict[str, dict[str, _Matrix]] = {}
        for name, measured in self._found.items():
            kinds.setdefault(kind_of(name), {})[name] = measured[precision]
        rank = {kind: i for i, kind in enumerate(ORDER)}
        return [
            TypeNoise(
                kind=kind,
                matrices=len(kinds[kind]),
                weight=_spread({name: m.weight for name, m in kinds[kind].items()}),
                output=_spread({name: m.output for name, m in kinds[kind].items() if m.output is not None}),
            )
            for kind in sorted(kinds, key=lambda kind: (rank.get(kind, len(ORDER)), kind))
        ]


def weight_sqnr(weight: torch.Tensor, fmt: WeightFormat | None) -> float:
    """SQNR in dB of a weight [N, K] bfloat16 as the format stores it, in float64; infinite for None (BF16)."""
    if fmt is None:
        return math.inf
    codes, scales = quantize_rows(weight, fmt)
    return sqnr_db(weight, codes.double() * scales.double())


def output_sqnr(weight: torch.Tensor, inputs: torch.Tensor, fmt: WeightFormat | None, exact: torch.Tensor) -> float:
    """SQNR in dB of a layer's output.

    Args:
        weight: [N, K] bfloat16.
        inputs: [tokens, K] bfloat16.
        fmt: of weight and activations; None for the BF16 product.
        exact: [tokens, N] float64, their product.
    """
    from flashrl_verl.quantization.gemm import emulated_multiply

    if fmt is None:
        return sqnr_db(exact, torch.nn.functional.linear(inputs, weight))
    return sqnr_db(exact, emulated_multiply(inputs, *quantize_rows(weight, fmt), fmt))


def kind_of(name: str) -> str:
    """Type of a layer by its name: its last part, or ``experts`` for every projection of an expert."""
    return "experts" if ".experts." in name else name.rpartition(".")[2]


def measure(trainer: Trainer, meter: NoiseMeter, sequences: list[list[int]], left_alone: Collection[str]) -> None:
    """Measure every linear layer and expert of a model that an 8-bit engine quantizes.

    Args:
        trainer: the model.
        meter: takes the measurements.
        sequences: tokens whose activations are used; they run as one batch.
        left_alone: names of layers that the engine keeps in BF16.
    """
    modules = {
        name: module
        for name, module in trainer.module.named_modules()
        if _DECODER.search(name)
        and (isinstance(module, torch.nn.Linear) or is_packed_experts(module))
        and name not in left_alone
    }

    def hook(name: str, module: torch.nn.Module, arguments: tuple) -> None:
        if isinstance(module, torch.nn.Linear):
            meter.add(name, module.weight, trainer.real(arguments[0]).to(module.weight.dtype))
        else:
            hidden, chosen = (trainer.real(argument) for argument in arguments[:2])
            _add_experts(meter, name, module, hidden, chosen)

    trainer.watch_inputs(sequences, modules, hook)
    for name, module in modules.items():  # an expert in a module of its own may have seen no token
        if isinstance(module, torch.nn.Linear) and name not in meter.names():
            meter.add(name, module.weight.detach(), None)


def is_packed_experts(module: torch.nn.Module) -> bool:
    """Whether a module holds all experts in two tensors, [E, 2I, H] and [E, H, I], as transformers 5 does."""
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    packed = isinstance(gate_up, torch.nn.Parameter) and isinstance(down, torch.nn.Parameter)
    return packed and gate_up.dim() == 3 and gate_up.shape[::2] == down.shape[:2]


def _add_experts(
    meter: NoiseMeter, name: str, module: torch.nn.Module, hidden: torch.Tensor, chosen: torch.Tensor
) -> None:
    """Measure both projections of every expert: hidden [tokens, H], chosen experts [tokens, k]."""
    for expert, (gate_up, down) in enumerate(zip(module.gate_up_proj, module.down_proj, strict=True)):
        inputs = hidden[(chosen == expert).any(-1)].to(gate_up.dtype)
        gate, up = torch.nn.functional.linear(inputs, gate_up).chunk(2, dim=-1)
        meter.add(f"{name}.{expert}.gate_up_proj", gate_up, inputs)
        meter.add(f"{name}.{expert}.down_proj", down, module.act_fn(gate) * up)


def _spread(ratios: dict[str, float]) -> Spread | None:
    if not ratios:
        return None
    lowest = min(ratios, key=ratios.__getitem__)
    return Spread(median=statistics.median(ratios.values()), lowest=ratios[lowest], lowest_layer=lowest)
