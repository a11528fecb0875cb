# SPDX-License-Identifier: Apache-2.0
"""FlashRL's worker extension with a look at the storage: what runs in an engine's processes when there are several."""

from pathlib import Path

from safetensors.torch import save_file

from flashrl_verl.rollout.worker import FlashRLWorkerExtension


class InspectedWorker(FlashRLWorkerExtension):
    def save_storage(self, folder: str) -> None:
        """Write every parameter of this worker's model, as it is, to ``folder/<rank>.safetensors``."""
        stored = {name: p.data.cpu().contiguous() for name, p in self.model_runner.model.named_parameters()}
        save_file(stored, Path(folder) / f"{self.rank}.safetensors")
