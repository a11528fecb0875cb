# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine as a run starts it: FlashRL's formats, weights by weight updates."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch

from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.rollout.worker import FlashRLWorkerExtension
from flashrl_verl.settings import FlashRLConfig, KVCache, Precision

FP8_VERL = "fp8-verl"
"""verl's own FP8 rollout: 128 x 128 blocks of the weight, 128 channels of a token."""
WEIGHTS = {
    **{precision.value: {"precision": precision} for precision in Precision},
    "int8-unrotated": {"precision": Precision.INT8, "rotation": False},
    FP8_VERL: {"precision": Precision.BF16},
}
"""Settings of FlashRL by the name of a variant, behind which ``+int8kv`` may stand."""


def formats_of(variant: str) -> FlashRLConfig:
    """Formats of ``int8``, ``int8-unrotated`` or ``int8+int8kv``; BF16 of ``FP8_VERL``, which is not ours.

    Raises:
        ConfigError: it names another format.
    """
    name, *kv_cache = variant.split("+")
    if name not in WEIGHTS or kv_cache not in ([], ["int8kv"]):
        raise ConfigError(
            f"--variants {variant!r}: a variant is one of {', '.join(WEIGHTS)}, or one of these with +int8kv behind it"
        )
    return FlashRLConfig(**WEIGHTS[name], kv_cache=KVCache.INT8_PER_TOKEN_HEAD if kv_cache else KVCache.AUTO)


def start(model: str, variant: str, *, in_process: bool, fp32_lm_head: bool = False, **arguments: Any) -> Any:
    """Start an engine on token ids and give its model weights.

    Args:
        model: folder with config.json; its weights, or random ones where it has none, arrive by a weight update.
        variant: see ``formats_of``.
        in_process: keep the engine's core in this process, where an error of it can be read.
        fp32_lm_head: as ``flashrl.fp32_lm_head``; not for ``FP8_VERL``.
        **arguments: of ``vllm.LLM``.

    Raises:
        FlashRLError: the engine's weights are not in the variant's format.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    from omegaconf import OmegaConf

    from flashrl_verl.platforms import activate
    from flashrl_verl.plugins.vllm import register
    from flashrl_verl.quantization.config import engine_arguments
    from flashrl_verl.quantization.formats import weight_format
    from flashrl_verl.upstream.versions import vllm_device

    activate(OmegaConf.create({"trainer": {"device": vllm_device()}}))
    register()
    import vllm

    if vllm_device() != "cuda":
        arguments.pop("gpu_memory_utilization", None)
    formats = dataclasses.replace(formats_of(variant), fp32_lm_head=fp32_lm_head)
    is_verl_fp8 = variant == FP8_VERL
    llm = vllm.LLM(
        model,
        skip_tokenizer_init=True,
        worker_extension_cls="benchmarks.engine.BenchWorkerExtension",
        scheduler_cls="flashrl_verl.rollout.scheduler.scheduler",  # as in a run
        dtype="bfloat16",
        load_format="dummy",
        logprobs_mode="processed_logprobs",
        **({**_verl_fp8_arguments(), **arguments} if is_verl_fp8 else engine_arguments(formats, **arguments)),
    )
    layers = llm.collective_rpc("flashrl_layers")[0]
    fmt = weight_format(formats.precision)
    if set(layers["quantized"]) != (set() if fmt is None else {fmt.storage}):
        raise FlashRLError(f"{variant}: the engine's quantized weights are {layers['quantized'] or 'none'}")
    llm.collective_rpc("bench_update_by_verl" if is_verl_fp8 else "bench_update", args=(model,))
    if not llm.reset_prefix_cache():
        raise FlashRLError("vLLM kept keys and values of the weights before the update. Run the command again")
    return llm


def _verl_fp8_arguments() -> dict[str, Any]:
    """Arguments of an engine as ``rollout.quantization=fp8`` starts it (``vLLMHttpServer._apply_quantization``)."""
    from verl.utils.vllm.vllm_quant_utils import apply_vllm_quant_patches

    apply_vllm_quant_patches()
    os.environ["VERL_VLLM_FP8_QUANT_ENABLED"] = "1"
    os.environ.setdefault("VLLM_DEEP_GEMM_WARMUP", "skip")  # minutes, for kernels of all sizes
    config = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    return {"quantization": "fp8", "hf_overrides": {"quantization_config": config}}


class BenchWorkerExtension(FlashRLWorkerExtension):
    """Mixed into vLLM's worker. Methods return plain data."""

    def bench_update(self, model: str) -> None:
        """Two weight updates, as in a run."""
        from benchmarks.models import buckets
        from flashrl_verl.refit.load import WeightRefit

        runner = self.model_runner
        device = next(runner.model.parameters()).device
        refit = WeightRefit(runner.model, runner.vllm_config.model_config, device)
        for step in range(2):
            refit.begin(step)
            for bucket in buckets(Path(model), device):
                refit.load(bucket)
                del bucket  # or the next one is made while this one still takes memory
            refit.finish()

    def bench_update_by_verl(self, model: str) -> None:
        """One weight update as verl's own worker makes it, of a quantized rollout of verl's."""
        from verl.utils.vllm import vllm_quant_utils

        from benchmarks.models import buckets

        runner = self.model_runner
        state = vllm_quant_utils.prepare_quanted_weights_for_loading(runner.model)
        for bucket in buckets(Path(model), next(runner.model.parameters()).device):
            vllm_quant_utils.load_quanted_weights(bucket, runner)
        vllm_quant_utils.process_quanted_weights_after_loading(runner.model, state)
        dtypes = {p.dtype for n, p in runner.model.named_parameters() if n.endswith("proj.weight")}
        if dtypes != {torch.float8_e4m3fn}:
            raise FlashRLError(f"{FP8_VERL}: the engine's linear layers are in {dtypes}")

    def bench_memory(self) -> dict[str, Any]:
        """Tokens that the KV cache holds, its bytes and those of the weights on this worker; the device."""
        config, cuda = self.model_runner.kv_cache_config, torch.cuda.is_available()
        groups = config.kv_cache_groups  # layers of different kinds share the blocks
        return {
            "kv_tokens": config.num_blocks // len(groups) * min(group.kv_cache_spec.block_size for group in groups),
            "kv_bytes": sum(tensor.size for tensor in config.kv_cache_tensors),
            "weight_bytes": sum(parameter.nbytes for parameter in self.model_runner.model.parameters()),
            "memory_bytes": torch.cuda.mem_get_info()[1] if cuda else None,
        }
