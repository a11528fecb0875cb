# SPDX-License-Identifier: Apache-2.0
"""verl's ``algorithm.rollout_correction`` node, typed and checked: what the weights cover, how they are bounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from flashrl_verl.errors import ConfigError

KEY = "algorithm.rollout_correction"


class Level(str, Enum):
    """What one importance weight covers."""

    TOKEN = "token"
    SEQUENCE = "sequence"


@dataclass(frozen=True, kw_only=True)
class CorrectionSettings:
    """How rollout tokens are weighted: verl's `algorithm.rollout_correction`, typed and validated."""

    level: Level | None
    """One weight per token, one per response, or None: no weights, only the off-policy metrics."""
    upper: float = 2.0
    """The cap C on a weight (ratio of probabilities, > 0)."""
    lower: float | None = None
    """None: cap at `upper` (TIS). In (0, upper]: zero the weights outside [lower, upper] (IcePop)."""
    batch_normalize: bool = False
    """Divide the weights by their mean over the whole batch."""

    @classmethod
    def from_config(cls, node: Mapping[str, Any] | None) -> CorrectionSettings:
        """Reads the keys of verl's `RolloutCorrectionConfig` from a dict, an OmegaConf node or the dataclass.

        Raises:
            ConfigError: the node is null, a value is out of range, or the actor cannot do what it asks for.
        """
        if node is None:
            raise ConfigError(
                "actor_rollout_ref.actor.policy_loss.rollout_correction=null, where the actor expects the "
                f"weights' settings. Set it to ${{{KEY}}}; for no weights set {KEY}.rollout_is=null."
            )
        if node.get("rollout_rs") is not None:
            raise ConfigError(
                f"{KEY}.rollout_rs={node.get('rollout_rs')!r}: the flashrl actor only weights tokens. "
                f"Leave {KEY}.rollout_rs=null; {KEY}.rollout_is_threshold='0.5_5.0' (IcePop) zeroes outliers."
            )
        if node.get("bypass_mode"):
            raise ConfigError(
                f"{KEY}.bypass_mode=true takes the rollout's log-probs for the trainer's: every weight would "
                f"be 1 and the quantization error uncorrected. Set {KEY}.bypass_mode=false."
            )
        level = node.get("rollout_is")
        if level is None:  # the threshold, often null too, has nothing to act on
            return cls(level=None)
        if level not in {member.value for member in Level}:
            raise ConfigError(f"{KEY}.rollout_is={level!r} is none of token, sequence, null.")
        upper, lower = _parse_threshold(node.get("rollout_is_threshold", cls.upper))
        normalize = bool(node.get("rollout_is_batch_normalize", cls.batch_normalize))
        return cls(level=Level(level), upper=upper, lower=lower, batch_normalize=normalize)

    @property
    def threshold(self) -> float | str:
        """The bounds as verl spells them: 2.0, or '0.5_5.0'."""
        return self.upper if self.lower is None else f"{self.lower!r}_{self.upper!r}"


def _parse_threshold(spec: Any) -> tuple[float, float | None]:
    """Reads verl's threshold, 2.0 or '2.0' or 'lower_upper', as (upper, lower)."""
    try:
        bounds = [float(part) for part in str(spec).split("_", 1)]
    except ValueError:
        bounds = []
    if not bounds or not 0 < bounds[0] <= bounds[-1]:  # false for NaN, too
        raise ConfigError(
            f"{KEY}.rollout_is_threshold={spec!r} is neither a positive number (TIS: the cap) nor "
            "'lower_upper' with 0 < lower <= upper (IcePop). Usual: 2.0 with rollout_is=token."
        )
    return bounds[-1], bounds[0] if len(bounds) == 2 else None
