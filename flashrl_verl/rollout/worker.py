# SPDX-License-Identifier: Apache-2.0
"""vLLM worker extension: receives a weight update inside the engine process and reports what it did."""

import torch
from verl.utils.device import get_device_name
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase

from flashrl_verl.quantization.parameter import QuantizedStorage
from flashrl_verl.rollout.head_probe import head_dtype
from flashrl_verl.rollout.kv_scales import kv_cache_state
from flashrl_verl.rollout.padded_vocab import PaddedVocabularyMeter
from flashrl_verl.rollout.post_process import PostProcess
from flashrl_verl.rollout.receipt import checksum, to_host
from flashrl_verl.rollout.refit import WeightRefit
from flashrl_verl.rollout.transfer import DrainingReceiver


class FlashRLWorkerExtension(vLLMColocateWorkerExtension):
    """Mixed into vLLM's worker by ``worker_extension_cls``. Methods return plain data: they cross process borders."""

    _flashrl_refit: WeightRefit | None = None
    _flashrl_meter: PaddedVocabularyMeter | None = None

    def monkey_patch_model(self, vocab_size: int, banned_token_ids: list[int] | None = None) -> None:
        """verl's mask of tokens past the tokenizer; measures first how much probability it takes away."""
        self._flashrl_meter = PaddedVocabularyMeter.attach(
            self.model_runner.model, self.model_runner.vllm_config.model_config.get_vocab_size(), vocab_size
        )
        super().monkey_patch_model(vocab_size, banned_token_ids)

    def flashrl_layers(self) -> dict:
        """What this worker's model is, read off its modules and storage.

        Returns:
            precision of the engine's quantization config; quantized weights by kind (a linear layer has one, a layer of
            experts two); number and names of the quantized layers; name and class of the others, which of them the user kept,
            and numbers of decoder layers kept whole; entries of ``flashrl.ignore`` that matched nothing; dtype in which the
            logits are computed; bytes of quantized weights (codes and scales), what they would be in BF16, and of all
            parameters; the KV cache (``kv_cache_state``).
        """
        model = self.model_runner.model
        config = self.model_runner.vllm_config.quant_config
        quantized_bytes = bf16_bytes = 0
        quantized: dict[str, int] = {}
        unquantized: dict[str, str] = {}
        names: list[str] = []
        for name, module in model.named_modules():
            if not isinstance(module, LinearBase | RoutedExperts):
                continue
            # The runner around the experts is what the model, and the user, calls by name.
            name = module.layer_name if isinstance(module, RoutedExperts) else name
            storages = [p for p in module.parameters(recurse=False) if isinstance(p, QuantizedStorage)]
            if not storages:
                unquantized[name] = type(module).__name__
                continue
            names.append(name)
            for storage in storages:
                quantized[storage.kind] = quantized.get(storage.kind, 0) + 1
                quantized_bytes += storage.numel() * storage.element_size() + storage.scales.numel() * 4
                bf16_bytes += storage.numel() * 2
        precision = getattr(config, "precision", None)
        selection = getattr(config, "selection", None)
        return {
            "precision": precision.value if precision is not None else str(config),
            "quantized": quantized,
            "quantized_layers": len(names),
            "quantized_names": names,
            "unquantized_layers": unquantized,
            "kept_layers": selection.kept if selection is not None else [],
            "kept_numbers": selection.kept_numbers if selection is not None else [],
            "ignore_unused": selection.unused() if selection is not None else [],
            "head_dtype": self._flashrl_head_dtype(),
            "quantized_bytes": quantized_bytes,
            "quantized_bytes_as_bf16": bf16_bytes,
            "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
            "kv_cache": kv_cache_state(model, self.model_runner.compilation_config.static_forward_context),
        }

    def _flashrl_head_dtype(self) -> str:
        config = self.model_runner.vllm_config.model_config
        model = self.model_runner.model
        found = head_dtype(model, config.get_hidden_size(), config.dtype, next(model.parameters()).device)
        self.flashrl_forget_padded_vocab_mass()  # of hidden states that mean nothing
        return found

    def flashrl_receipt(self) -> dict:
        """The receipt of the last whole update; empty when there was none or the last one failed."""
        return dict(self._flashrl_refit.last_receipt) if self._flashrl_refit is not None else {}

    def flashrl_restore_kv_scales(self) -> None:
        """After vLLM's ``wake_up`` of the KV cache (``KVScales.restore``)."""
        if self._flashrl_refit is not None:
            self._flashrl_refit.kv_scales.restore()

    def flashrl_kv_scales(self) -> dict[str, float] | None:
        """The scales that attention uses now (``KVScales.live``)."""
        return self._flashrl_refit.kv_scales.live() if self._flashrl_refit is not None else None

    def flashrl_digest(self) -> dict[str, tuple[int, int]]:
        """Checksum and address of every parameter and buffer."""
        model = self.model_runner.model
        tensors = {n: t for n, t in [*model.named_parameters(), *model.named_buffers()] if t.numel()}
        # Bytes: a checksum takes 16-bit words, and buffers have any dtype.
        sums = to_host([checksum(t.data.contiguous().view(-1).view(torch.uint8)) for t in tensors.values()])
        return {name: (s, t.data_ptr()) for (name, t), s in zip(tensors.items(), sums, strict=True)}

    def flashrl_forget_padded_vocab_mass(self) -> None:
        """Leave what was sampled so far out of ``flashrl_padded_vocab_mass``."""
        if self._flashrl_meter is not None:
            self._flashrl_meter.reset()

    def flashrl_padded_vocab_mass(self) -> float:
        """Largest mean probability mass past the tokenizer, over the forward passes sampled since the last update."""
        return self._flashrl_meter.mass() if self._flashrl_meter is not None else 0.0

    def flashrl_tensor(self, name: str) -> tuple[str, list]:
        """Dtype and values of one vLLM parameter on this worker, for inspection and tests; do not call it on large ones."""
        tensor = dict(self.model_runner.model.named_parameters())[name].data
        return str(tensor.dtype), tensor.float().cpu().tolist()

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
            flashrl: step, checksum stride and time-out of this update, and whether to poison the weights first.

        Returns:
            ``WeightRefit.finish``'s report with ``error`` None, or only ``error`` set.
        """
        try:
            return {"error": None, **self._receive(peft_config, use_shm, flashrl)}
        except Exception as error:  # noqa: BLE001 - becomes a RefitError on the trainer's side
            return {"error": f"{type(error).__name__}: {error}"}

    def _receive(self, peft_config: dict | None, use_shm: bool, flashrl: dict | None) -> dict:
        if peft_config:
            raise ValueError("LoRA adapters cannot be loaded into this rollout; set actor_rollout_ref.model.lora.merge=True")
        if flashrl is None:
            raise ValueError("the update came from an adapter other than flashrl's; set actor_rollout_ref.rollout.name=flashrl")
        if self.device is None:
            self.device = torch.device(get_device_name())
        if self._flashrl_refit is None:
            model, model_config = self.model_runner.model, self.model_runner.vllm_config.model_config
            self._flashrl_refit = WeightRefit(model)
            self._flashrl_post_process = PostProcess(model, model_config, self.device)
        refit = self._flashrl_refit
        refit.begin(flashrl["step"], flashrl["stride"])
        deaf: list[str] = []
        if flashrl.get("poison"):
            deaf = refit.poison(self._flashrl_post_process)
        receiver = DrainingReceiver(
            zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm, timeout_s=flashrl["timeout_s"]
        )
        receiver.drain(refit.load)
        report = refit.finish(self._flashrl_post_process)
        if deaf:
            raise ValueError(
                f"self-check: {len(deaf)} layers compute with something that does not follow their weights: "
                f"{', '.join(deaf[:8])}. Set flashrl.precision=bf16 to see whether quantization is at fault, and check "
                "`flashrl version`"
            )
        self.flashrl_forget_padded_vocab_mass()
        return report
