# SPDX-License-Identifier: Apache-2.0
"""Trainer side of a weight update: casts each tensor to the rollout's dtype, sends it, and awaits the engine's
report."""

import asyncio
import time
from collections.abc import Iterable, Iterator

import ray
import torch
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from flashrl_verl.errors import RefitError
from flashrl_verl.refit.receipt import Manifest
from flashrl_verl.refit.transfer import TIMEOUT_KEY, WatchedSender, socket_scope
from flashrl_verl.refit.wire import wire_dtype
from flashrl_verl.settings import FlashRLConfig


def cast_for_rollout(
    weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights in the rollout's dtype; routers and non-floating tensors as they are (``wire_dtype``).

    FSDP keeps FP32 masters: sent as they are they would be twice the bytes (131 GB at 32B), and the quantized weight
    must be that of the BF16 model the engine would otherwise run.

    Args:
        weights: (Hugging Face name, tensor of any shape and dtype) pairs.
        dtype: the rollout's.
    """
    for name, tensor in weights:
        yield name, tensor.to(wire_dtype(name, tensor.dtype, dtype), non_blocking=True)


def outgoing(
    weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, manifest: Manifest
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor as it is sent, cast and written into ``manifest``."""
    return manifest.watch(cast_for_rollout(weights, dtype))


class FlashRLServerAdapter(ServerAdapter):
    """verl's adapter with a cast, a time-out, a receipt, and the receiver's result awaited."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.flashrl = FlashRLConfig.of_rollout(self.config)
        job_id = ray.get_runtime_context().get_job_id()
        self.zmq_handle = self.zmq_handle.replace(job_id, socket_scope(), 1)
        self.sent_receipt: dict = {}
        self.self_check_next = False
        """Whether the engine is to look for layers with stale copies before it takes the next update
        (``self_check.py``)."""
        self.reports: list[dict] = []
        """The engine workers' reports on the last update; only the rank that owns the server has them."""

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        **kwargs,
    ) -> None:
        """Send one update and wait until the engine has loaded and verified it.

        Args:
            weights: (Hugging Face name, whole tensor) pairs, any floating dtype.
            global_steps: the trainer's step, written into the receipt.
            **kwargs: verl's arguments of LoRA adapters, which are refused when the configuration is composed.

        Raises:
            RefitError: the engine could not take the update, ended, or was silent for ``flashrl.update_timeout_s``.
        """
        started = time.perf_counter()
        step = -1 if global_steps is None else int(global_steps)
        timeout_s = self.flashrl.update_timeout_s
        request = {"step": step, "timeout_s": timeout_s, "self_check": self.self_check_next, "use_shm": self.use_shm}
        self.self_check_next = False
        future = await self._execute_method("update_weights_from_ipc", non_block=True, kwargs=request)
        sender = WatchedSender(
            timeout_s=timeout_s,
            receiver_ended=lambda: self._why_ended(future, step),
            zmq_handle=self.zmq_handle,
            bucket_size_mb=self.config.checkpoint_engine.update_weights_bucket_megabytes,
            use_shm=self.use_shm,
        )
        manifest = Manifest(step)
        await sender.async_send_weights(outgoing(weights, getattr(torch, self.config.dtype), manifest))
        reports = await self._await_reports(future, step) if future is not None else []
        if errors := [f"worker {i}: {r['error']}" for i, r in enumerate(reports) if r.get("error")]:
            raise RefitError(f"replica {self.replica_rank}: {'; '.join(errors)}")
        self.sent_receipt, self.reports = manifest.receipt(), reports
        if self._has_server:
            await self.server_handle.clear_kv_cache.remote()
            if global_steps is not None:
                await self.server_handle.set_global_steps.remote(global_steps)
        total = time.perf_counter() - started
        for report in reports:
            report["seconds"]["total"] = total

    async def _await_reports(self, future: ray.ObjectRef, step: int) -> list[dict]:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future.future()), self.flashrl.update_timeout_s)
        except TimeoutError as error:
            raise RefitError(
                f"weight update of step {step}: all tensors were sent, but the rollout engine did not report within "
                f"{self.flashrl.update_timeout_s:g} s; if it is only slow, raise {TIMEOUT_KEY}"
            ) from error
        except ray.exceptions.RayError as error:
            raise RefitError(f"weight update of step {step}: the rollout engine ended: {_cause(error)}") from error

    def _why_ended(self, future: ray.ObjectRef | None, step: int) -> str | None:
        """None while the engine works on the update, and when its last acknowledgement is still on the way; else the
        reason why it stopped."""
        if future is None or not ray.wait([future], timeout=0)[0]:
            return None
        try:
            reports = ray.get(future)
        except Exception as error:  # noqa: BLE001 - whatever ended the engine is the message
            return f"weight update of step {step}: the rollout engine ended: {_cause(error)}"
        errors = "; ".join(r["error"] for r in reports if r.get("error"))
        return f"weight update of step {step}: the rollout engine stopped receiving: {errors}" if errors else None


def _cause(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"
