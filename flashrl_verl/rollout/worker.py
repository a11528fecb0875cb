# SPDX-License-Identifier: Apache-2.0
"""What verl and this package's server ask of vLLM's worker. Methods return plain data: they cross process borders."""

from flashrl_verl.refit.receiver import WeightReceiver
from flashrl_verl.rollout.inspection import describe_model
from flashrl_verl.rollout.padded_vocab import PaddedVocabularyMeter


class FlashRLWorkerExtension(WeightReceiver):
    """Mixed into vLLM's worker by ``worker_extension_cls``."""

    _flashrl_meter: PaddedVocabularyMeter | None = None

    def monkey_patch_model(self, vocab_size: int, banned_token_ids: list[int] | None = None) -> None:
        """verl's mask of tokens past the tokenizer; measures first how much probability it takes away."""
        self._flashrl_meter = PaddedVocabularyMeter.attach(
            self.model_runner.model, self.model_runner.vllm_config.model_config.get_vocab_size(), vocab_size
        )
        super().monkey_patch_model(vocab_size, banned_token_ids)

    def update_weights_from_ipc(self, *args, **kwargs) -> dict:
        """``WeightReceiver``'s; what is sampled from now on is measured anew."""
        report = super().update_weights_from_ipc(*args, **kwargs)
        self.flashrl_forget_padded_vocab_mass()
        return report

    def flashrl_layers(self) -> dict:
        """``describe_model`` of this worker's model."""
        found = describe_model(self.model_runner)
        self.flashrl_forget_padded_vocab_mass()  # of a probe whose hidden states mean nothing
        return found

    def flashrl_forget_padded_vocab_mass(self) -> None:
        """Leave what was sampled so far out of ``flashrl_padded_vocab_mass``."""
        if self._flashrl_meter is not None:
            self._flashrl_meter.reset()

    def flashrl_padded_vocab_mass(self) -> float:
        """Largest mean probability mass past the tokenizer, over the forward passes sampled since the last update."""
        return self._flashrl_meter.mass() if self._flashrl_meter is not None else 0.0
