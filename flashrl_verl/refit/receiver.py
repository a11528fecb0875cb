# SPDX-License-Identifier: Apache-2.0
"""Engine side of a weight update, inside vLLM's worker: receives the buckets, loads them, and reports what it did."""

import torch
from verl.utils.device import get_device_name
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.model_executor.model_loader.utils import process_weights_after_loading

from flashrl_verl.refit.load import WeightRefit
from flashrl_verl.refit.scan import Scan
from flashrl_verl.refit.stale_copies import layers_with_stale_copies
from flashrl_verl.refit.transfer import DrainingReceiver


class WeightReceiver(vLLMColocateWorkerExtension):
    """verl's worker extension with an update that is accounted for. Methods return plain data: they cross process
    borders."""

    _flashrl_refit: WeightRefit | None = None

    def update_weights_from_ipc(
        self,
        peft_config: dict | None = None,
        base_sync_done: bool = False,
        use_shm: bool = False,
        flashrl: dict | None = None,
    ) -> dict:
        """Receive one update and load it. Never raises: the error travels in the report, so that it arrives whole.

        Args:
            peft_config: must be None (adapters are refused when the configuration is composed).
            base_sync_done: verl's flag for adapters, unused.
            use_shm: buckets come through shared memory instead of CUDA IPC.
            flashrl: step and time-out of this update, and whether to look for layers with stale copies first.

        Returns:
            ``WeightRefit.finish``'s report with ``error`` None, or only ``error`` set.
        """
        try:
            return {"error": None, **self._flashrl_receive(peft_config, use_shm, flashrl)}
        except Exception as error:  # noqa: BLE001 - becomes a RefitError on the trainer's side
            return {"error": f"{type(error).__name__}: {error}"}

    def flashrl_receipt(self) -> dict:
        """The receipt of the last whole update; empty when there was none or the last one failed."""
        return self._flashrl_refit.last_receipt if self._flashrl_refit is not None else {}

    def flashrl_digest(self) -> dict[str, tuple[int, int]]:
        """Checksum and address of every parameter and buffer."""
        model, scan = self.model_runner.model, Scan()
        tensors = {n: t.data for n, t in [*model.named_parameters(), *model.named_buffers()] if t.numel()}
        scan.add(*tensors.values())
        return {n: (total, t.data_ptr()) for (n, t), (total, _) in zip(tensors.items(), scan.results(), strict=True)}

    def _flashrl_receive(self, peft_config: dict | None, use_shm: bool, flashrl: dict | None) -> dict:
        if peft_config:
            raise ValueError(
                "LoRA adapters cannot be loaded into this rollout; set actor_rollout_ref.model.lora.merge=True"
            )
        if flashrl is None:
            raise ValueError(
                "the update came from an adapter other than flashrl's; set actor_rollout_ref.rollout.name=flashrl"
            )
        if self.device is None:
            self.device = torch.device(get_device_name())
        model, model_config = self.model_runner.model, self.model_runner.vllm_config.model_config
        if self._flashrl_refit is None:
            self._flashrl_refit = WeightRefit(model, model_config, self.device)
        stale: list[str] = []
        if flashrl.get("self_check"):
            stale = layers_with_stale_copies(
                model, lambda: process_weights_after_loading(model, model_config, self.device)
            )
        self._flashrl_refit.begin(flashrl["step"])
        receiver = DrainingReceiver(
            zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm, timeout_s=flashrl["timeout_s"]
        )
        receiver.drain(self._flashrl_refit.load)
        report = self._flashrl_refit.finish()
        if stale:
            raise ValueError(
                f"self-check: {len(stale)} layers compute with a stale copy of their weights: {', '.join(stale[:8])}. "
                "Set flashrl.precision=bf16 to see whether quantization is at fault, and check `flashrl version`"
            )
        return report
