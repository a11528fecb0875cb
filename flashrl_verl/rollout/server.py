# SPDX-License-Identifier: Apache-2.0
"""verl's vLLM server, started with the flashrl quantization and checked to be what it says it is."""

import asyncio
import inspect
import os
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm.sampling_params import RequestOutputKind

from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.plugins.vllm import register
from flashrl_verl.refit import self_check
from flashrl_verl.refit.self_check import EngineState
from flashrl_verl.refit.transfer import socket_scope
from flashrl_verl.rollout import scheduler
from flashrl_verl.rollout.access import loopback_address, refuse_requests
from flashrl_verl.rollout.inspection import require_settings
from flashrl_verl.settings import FlashRLConfig
from flashrl_verl.upstream.versions import vllm_device

NAME = "flashrl"
"""Value of ``actor_rollout_ref.rollout.name``, and the prefix of the servers' Ray actor names on both sides."""


class FlashRLHttpServer(vLLMHttpServer):
    """One vLLM engine of the rollout."""

    def _validate_configs(self) -> None:
        super()._validate_configs()
        self.flashrl = FlashRLConfig.of_rollout(self.config)
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
        from flashrl_verl.attention import kv_cache_arguments

        super()._preprocess_engine_kwargs(engine_kwargs)
        for name in [name for name in engine_kwargs if "-" in name]:  # or ours and verl's would stand beside it
            engine_kwargs[name.replace("-", "_")] = engine_kwargs.pop(name)
        if vllm_device() == "cpu" and self.config.tensor_model_parallel_size * self.config.data_parallel_size == 1:
            # verl asks for a worker, which waits for its next step in a loop: a third of a core. A GPU keeps it
            # (docs/LOG.md). Without the variable vLLM's CPU platform takes "mp"; an AsyncLLM reads it nowhere else.
            if engine_kwargs.setdefault("distributed_executor_backend", "uni") == "uni":
                os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        sequences = engine_kwargs.get("max_num_seqs") or self.config.max_num_seqs
        chosen = self.config.cudagraph_capture_sizes or "cudagraph_capture_size" in str(engine_kwargs)
        if sequences > 512 and vllm_device() == "cuda" and not chosen and "speculative_config" not in engine_kwargs:
            # vLLM captures up to 512, in steps of 16. A larger batch runs without a CUDA graph (docs/results/step.md).
            # With speculation it captures what a step of many tokens a sequence needs.
            engine_kwargs["max_cudagraph_capture_size"] = -(-sequences // 16) * 16
        engine_kwargs.setdefault("scheduler_cls", scheduler.NAME)
        engine_kwargs.update(kv_cache_arguments(self.flashrl.kv_cache, engine_kwargs))

    def _get_worker_extension_cls(self) -> str:
        return "flashrl_verl.rollout.worker.FlashRLWorkerExtension"

    def _post_init(self, cuda_visible_devices: str) -> None:
        super()._post_init(cuda_visible_devices)
        # The engine's workers build the path of their weight socket from this variable of verl's.
        os.environ["VERL_RAY_JOB_ID"] = socket_scope()
        if vllm_device() == "cpu" and self.config.tensor_model_parallel_size > 1:
            # Else vLLM binds each rank to a NUMA node of its own, and stops where there are fewer, as on a laptop.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

    async def run_server(self, args) -> None:
        self._server_address = loopback_address(self.replica_rank)  # where verl is about to bind the HTTP server
        refuse_requests(args)
        await super().run_server(args)
        self._take_pause_of_verl()
        self._layers = await self.collective_rpc("flashrl_layers")
        for layers in self._layers:
            require_settings(self.flashrl, layers)
            if layers["logprobs_mode"] != self.config.logprobs_mode:
                raise FlashRLError(
                    f"the engine returns {layers['logprobs_mode']}, not {self.config.logprobs_mode} as "
                    "actor_rollout_ref.rollout.logprobs_mode says; look for conflicting keys under "
                    "actor_rollout_ref.rollout.engine_kwargs.vllm"
                )

    def _take_pause_of_verl(self) -> None:
        """verl 0.9.1 pauses with ``wait_for_inflight_requests=False``, for which vLLM has ``mode`` alone since 0.32."""
        pause = self.engine.pause_generation
        if "wait_for_inflight_requests" not in inspect.signature(pause).parameters:

            def with_mode(wait_for_inflight_requests: bool = False, **kwargs: Any) -> Awaitable[None]:
                return pause(**{"mode": "wait" if wait_for_inflight_requests else "abort", **kwargs})

            self.engine.pause_generation = with_mode

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], *args: Any, **kwargs: Any
    ) -> TokenOutput:
        """verl's, without the text and the objects that it does not read: two fifths of the server's CPU time a token.
        Counts what it returns, as the trainer sees only the groups that dynamic sampling kept."""
        text = bool(sampling_params.get("stop"))  # strings, which vLLM looks for in it
        sampling_params = {"detokenize": text, "flat_logprobs": True, **sampling_params}
        sampling_params["output_kind"] = RequestOutputKind.FINAL_ONLY
        output = await super().generate(prompt_ids, sampling_params, *args, **kwargs)
        self._generated_tokens += len(output.token_ids)
        if not output.token_ids and output.stop_reason in ("aborted", "abort"):
            # Stopped for an update while it waited: the weights count that sample its first token.
            output.extra_fields["global_steps"] = None
        return output

    @property
    def _admitting(self) -> int:
        """Requests that have not reached the engine. verl waits for them before an update stops the engine.

        verl takes a request off this count at its first output. Here that is its last, so the engine is asked how many
        it has. Requests over HTTP are not in verl's count and make this smaller. In a stopped engine they wait.
        """
        return self._unanswered - self._in_engine()

    @_admitting.setter
    def _admitting(self, count: int) -> None:
        self._unanswered = count + self._in_engine()

    def _in_engine(self) -> int:
        return len(self.engine.output_processor.request_states) if hasattr(self, "engine") else 0

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
        """verl's, returning the workers' results instead of dropping them, and ending with the engine: vLLM never
        answers a call that its process does not survive."""
        call = asyncio.ensure_future(
            self.engine.collective_rpc(method=method, timeout=timeout, args=args, kwargs=kwargs)
        )
        while not (await asyncio.wait({call}, timeout=1.0))[0]:
            if self.engine.errored:
                raise self.engine.dead_error
        return call.result()

    async def flashrl_layers(self) -> list[dict]:
        """What each worker's model is (``FlashRLWorkerExtension.flashrl_layers``), read when the engine started."""
        return self._layers

    async def flashrl_receipts(self, whole: bool = False) -> list[dict]:
        """Each worker's receipt of the last update, brief or whole."""
        return await self.collective_rpc("flashrl_receipt", args=(whole,))

    async def clear_kv_cache(self) -> None:
        """verl's, with requests in flight too, as over HTTP: vLLM reads their tokens anew, with the weights of now.
        verl's alone would then keep all keys, those of older weights too, and only log it."""
        if self.node_rank == 0:
            await self.engine.reset_prefix_cache(reset_running_requests=True)
        await super().clear_kv_cache()

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
        await self.clear_kv_cache()
        return EngineState(workers=workers, token_ids=output.token_ids, log_probs=output.log_probs)


class FlashRLReplica(vLLMReplica):
    """One rollout replica: as verl's, with ``FlashRLHttpServer`` on each of its nodes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(FlashRLHttpServer)

    def _get_server_name_prefix(self) -> str:
        return f"{NAME}_"
