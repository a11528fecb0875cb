# SPDX-License-Identifier: Apache-2.0
"""verl's vLLM server, started with the flashrl quantization and checked to be what it says it is."""

import asyncio
import dataclasses
import os
import uuid
from collections.abc import Callable
from typing import Any

import ray
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from flashrl_verl import self_check
from flashrl_verl.compat import vllm_device
from flashrl_verl.config import FlashRLConfig, KVCache, Precision, ServerAddress
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.lm_head import FP32
from flashrl_verl.platforms.cores import bind_ranks
from flashrl_verl.plugin_vllm import register
from flashrl_verl.quantization.formats import weight_format
from flashrl_verl.replicas import settings_of
from flashrl_verl.rollout.access import base_url, loopback_address, require_key, server_key, verify_refusal
from flashrl_verl.rollout.kv_check import require_kv_cache
from flashrl_verl.rollout.layer_check import keeps_fewer, unknown_layers
from flashrl_verl.rollout.transfer import socket_scope
from flashrl_verl.self_check import EngineState

NAME = "flashrl"
"""Value of ``actor_rollout_ref.rollout.name``, and the prefix of the servers' Ray actor names on both sides."""


class FlashRLHttpServer(vLLMHttpServer):
    """One vLLM engine of the rollout."""

    def _validate_configs(self) -> None:
        super()._validate_configs()
        self.flashrl = FlashRLConfig.from_mapping((self.config.custom or {}).get("flashrl", {}))
        if self.flashrl.bf16_replica_fraction:
            raise FlashRLError(
                "an engine was started without a precision of its own, outside of the replicas among which "
                f"flashrl.bf16_replica_fraction={self.flashrl.bf16_replica_fraction:g} is shared out; set it to 0.0"
            )
        self._generated_tokens = 0

    def _apply_quantization(self) -> tuple[str | None, dict]:
        register()
        from flashrl_verl.quantization.config import NAME as METHOD
        from flashrl_verl.quantization.config import quantization_config_dict

        if getattr(self.model_config.hf_config, "quantization_config", None):
            raise ConfigError(
                f"actor_rollout_ref.model.path={self.model_config.local_path} is a quantized checkpoint; "
                "the trainer needs the high-precision one"
            )
        return METHOD, {"quantization_config": quantization_config_dict(self.flashrl)}

    def _preprocess_engine_kwargs(self, engine_kwargs: dict) -> None:
        from flashrl_verl.quantization.config import kv_cache_arguments

        super()._preprocess_engine_kwargs(engine_kwargs)
        for name, value in kv_cache_arguments(self.flashrl.kv_cache).items():
            # vLLM takes attention's backend by this name or by that of its configuration, and not by both.
            if name != "attention_backend" or not (engine_kwargs.get("attention_config") or {}).get("backend"):
                engine_kwargs.setdefault(name, value)

    def _get_worker_extension_cls(self) -> str:
        return "flashrl_verl.rollout.worker.FlashRLWorkerExtension"

    def _post_init(self, cuda_visible_devices: str) -> None:
        super()._post_init(cuda_visible_devices)
        # The engine's workers build the path of their weight socket from this variable of verl's.
        os.environ["VERL_RAY_JOB_ID"] = socket_scope()
        if vllm_device() == "cpu":
            bind_ranks(self.config.tensor_model_parallel_size)

    async def run_server(self, args) -> None:
        if self.flashrl.server_address is ServerAddress.LOOPBACK:
            self._server_address = loopback_address(self.replica_rank)  # where verl is about to bind the HTTP server
        require_key(args)
        await super().run_server(args)
        await asyncio.to_thread(verify_refusal, self._server_address, self._server_port)
        self._layers = await self.collective_rpc("flashrl_layers")
        for layers in self._layers:
            require_precision(self.flashrl, layers)

    async def flashrl_http_access(self) -> tuple[str, str]:
        """Base URL of this server, and its key; a request brings it as ``Authorization: Bearer <key>``."""
        return base_url(*self.get_server_address()), server_key()

    async def generate(self, *args, **kwargs) -> TokenOutput:
        """verl's; counts what it returns, as the trainer sees only the groups that dynamic sampling kept."""
        output = await super().generate(*args, **kwargs)
        self._generated_tokens += len(output.token_ids)
        return output

    async def flashrl_generated_tokens(self) -> int:
        """Response tokens returned since the server started, validation included."""
        return self._generated_tokens

    async def collective_rpc(
        self,
        method: str | Callable,
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list:
        """verl's, returning the workers' results instead of dropping them."""
        return await self.engine.collective_rpc(method=method, timeout=timeout, args=args, kwargs=kwargs)

    async def flashrl_layers(self) -> list[dict]:
        """What each worker's model is (``FlashRLWorkerExtension.flashrl_layers``), read when the engine started."""
        return self._layers

    async def flashrl_receipts(self) -> list[dict]:
        """Each worker's receipt of the last update."""
        return await self.collective_rpc("flashrl_receipt")

    async def flashrl_state(self) -> EngineState:
        """What the engine holds, and its greedy answer to a fixed prompt, computed anew."""
        await self.clear_kv_cache()
        tokenizer = self.model_config.tokenizer
        output = await self.generate(
            self_check.prompt(min(len(tokenizer), self.model_config.hf_config.get_text_config().vocab_size)),
            {"temperature": 0.0, "max_tokens": self_check.NEW_TOKENS, "ignore_eos": True, "logprobs": True},
            request_id=uuid.uuid4().hex,
        )
        workers = await self.collective_rpc("flashrl_digest")
        await self.collective_rpc("flashrl_forget_padded_vocab_mass")  # of a prompt that means nothing
        await self.clear_kv_cache()
        return EngineState(workers=workers, token_ids=output.token_ids, log_probs=output.log_probs)

    async def flashrl_sleep_and_wake(self, level: int) -> None:
        """vLLM's sleep mode at ``level``, and back at once."""
        await self.engine.sleep(level=level)
        await self.engine.wake_up()
        await self._restore_kv_scales()

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """verl's, after which the scales of an FP8 KV cache are again those of the last update."""
        await super().wake_up(tags)
        await self._restore_kv_scales()

    async def resume_kv_cache(self) -> None:
        """As ``wake_up``."""
        await super().resume_kv_cache()
        await self._restore_kv_scales()

    async def _restore_kv_scales(self) -> None:
        if self.flashrl.kv_cache is KVCache.FP8 and self.node_rank == 0:
            await self.collective_rpc("flashrl_restore_kv_scales")

    async def flashrl_kv_scales(self) -> list[dict[str, float] | None]:
        """Each worker's scales as attention uses them; an error if they are not those of the last update."""
        return await self.collective_rpc("flashrl_kv_scales")

    async def flashrl_padded_vocab_mass(self) -> float:
        """The largest over the workers."""
        return max(await self.collective_rpc("flashrl_padded_vocab_mass"))


class FlashRLReplica(vLLMReplica):
    """One rollout replica: as verl's, with ``FlashRLHttpServer`` on each of its nodes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(FlashRLHttpServer)

    async def init_hybrid(self, worker_group) -> None:
        """verl's; only here is known how many replicas there are."""
        self.take_precision(worker_group.world_size // self.world_size)
        await super().init_hybrid(worker_group)

    def take_precision(self, replicas: int) -> None:
        """Give the servers of this replica their own settings, one of ``replicas`` (``replicas.py``).

        Raises:
            ConfigError: so many replicas do not make the mixture that is asked for.
        """
        custom = self.config.custom or {}
        own = settings_of(FlashRLConfig.from_mapping(custom.get("flashrl", {})), self.replica_rank, replicas)
        # A copy: verl's configuration is frozen, and the other replicas may share it.
        self.config = dataclasses.replace(self.config, custom={**custom, "flashrl": dataclasses.asdict(own)})

    def _get_server_name_prefix(self) -> str:
        return f"{NAME}_"


def require_precision(settings: FlashRLConfig, layers: dict) -> None:
    """The live engine's model, not its arguments, decides whether the precision's name is true.

    Args:
        settings: what was asked for.
        layers: ``FlashRLWorkerExtension.flashrl_layers`` of one worker.

    Raises:
        FlashRLError: the model is something else (as ConfigError where a setting has to change).
    """
    wanted = settings.precision
    if layers["precision"] != wanted.value:
        raise FlashRLError(
            f"the engine runs with quantization {layers['precision']!r} although flashrl.precision={wanted.value}; "
            "look for conflicting keys under actor_rollout_ref.rollout.engine_kwargs.vllm"
        )
    _require_head(settings.fp32_lm_head, layers["head_dtype"])
    require_kv_cache(settings.kv_cache, layers["kv_cache"])
    if layers["ignore_unused"]:
        raise ConfigError(
            f"flashrl.ignore has entries that match no layer of this model: {layers['ignore_unused']}. Its layers are "
            f"named like {list(layers['unquantized_layers'])[:2] + layers['quantized_names'][:4]}; correct the entries or "
            f"remove them"
        )
    too_few = keeps_fewer(settings.keep_first_layers, settings.keep_last_layers, layers)
    if too_few and wanted is not Precision.BF16:
        raise ConfigError(
            f"flashrl.keep_first_layers={settings.keep_first_layers} and keep_last_layers={settings.keep_last_layers} "
            f"{too_few}. Name the layers in flashrl.ignore"
        )
    if wanted is Precision.BF16:
        if layers["quantized_layers"] > 0:
            raise FlashRLError(f"flashrl.precision=bf16, but the engine holds quantized weights: {layers['quantized']}")
        return
    unknown = unknown_layers(layers)
    if unknown:
        raise FlashRLError(
            f"flashrl.precision={wanted.value} would leave {len(unknown)} layers of this model in high precision, of kinds "
            f"the quantizer does not know: {list(unknown.items())[:8]}; name them in flashrl.ignore, or set "
            "flashrl.precision=bf16"
        )
    if set(layers["quantized"]) != {weight_format(wanted).storage}:
        raise FlashRLError(
            f"flashrl.precision={wanted.value}, but the engine's quantized weights are {layers['quantized'] or 'none'} "
            f"(kept by flashrl.ignore, keep_first_layers and keep_last_layers: {len(layers['kept_layers'])} layers); keep "
            f"fewer, or set flashrl.precision=bf16"
        )


def _require_head(wanted: bool, found: str) -> None:
    if wanted and found != FP32:
        raise ConfigError(
            f"flashrl.fp32_lm_head=true, but the engine computes this model's logits in {found}: vLLM's class of the model "
            "does not hand its quantization config to lm_head (or, with tied embeddings, to the embedding). Set "
            "flashrl.fp32_lm_head=false"
        )
    if found == FP32 and not wanted:
        raise ConfigError(
            "flashrl.fp32_lm_head=false, but the engine computes this model's logits in float32 (a head_dtype in its "
            "config.json?) and the trainer does not. Set flashrl.fp32_lm_head=true"
        )
