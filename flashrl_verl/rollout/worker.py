# SPDX-License-Identifier: Apache-2.0
"""What verl and this package's server ask of vLLM's worker. Methods return plain data: they cross process borders."""

from flashrl_verl.refit.receiver import WeightReceiver
from flashrl_verl.rollout.inspection import describe_model


class FlashRLWorkerExtension(WeightReceiver):
    """Mixed into vLLM's worker by ``worker_extension_cls``."""

    def flashrl_layers(self) -> dict:
        """``describe_model`` of this worker's model."""
        return describe_model(self.model_runner)
