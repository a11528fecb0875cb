# SPDX-License-Identifier: Apache-2.0
"""verl's ``algorithm.rollout_correction`` node, typed and checked: levels and bounds of weights, rejection, bypass.

What rejects is handed to verl as it is written, and checked by ``validate_by_verl``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from flashrl_verl.errors import ConfigError, refuse
from flashrl_verl.settings import CORRECTION


class Level(StrEnum):
    """What one importance weight covers."""

    TOKEN = "token"
    SEQUENCE = "sequence"


@dataclass(frozen=True, kw_only=True)
class CorrectionSettings:
    """How rollout tokens are weighted and rejected: verl's `algorithm.rollout_correction`, typed and validated."""

    level: Level | None = None
    """One weight per token, one per response, or None: no weights; what is rejected and measured does not depend on
    it."""
    upper: float = 2.0
    """The cap C on a weight (ratio of probabilities, > 0)."""
    lower: float | None = None
    """None: cap at `upper` (TIS). In (0, upper]: zero the weights outside [lower, upper] (IcePop)."""
    batch_normalize: bool = False
    """Divide the weights by their mean over the whole batch."""
    rejections: str | None = None
    """verl's criteria, with commas between them: a token stays in the loss if every one of them keeps it."""
    rejection_thresholds: str | float | None = None
    """Their bounds as verl takes them: one for all, or one for each with commas."""
    bypass: bool = False
    """False: decoupled mode, where the trainer computes pi_old and `correct_shard` the weights. True: pi_old is
    pi_rollout, and verl's ``bypass_mode`` loss applies everything above to pi_theta / pi_rollout by itself."""

    @classmethod
    def from_config(cls, node: Mapping[str, Any] | None) -> CorrectionSettings:
        """Reads the keys of verl's `RolloutCorrectionConfig` from a dict, an OmegaConf node or the dataclass.

        Raises:
            ConfigError: the node is null, a value is out of range, or the values do not fit together.
        """
        if node is None:
            raise ConfigError(
                "actor_rollout_ref.actor.policy_loss.rollout_correction=null, where the actor expects the "
                f"weights' settings. Set it to ${{{CORRECTION}}}; for no weights set correction=none."
            )
        level = node.get("rollout_is")
        if level is not None and level not in [member.value for member in Level]:
            key = f"{CORRECTION}.rollout_is"
            refuse(key, level, "it is not a level of importance weights", f"{key}=token, sequence or null")
        # Without a level the threshold, often null too, has nothing to act on.
        upper, lower = (
            (cls.upper, None) if level is None else _parse_threshold(node.get("rollout_is_threshold", cls.upper))
        )
        return cls(
            level=None if level is None else Level(level),
            upper=upper,
            lower=lower,
            batch_normalize=level is not None and bool(node.get("rollout_is_batch_normalize", cls.batch_normalize)),
            rejections=node.get("rollout_rs"),
            rejection_thresholds=node.get("rollout_rs_threshold"),
            bypass=bool(node.get("bypass_mode")),
        )

    @property
    def threshold(self) -> str:
        """The bounds of a weight as verl spells them: '2.0', or '0.5_5.0'."""
        return repr(self.upper) if self.lower is None else f"{self.lower!r}_{self.upper!r}"


def _parse_threshold(spec: Any) -> tuple[float, float | None]:
    """Reads verl's threshold, 2.0 or '2.0' or 'lower_upper', as (upper, lower)."""
    bounds = _bounds(spec)
    if len(bounds) == 1 and bounds[0] < 1:
        reason = (
            "a cap below 1 shrinks tokens on which rollout and trainer agree (if IcePop's pair was meant: YAML reads "
            "0.5_5 as the number 0.55)"
        )
    elif spec is None:
        reason = f"without a threshold verl computes no weights although {CORRECTION}.rollout_is is set"
    elif not bounds:
        reason = "it is neither a positive number nor lower_upper with 0 < lower <= upper"
    elif bounds[-1] < 1 or (len(bounds) == 2 and bounds[0] > 1):
        reason = "its bounds leave out 1, so that tokens on which rollout and trainer agree are dropped"
    else:
        return bounds[-1], bounds[0] if len(bounds) == 2 else None
    key = f"{CORRECTION}.rollout_is_threshold"
    refuse(key, spec, reason, f'{key}=2.0 (a cap of at least 1), or "0.5_5.0" (IcePop: weights outside become 0)')


def _bounds(spec: Any) -> list[float]:
    """'2.0' or 'lower_upper' as one or two positive, finite numbers in order; nothing if it is neither."""
    try:
        bounds = [] if isinstance(spec, bool) else [float(part) for part in str(spec).split("_", 1)]
    except ValueError:
        return []
    return bounds if all(0 < bound < math.inf for bound in bounds) and bounds == sorted(bounds) else []
