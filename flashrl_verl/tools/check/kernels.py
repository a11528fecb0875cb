# SPDX-License-Identifier: Apache-2.0
"""The numerics of this machine's kernels: a small vLLM model of one layer, in each precision, against float64.

Weights go through the model's own loader and are quantized on load, as in a run. Then

- the codes and scales in storage have to be the reference's, bit for bit;
- the products of the linear layer and of the experts have to be near those of the BF16 weights, for every row of the
  weight and for every token: a single wrong scale shows;
- attention over INT8 keys and values has to be near float64 over codes times scales.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from flashrl_verl.quantization.config import NAME, quantization_config_dict, require_kv_kernel
from flashrl_verl.quantization.formats import INT8_UNROTATED, Kernel, weight_format
from flashrl_verl.quantization.gemm import device_kernel
from flashrl_verl.quantization.kernels import quantize_rows_into
from flashrl_verl.quantization.numerics import WeightFormat, as_bytes, rotate_weight
from flashrl_verl.settings import FlashRLConfig, KVCache, Precision
from flashrl_verl.tools.check import Finding, error, ok
from flashrl_verl.tools.engines import model as engine_model

LIMITS = {
    Precision.INT8: {"linear layer": 0.025, "experts": 0.09},
    Precision.FP8: {"linear layer": 0.08, "experts": 0.25},
    Precision.BF16: {"linear layer": 0.01},
}
"""Largest relative error of a product in any row or token (root mean square). On a CPU linear layers have 1.4 %, 4.1 %
and 0.2 %, experts 5.6 % and 14 %: noise of two products adds up, and what the gate leaves has few large values."""

ATTENTION_LIMIT = 5e-3
"""Largest relative error of a head's output: BF16 rounds it to 2**-9 of a value, and weights have FP16's bits."""

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 6, 2, 256, 128
_TOKENS = (1, 32, 257)
"""Tokens of a call: one sequence that is decoded, a small batch, a prefill of no round number. Kernels differ by it."""
_ROWS, _LONG_ROWS = 48, (5120, 13824)
"""Rows as long as in real models: one that stays in registers, one that is read twice (``quantization/kernels.py``)."""
_SLOTS = 16
"""Tokens of a page of the KV cache: vLLM's block size."""
_ATTENTION = ((14, 2, 64, (1, 17, 64, 300, 1025)), (40, 8, 128, (1, 16, 33, 100) * 50))
"""Query heads, KV heads, elements of a head (of Qwen2.5-0.5B and -32B), tokens of the sequences: few long ones, which
several programs share, and too many for that."""
_REMEDY = (
    "do not train with it; install tested versions (`flashrl version`), empty ~/.triton/cache, or try another GPU; "
    "then report it"
)


def check_precision(precision: Precision, places: Sequence[torch.device]) -> Iterator[Finding]:
    """Compute one small layer in a precision, with experts where it has 8 bits.

    Args:
        precision: of ``flashrl.precision``.
        places: every GPU, or the CPU.

    Raises:
        ConfigError: there is no kernel for it here; the message says what to set instead.
    """
    subject, fmt, weights = f"{precision.value} numerics", weight_format(precision), drawn()
    worst = dict.fromkeys(LIMITS[precision], 0.0)
    for place in places:
        with model(precision, place) as built:
            load(built, weights)
            wrong = [f"codes or scales of {name} are not exact" for name in wrong_codes(built, weights, fmt)]
            errors = {"linear layer": linear_error(built, weights)}
            if fmt:
                errors["experts"] = experts_error(built, weights)
        for kind, limit in LIMITS[precision].items():
            worst[kind] = max(worst[kind], errors[kind])
            if not errors[kind] <= limit:  # NaN is not
                wrong.append(f"{kind} {errors[kind]:.1%} from float64 in the worst row or token (at most {limit:.1%})")
        if wrong:
            yield error(subject, f"on {place}: {'; '.join(wrong)}", _REMEDY)
            return
    names = {"linear layer": "torch"}
    if fmt:
        kernel = device_kernel(fmt)
        experts = kernel if kernel is Kernel.EMULATED else Kernel.TRITON
        names = {"linear layer": kernel.value, "experts": experts.value}
    text = ", ".join(f"{kind} ({names[kind]}) {seen:.1%} from float64" for kind, seen in worst.items())
    yield ok(subject, f"{'codes exact, ' if fmt else ''}{text}, on {', '.join(map(str, places))}")


# ---- one layer ----


@contextlib.contextmanager
def model(precision: Precision, place: torch.device) -> Iterator[torch.nn.Module]:
    """A vLLM model of one layer with experts, without an engine, for the quantization config ``flashrl``; it is freed
    afterwards. ``place`` is the current device meanwhile."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"], vocab_size=128, num_hidden_layers=1, hidden_size=HIDDEN,
        intermediate_size=256, moe_intermediate_size=INTERMEDIATE, num_experts=EXPERTS, num_experts_per_tok=TOP_K,
        norm_topk_prob=True, num_attention_heads=6, num_key_value_heads=2, head_dim=64, decoder_sparse_step=1,
        mlp_only_layers=[],
    )  # fmt: skip
    overrides = {"quantization_config": quantization_config_dict(FlashRLConfig(precision=precision))}
    with tempfile.TemporaryDirectory() as folder, _current(place):
        config.save_pretrained(folder)
        words = {"quantization": NAME, "hf_overrides": overrides}
        with engine_model.model(Path(folder), place.index or 0, **words) as (built, _):
            yield built


def _current(place: torch.device) -> contextlib.AbstractContextManager:
    return torch.cuda.device(place) if place.type == "cuda" else contextlib.nullcontext()


def linear(built: torch.nn.Module) -> torch.nn.Module:
    return built.model.layers[0].self_attn.o_proj


def experts(built: torch.nn.Module) -> torch.nn.Module:
    return next(module for module in built.modules() if isinstance(module, RoutedExperts))


def drawn(seed: int = 0) -> dict[str, torch.Tensor]:
    """BF16 weights of the linear layer ``o_proj`` [N, K] and of the experts ``w13`` (gate over up) and ``w2``
    [E, N, K]. Rows have sizes of their own, up to a factor of 1000 (the gate's 10) apart: no scale passes for
    another's."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, decades: float = 3.0, size: float = 0.02) -> torch.Tensor:
        sizes = torch.logspace(-decades, 0, shape[-2]).unsqueeze(1) * size
        values = torch.randn(*shape, generator=generator)
        return (values * sizes[torch.randperm(shape[-2], generator=generator)]).bfloat16()

    gate, up = (draw(EXPERTS, INTERMEDIATE, HIDDEN, decades=1.0, size=0.08) for _ in range(2))
    return {"o_proj": draw(HIDDEN, 384), "w13": torch.cat([gate, up], 1), "w2": draw(EXPERTS, HIDDEN, INTERMEDIATE)}


def load(built: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Load ``drawn`` weights by their names in a checkpoint, and finish as vLLM does."""
    parts = {
        "gate_proj": weights["w13"][:, :INTERMEDIATE],
        "up_proj": weights["w13"][:, INTERMEDIATE:],
        "down_proj": weights["w2"],
    }
    named = {"model.layers.0.self_attn.o_proj.weight": weights["o_proj"]}
    for part, stacked in parts.items():
        named |= {f"model.layers.0.mlp.experts.{e}.{part}.weight": weight for e, weight in enumerate(stacked)}
    place = linear(built).weight.device
    with torch.no_grad():
        built.load_weights((name, weight.to(place)) for name, weight in named.items())
        for layer in (linear(built), experts(built)):
            layer.quant_method.process_weights_after_loading(layer)


# ---- codes ----


def exact_rows(weight: torch.Tensor, fmt: WeightFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference: codes [..., K] of ``fmt.dtype`` and scales [..., 1] float32 of rows, computed in float64 behind
    their rotation. There a float32 quotient is exact to the last bit after rounding once more."""
    rows = rotate_weight(weight.cpu(), fmt.block(weight.shape[-1])).double()
    scales = (rows.abs().amax(-1, keepdim=True) / fmt.code_max).float()
    quotients = (rows / scales.double()).float()
    codes = quotients.round() if fmt.rounds_to_integers else quotients
    return codes.clamp(-fmt.code_max, fmt.code_max).to(fmt.dtype), scales


def wrong_codes(built: torch.nn.Module, weights: dict[str, torch.Tensor], fmt: WeightFormat | None) -> list[str]:
    """Names of the weights whose codes or scales in storage are not the reference's, and of rows as long as in real
    models that get others; none without a format."""
    if fmt is None:
        return []
    layer, moe = linear(built), experts(built)
    stored = {
        "o_proj": (weights["o_proj"], layer.weight, layer.weight_scale),
        "w13": (weights["w13"], moe.w13_weight, moe.w13_weight_scale),
        "w2": (weights["w2"], moe.w2_weight, moe.w2_weight_scale),
    }
    place = layer.weight.device
    for length in _LONG_ROWS:
        weight = torch.randn(_ROWS, length, generator=torch.Generator().manual_seed(length))
        weight = (weight * torch.logspace(-3, 0, _ROWS).unsqueeze(1) * torch.logspace(0, -2, length)).bfloat16()
        codes = torch.zeros(_ROWS, length, dtype=fmt.dtype, device=place)
        scales = torch.zeros(_ROWS, 1, device=place)
        quantize_rows_into(weight.to(place), codes, scales, fmt)
        stored[f"rows of {length}"] = weight, codes, scales
    wrong = []
    for name, (weight, codes, scales) in stored.items():
        expected, expected_scales = exact_rows(weight, fmt)
        same = codes.dtype == fmt.dtype and torch.equal(as_bytes(codes.data.cpu()), as_bytes(expected))
        if not same or not torch.equal(scales.data.cpu(), expected_scales):
            wrong.append(name)
    return wrong


# ---- products ----


def linear_error(built: torch.nn.Module, weights: dict[str, torch.Tensor]) -> float:
    """Largest relative error of a row or token of the linear layer; NaN if an output is not finite."""
    layer, weight, errors = linear(built), weights["o_proj"].double(), []
    for x in _inputs(weight.shape[1]):
        with torch.no_grad():
            output = layer.quant_method.apply(layer, x.to(layer.weight.device)).cpu().double()
        units = (x.double().square() @ weight.square().T).sqrt()
        errors.append((output - x.double() @ weight.T) / units)
    return _worst(torch.cat(errors))


def experts_error(built: torch.nn.Module, weights: dict[str, torch.Tensor]) -> float:
    """The same of the experts."""
    w13, w2, errors = weights["w13"].double(), weights["w2"].double(), []
    generator = torch.Generator().manual_seed(1)
    for x in _inputs(HIDDEN):
        logits = torch.randn(len(x), EXPERTS, generator=generator)
        output = run_experts(experts(built), x, logits).cpu().double()
        probabilities, chosen = logits.double().softmax(-1).topk(TOP_K)
        share = torch.zeros(len(x), EXPERTS, dtype=torch.double)
        share.scatter_(1, chosen, probabilities / probabilities.sum(-1, keepdim=True))
        gate, up = torch.einsum("th,enh->ten", x.double(), w13).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * up * share.unsqueeze(-1)
        units = torch.einsum("tei,ehi->th", hidden.square(), w2.square()).sqrt()
        errors.append((output - torch.einsum("tei,ehi->th", hidden, w2)) / units)
    return _worst(torch.cat(errors))


def run_experts(layer: torch.nn.Module, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """What the engine calls, behind vLLM's choice of experts: [tokens, hidden] bfloat16 from x alike and logits of the
    router [tokens, experts]."""
    method, place = layer.quant_method, layer.w13_weight.device
    x, logits = x.to(place), logits.to(place)
    with torch.no_grad():
        if method.is_monolithic:
            return method.apply_monolithic(layer, x, logits)
        method.moe_quant_config = method.get_fused_moe_quant_config(layer)
        shares, chosen = logits.softmax(-1).topk(TOP_K)
        return method.apply(layer, x, shares / shares.sum(-1, keepdim=True), chosen.int())


def _inputs(size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(count, size, generator=generator).bfloat16() for count in _TOKENS]


def _worst(errors: torch.Tensor) -> float:
    """Largest root mean square over a row's tokens or a token's rows, of [tokens, N] in units of what such a sum is by
    chance: small rows count as large ones."""
    squares = errors.square()
    worst = torch.maximum(squares.mean(0).max(), squares.mean(1).max()).sqrt()
    return float(worst) if squares.isfinite().all() else float("nan")


# ---- attention ----


def check_attention(kv_cache: KVCache, places: Sequence[torch.device]) -> Iterator[Finding]:
    """Write keys and values to pages and decode one token of each sequence, on every GPU.

    Raises:
        ConfigError: nothing computes with such a KV cache here; the message says what to set instead.
    """
    require_kv_kernel(kv_cache)
    errors = {place: [attention_error(*case, place) for case in _ATTENTION] for place in places}
    wrong = [place for place, seen in errors.items() if not all(e <= ATTENTION_LIMIT for e in seen)]  # NaN is not
    text = f"a head's output is {max(map(max, errors.values())):.1e} from float64 (at most {ATTENTION_LIMIT:g})"
    if wrong:
        text += f", wrong on {', '.join(map(str, wrong))}"
        yield error(f"{kv_cache.value} attention", text, f"flashrl.kv_cache=auto; {_REMEDY}")
    else:
        yield ok(f"{kv_cache.value} attention", f"{text}, on {', '.join(map(str, places))}")


def attention_error(heads: int, kv_heads: int, size: int, lengths: tuple[int, ...], place: torch.device) -> float:
    """Largest relative error of a head's output, NaN if one is not finite, for sequences of ``lengths`` tokens in
    scattered pages, on a GPU."""
    from flashrl_verl.attention import kernels, pages  # Triton is only where a GPU is

    generator = torch.Generator().manual_seed(size)
    counts = [-(-length // _SLOTS) for length in lengths]
    order = torch.randperm(sum(counts), generator=generator).int().split(counts)
    table = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)
    slots = torch.cat(
        [row.long().repeat_interleave(_SLOTS)[:n] * _SLOTS for row, n in zip(order, lengths, strict=True)]
    )
    slots += torch.cat([torch.arange(length) % _SLOTS for length in lengths])
    query = torch.randn(len(lengths), heads, size, generator=generator).bfloat16()
    keys, values = torch.randn(2, len(slots), kv_heads, size, generator=generator)
    # Each token's value has a size of its own: a scale that is read for another one shows.
    values = values * 10 ** (2 * torch.rand(len(slots), kv_heads, 1, generator=generator))
    keys, values = keys.bfloat16(), values.bfloat16()
    with _current(place):
        shape = pages.shape(sum(counts), _SLOTS, kv_heads, size)
        cache = torch.full(shape, -1, dtype=torch.int8, device=place)  # as scales NaN
        views, out = pages.pages_of(cache), torch.full_like(query, float("nan"), device=place)
        kernels.write(keys.to(place), values.to(place), views, slots.to(place))
        scratch = kernels.Scratch.make(len(lengths), heads, kv_heads, size, place)
        tokens = torch.tensor(lengths, dtype=torch.int32, device=place)
        kernels.decode(query.to(place), views, table.to(place), tokens, size**-0.5, out, scratch)
    keys, values = (codes.double() * s.double() for codes, s in (exact_rows(x, INT8_UNROTATED) for x in (keys, values)))
    errors = []
    for row, (k, v) in enumerate(zip(keys.split(lengths), values.split(lengths), strict=True)):
        scores = torch.einsum("hgd,thd->hgt", query[row].double().unflatten(0, (kv_heads, -1)), k) * size**-0.5
        exact = torch.einsum("hgt,thd->hgd", scores.softmax(-1), v).flatten(0, 1)
        errors.append((out[row].cpu().double() - exact).norm(dim=-1) / exact.norm(dim=-1))
    worst = torch.cat(errors)
    return float(worst.max()) if worst.isfinite().all() else float("nan")
