# SPDX-License-Identifier: Apache-2.0
"""What a live engine is, read off its modules and storage, and whether that is what its settings say.

The model decides whether a precision's name is true, not the engine's arguments. ``describe_model`` runs in vLLM's
worker and returns plain data; ``require_settings`` refuses what does not fit, wherever that arrives.
"""

from collections import Counter
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from flashrl_verl.errors import ConfigError, FlashRLError, listed
from flashrl_verl.fp32_head import FP32
from flashrl_verl.quantization.formats import weight_format
from flashrl_verl.quantization.parameter import QuantizedStorage
from flashrl_verl.settings import FlashRLConfig, KVCache, Precision

_PROBE_TOKENS = 4
"""Hidden states of the probe; even a toy vocabulary makes hundreds of logits of them, and FP32 values that all happen
to be BF16 values (one in 2^16 is) do not occur."""

_ENGINE_NAMES = {KVCache.AUTO: {"auto", "bfloat16", "float16"}}
"""What vLLM's attention layers call a KV cache; others have the setting's own name."""


def describe_model(runner: Any) -> dict[str, Any]:
    """What a worker's model is.

    Args:
        runner: vLLM's model runner.

    Returns:
        ``precision`` of the engine's quantization config; ``quantized``: quantized weights by dtype (a linear layer has
        one, a layer of experts two); ``quantized_layers`` and ``quantized_names``; ``rotated``: how many of these
        weights are; ``unrotated``: names of those that would be, but no rotation divides their input channels;
        ``unquantized_layers``: name -> class of other layers that came to our quantization config;
        ``never_quantized``: name -> bytes of all other modules with matrices, which vLLM builds without it (routers,
        convolutions, plain parameters), embeddings and head left out; ``kept_layers`` that the user kept;
        ``ignore_unused``: entries of ``flashrl.ignore`` that matched neither; ``head_dtype`` in which logits are
        computed; ``quantized_bytes`` (codes and scales), ``quantized_bytes_as_bf16``, ``weight_bytes`` of all
        parameters; ``logprobs_mode``; ``kv_cache``: ``dtypes``, attention layers by vLLM's name of their KV cache's
        dtype, ``backends``, and ``equalized``: how many layers' keys are.
    """
    model, config = runner.model, runner.vllm_config.quant_config
    quantized_bytes = bf16_bytes = rotated = 0
    quantized: Counter[str] = Counter()
    unquantized: dict[str, str] = {}
    never: dict[str, int] = {}
    names: list[str] = []
    unrotated: list[str] = []
    for name, module in model.named_modules():
        # The runner around the experts is what the model, and the user, calls by name.
        name = module.layer_name if isinstance(module, RoutedExperts) else name
        parameters = dict(module.named_parameters(recurse=False))
        storages = {n: p for n, p in parameters.items() if isinstance(p, QuantizedStorage)}
        if storages:
            names.append(name)
        elif _asked_to_quantize(module):
            unquantized[name] = type(module).__name__
        elif not isinstance(module, VocabParallelEmbedding):
            if matrices := [p for p in parameters.values() if p.dim() > 1]:
                never[name] = sum(p.numel() * p.element_size() for p in matrices)
        for parameter, storage in storages.items():
            block = storage.format.block(storage.data.shape[-1])
            if storage.format.rotated and block == 1:
                unrotated.append(f"{name}.{parameter}")
            rotated += block > 1
            quantized[str(storage.data.dtype).removeprefix("torch.")] += 1
            quantized_bytes += storage.numel() * storage.element_size() + storage.scales.numel() * 4
            bf16_bytes += storage.numel() * 2
    precision, selection = getattr(config, "precision", None), getattr(config, "selection", None)
    # vLLM's own account of what has a cache: some models keep attention layers where their modules do not show.
    layers = runner.compilation_config.static_forward_context.values()
    attention = [layer for layer in layers if isinstance(layer, Attention)]
    return {
        "precision": precision.value if precision is not None else str(config),
        "quantized": dict(quantized),
        "quantized_layers": len(names),
        "quantized_names": names,
        "rotated": rotated,
        "unrotated": unrotated,
        "unquantized_layers": unquantized,
        "never_quantized": never,
        "kept_layers": selection.kept if selection is not None else [],
        "ignore_unused": selection.unused(never) if selection is not None else [],
        "head_dtype": head_dtype(model, runner.vllm_config.model_config),
        "quantized_bytes": quantized_bytes,
        "quantized_bytes_as_bf16": bf16_bytes,
        "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "logprobs_mode": runner.vllm_config.model_config.logprobs_mode,
        "kv_cache": {
            "dtypes": dict(Counter(layer.kv_cache_dtype for layer in attention)),
            "backends": sorted({layer.attn_backend.get_name() for layer in attention}),
            "equalized": sum(hasattr(layer, "key_offset") for layer in model.modules()),
        },
    }


def _asked_to_quantize(module: torch.nn.Module) -> bool:
    """Whether it is a layer that our quantization config was asked about and could quantize."""
    if isinstance(module, LinearBase):
        # ``ReplicatedLinear``'s loader goes past the parameter (``QUANTIZED_LAYERS``).
        return module.quant_config is not None and not isinstance(module, ReplicatedLinear)
    return isinstance(module, RoutedExperts)


def head_dtype(model: torch.nn.Module, config: Any) -> str:
    """In which precision a model computes its logits, found out by asking for some. Every tensor-parallel rank has to
    call it.

    Logits in an FP32 tensor prove nothing (a model may cast them after the head rounded them): their values have to lie
    between those of the model's dtype.

    Args:
        model: with weights that are not all zero, real or dummy.
        config: vLLM's model configuration.

    Returns:
        "float32", or the model's dtype; "unknown" and the reason when the model takes no such input.
    """
    device, generator = next(model.parameters()).device, torch.Generator().manual_seed(0)
    hidden = torch.randn(_PROBE_TOKENS, config.get_hidden_size(), generator=generator).to(device, config.dtype)
    try:
        with torch.no_grad():
            logits = model.compute_logits(hidden)
    except Exception as error:  # noqa: BLE001 - models raise anything; whoever wants FP32 is told
        return f"unknown ({type(error).__name__}: {error})"
    if logits is None:
        return "unknown (this rank gets no logits)"
    between = logits.isfinite() & (logits.float() != logits.to(config.dtype).float())
    return FP32 if bool(between.any()) else str(config.dtype).removeprefix("torch.")


def require_settings(settings: FlashRLConfig, found: dict[str, Any]) -> None:
    """Refuse a live engine that is not what its settings say.

    Args:
        settings: what was asked for.
        found: ``describe_model`` of one worker.

    Raises:
        FlashRLError: the model is something else (as ConfigError where a setting has to change).
    """
    wanted = settings.precision
    if found["precision"] != wanted.value:
        raise FlashRLError(
            f"the engine runs with quantization {found['precision']!r} although flashrl.precision={wanted.value}; "
            "look for conflicting keys under actor_rollout_ref.rollout.engine_kwargs.vllm"
        )
    _require_head(settings.fp32_lm_head, found["head_dtype"])
    _require_kv_cache(settings.kv_cache, found["kv_cache"])
    _require_kept(settings, found)
    if wanted is Precision.BF16:
        if found["quantized_layers"] > 0:
            raise FlashRLError(f"flashrl.precision=bf16, but the engine holds quantized weights: {found['quantized']}")
        return
    # Only some layers of the engine would have 8 bits, and nobody named the others.
    if unknown := {n: kind for n, kind in found["unquantized_layers"].items() if n not in found["kept_layers"]}:
        raise FlashRLError(
            f"flashrl.precision={wanted.value} would leave {len(unknown)} layers of this model in high precision, of "
            f"kinds the quantizer does not know: {list(unknown.items())[:8]}; name them in flashrl.ignore, or set "
            "flashrl.precision=bf16"
        )
    never = sum(found["never_quantized"].values())
    if never > found["quantized_bytes_as_bf16"] > 0:
        raise FlashRLError(
            f"flashrl.precision={wanted.value}, but vLLM builds most of this model without a quantization config: "
            f"{never / 1e9:.3g} GB stay in high precision, {found['quantized_bytes_as_bf16'] / 1e9:.3g} GB would not: "
            f"{listed(list(found['never_quantized']))}; set flashrl.precision=bf16"
        )
    fmt = weight_format(wanted, settings.rotation)
    if set(found["quantized"]) != {fmt.storage}:
        raise FlashRLError(
            f"flashrl.precision={wanted.value}, but the engine's quantized weights are {found['quantized'] or 'none'} "
            f"(kept by flashrl.ignore: {len(found['kept_layers'])} layers); "
            "keep fewer, or set flashrl.precision=bf16"
        )


def _require_kept(settings: FlashRLConfig, found: dict[str, Any]) -> None:
    if found["ignore_unused"]:
        examples = [*found["unquantized_layers"], *found["never_quantized"]][:2] + found["quantized_names"][:4]
        raise ConfigError(
            f"flashrl.ignore has entries that match no layer of this model: {found['ignore_unused']}. Its layers are "
            f"named like {examples}; correct the entries "
            "or remove them"
        )


def _require_kv_cache(wanted: KVCache, found: dict[str, Any]) -> None:
    dtypes, layers = set(found["dtypes"]), sum(found["dtypes"].values())
    if dtypes - _ENGINE_NAMES.get(wanted, {wanted.value}) or (wanted is not KVCache.AUTO and not dtypes):
        raise FlashRLError(
            f"flashrl.kv_cache={wanted.value}, but the engine's attention layers have a KV cache in "
            f"{found['dtypes'] or 'none'} "
            f"(with backends {found['backends']}); check `flashrl version`, or set flashrl.kv_cache=auto"
        )
    if wanted is not KVCache.AUTO and found["equalized"] != layers:
        raise FlashRLError(
            f"flashrl.kv_cache={wanted.value}, but the keys of only {found['equalized']} of {layers} attention "
            "layers can be equalized. Set flashrl.kv_cache=auto"
        )


def _require_head(wanted: bool, found: str) -> None:
    if wanted and found != FP32:
        raise ConfigError(
            f"flashrl.fp32_lm_head=true, but the engine computes this model's logits in {found}: vLLM's class of the "
            "model does not hand its quantization config to lm_head (or, with tied embeddings, to the embedding). Set "
            "flashrl.fp32_lm_head=false"
        )
    if found == FP32 and not wanted:
        raise ConfigError(
            "flashrl.fp32_lm_head=false, but the engine computes this model's logits in float32 (a head_dtype in its "
            "config.json?) and the trainer does not. Set flashrl.fp32_lm_head=true"
        )
