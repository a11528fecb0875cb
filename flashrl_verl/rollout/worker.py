# SPDX-License-Identifier: Apache-2.0
"""What verl and this package's server ask of vLLM's worker: take a weight update, and say what it holds."""

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.model_executor.model_loader.utils import process_weights_after_loading

from flashrl_verl.errors import listed
from flashrl_verl.refit.load import WeightRefit
from flashrl_verl.refit.receipt import brief
from flashrl_verl.refit.scan import Checksums
from flashrl_verl.refit.stale_copies import layers_with_stale_copies
from flashrl_verl.refit.transfer import WatchedReceiver
from flashrl_verl.rollout.inspection import describe_model


class FlashRLWorkerExtension(vLLMColocateWorkerExtension):
    """verl's, mixed into vLLM's worker by ``worker_extension_cls``, with an update that is accounted for. Methods
    return plain data: they cross process borders."""

    _flashrl_refit: WeightRefit | None = None

    def update_weights_from_ipc(self, *, step: int, timeout_s: float, self_check: bool, use_shm: bool) -> dict:
        """Receive one update and load it. Never raises: the error travels in the report, so that it arrives whole.

        Args:
            step: the trainer's global step.
            timeout_s: longest silence of the sender, seconds.
            self_check: whether to look for layers with stale copies first.
            use_shm: buckets come through shared memory instead of CUDA IPC.

        Returns:
            ``WeightRefit.finish``'s report with ``error`` None, or only ``error`` set.
        """
        try:
            return {"error": None, **self._flashrl_receive(step, timeout_s, self_check, use_shm)}
        except Exception as error:  # noqa: BLE001 - becomes a RefitError on the trainer's side
            return {"error": f"{type(error).__name__}: {error}"}

    def flashrl_layers(self) -> dict:
        """``describe_model`` of this worker's model."""
        return describe_model(self.model_runner)

    def flashrl_receipt(self, whole: bool = False) -> dict:
        """The receipt of the last whole update, brief or whole; empty when there was none or the last one failed."""
        receipt = self._flashrl_refit.last_receipt if self._flashrl_refit is not None else {}
        return receipt if whole else brief(receipt)

    def flashrl_digest(self) -> dict[str, tuple[int, int]]:
        """Checksum and address of every parameter and buffer."""
        model, checksums = self.model_runner.model, Checksums()
        tensors = {n: t.data for n, t in [*model.named_parameters(), *model.named_buffers()] if t.numel()}
        checksums.add(*tensors.values())
        return {n: (total, t.data_ptr()) for (n, t), total in zip(tensors.items(), checksums.results(), strict=True)}

    def _flashrl_receive(self, step: int, timeout_s: float, self_check: bool, use_shm: bool) -> dict:
        model, model_config = self.model_runner.model, self.model_runner.vllm_config.model_config
        if self._flashrl_refit is None:
            self._flashrl_refit = WeightRefit(model, model_config, self.device)
        refit, stale = self._flashrl_refit, []
        if self_check:
            stale = layers_with_stale_copies(
                model, lambda: process_weights_after_loading(model, model_config, self.device)
            )
        refit.begin(step)
        receiver = WatchedReceiver(
            zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm, timeout_s=timeout_s
        )
        receiver.receive_weights(on_bucket_received=lambda weights, is_last: refit.load(weights))
        report = refit.finish()
        if stale:
            raise ValueError(
                f"self-check: {len(stale)} layers compute with a stale copy of their weights: {listed(stale)}. "
                "Set flashrl.precision=bf16 to see whether quantization is at fault, and check `flashrl version`"
            )
        return report
