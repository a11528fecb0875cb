# SPDX-License-Identifier: Apache-2.0
"""The settings of FlashRL: the node ``flashrl`` of the composed configuration, typed and checked.

It needs neither torch nor vLLM nor verl, so that a wrong setting is refused in seconds, on any machine.
Defaults live here; YAML files only choose.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from omegaconf import DictConfig, OmegaConf

from flashrl_verl.errors import ConfigError


class Precision(str, Enum):
    """Number format in which the rollout engine holds and multiplies the linear layers."""

    INT8 = "int8"
    """Weights INT8 per output channel, activations INT8 per token (W8A8), accumulated in INT32."""
    BF16 = "bf16"
    """No quantization: the baseline, on the same server and the same weight update."""


@dataclass(frozen=True, kw_only=True)
class FlashRLConfig:
    """Settings of the quantized rollout, its weight update and dynamic sampling.

    Raises:
        ConfigError: A value has the wrong type or is out of range; the message names ``flashrl.<key>``.
    """

    precision: Precision = Precision.INT8
    """Number format of the rollout engine's linear layers: int8 or bf16."""

    update_timeout_s: float = 60.0
    """Longest silence tolerated from the other side during a weight update, in seconds; above 0."""

    receipt_tensors: int = 64
    """Tensors per update whose checksum is compared, trainer against engine; at least 16 (fewer could miss a
    whole update), or -1 for all."""

    max_num_gen_batches: int = 10
    """Prompts that dynamic sampling may spend on a step, in units of data.train_batch_size; 0 is no bound."""

    padded_vocab_mass_limit: float = 1e-3
    """Probability mass on token ids past the tokenizer's last above which a run is refused; from 0 to 1."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", _precision(self.precision))
        for name, accepted in _ACCEPTED.items():
            value = getattr(self, name)
            if not accepted.test(value):
                raise ConfigError(f"flashrl.{name}={value!r} is not accepted. Set flashrl.{name} to {accepted.words}.")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "FlashRLConfig":
        """Read the ``flashrl`` node, or its copy under ``actor_rollout_ref.rollout.custom.flashrl``.

        Args:
            mapping: A plain dict or an OmegaConf node; keys that are left out take the default.

        Returns:
            The checked settings.

        Raises:
            ConfigError: A key is unknown, or a value has the wrong type or range.
        """
        if not isinstance(mapping, Mapping | DictConfig):
            raise ConfigError(
                f"flashrl={mapping!r} is not a node of settings. Set flashrl.precision to int8 or bf16, "
                "or add the whole node with experiment=base."
            )
        values = OmegaConf.to_container(mapping, resolve=True) if isinstance(mapping, DictConfig) else dict(mapping)
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                raise ConfigError(f"flashrl.{key} is not a setting of FlashRL. Remove it, or use one of {', '.join(known)}.")
        return cls(**values)


class _Accepted:
    """A test of a value, and the words that describe it to a user."""

    def __init__(self, kinds: tuple[type, ...], test: Any, words: str) -> None:
        self.kinds, self.range, self.words = kinds, test, words

    def test(self, value: Any) -> bool:
        # bool is an int in Python; `true` where a number is wanted is a mistake, not a 1.
        return isinstance(value, self.kinds) and not isinstance(value, bool) and self.range(value)


_ACCEPTED = {
    "update_timeout_s": _Accepted((int, float), lambda v: v > 0 and math.isfinite(v), "a finite number of seconds above 0"),
    "receipt_tensors": _Accepted((int,), lambda v: v == -1 or v >= 16, "an integer of at least 16, or -1 for all tensors"),
    "max_num_gen_batches": _Accepted((int,), lambda v: v >= 0, "an integer of at least 1, or 0 for no bound"),
    "padded_vocab_mass_limit": _Accepted((int, float), lambda v: 0 <= v <= 1, "a probability between 0 and 1"),
}


def _precision(value: Any) -> Precision:
    try:
        return Precision(value)
    except ValueError:
        later = " FP8 follows in a later version." if isinstance(value, str) and "fp8" in value.lower() else ""
        raise ConfigError(
            f"flashrl.precision={value!r} is not a precision of the rollout.{later} "
            "Set flashrl.precision to int8, or to bf16 for a run without quantization."
        ) from None
