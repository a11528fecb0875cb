# SPDX-License-Identifier: Apache-2.0
"""What verl and this package's server ask of vLLM's worker: take a weight update, and say what it holds."""

import logging
from collections.abc import Callable

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.utils import process_weights_after_loading

from flashrl_verl.errors import listed
from flashrl_verl.quantization.numerics import as_bytes
from flashrl_verl.quantization.parameter import QuantizedStorage
from flashrl_verl.refit.load import WeightRefit
from flashrl_verl.refit.receipt import brief
from flashrl_verl.refit.scan import Checksums
from flashrl_verl.refit.transfer import WatchedReceiver
from flashrl_verl.rollout.inspection import describe_model

logger = logging.getLogger(__name__)


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
        except Exception as error:  # becomes a RefitError on the trainer's side
            logger.exception("[flashrl] a weight update failed")  # of another rank than the first nobody is told
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
            if hasattr(model_config, mark := "word_embeddings_untied_by_checkpoint"):  # not in vLLM 0.24
                # Else vLLM ties a head again, for good, while the self-check has both filled alike.
                setattr(model_config, mark, False)
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


def layers_with_stale_copies(model: torch.nn.Module, process_weights: Callable[[], None]) -> list[str]:
    """Names of layers whose output does not change when all their weights (or scales) go from 1 to 2: they compute with
    something other than their parameters, a packed copy that an update does not make again.

    The same weights sent again would not show such a copy: it is a copy of them. Of codes and scales one may be copied
    while the other is read where it lies, so each is changed alone. (NaN would not tell that.) All weights are
    overwritten.

    Args:
        model: a vLLM model.
        process_weights: vLLM's post-processing of it.
    """
    products: list[dict[str, list[torch.Tensor]]] = []
    # Scales are parameters too: their weights come after them, and say what they are.
    stored = sorted(model.parameters(), key=lambda parameter: isinstance(parameter, QuantizedStorage))
    for value, scale in ((1.0, 1.0), (2.0, 1.0), (1.0, 2.0)):
        for parameter in stored:
            if isinstance(parameter, QuantizedStorage):
                code = torch.tensor(value).to(parameter.format.dtype)
                as_bytes(parameter.data).fill_(int(as_bytes(code)))
                parameter.scales.data.fill_(scale)
            elif parameter.is_floating_point() and parameter.dtype.itemsize > 1:
                parameter.data.fill_(value * scale)
        process_weights()
        products.append(_products(model))
    names, equal = [], []
    for name, ones in products[0].items():
        names.append(name)
        twos = [two for other in products[1:] for two in other[name]]
        equal.append(torch.stack([(a == b).any() for a, b in zip(ones * 2, twos, strict=True)]).any())
    return [name for name, stale in zip(names, torch.stack(equal).tolist(), strict=True) if stale]


def _products(model: torch.nn.Module) -> dict[str, list[torch.Tensor]]:
    """What every linear layer and a head of its own make of ones. A short convolution, for which vLLM takes a linear
    layer's class, is none: its weight has three dimensions."""
    found = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module, LinearBase | ParallelLMHead) and module.weight.dim() == 2:
            weight = module.weight
            dtype = module.flashrl_dtype if isinstance(weight, QuantizedStorage) else weight.dtype
            found[name] = [
                method.apply(module, torch.ones(1, weight.shape[1], dtype=dtype, device=weight.device), None)
            ]
    return found
