# SPDX-License-Identifier: Apache-2.0
"""verl's ``algorithm.rollout_correction`` node, typed and checked: levels and bounds of weights, rejection, bypass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

from flashrl_verl.errors import ConfigError, refuse
from flashrl_verl.settings import CORRECTION


class Level(str, Enum):
    """What one importance weight covers."""

    TOKEN = "token"
    SEQUENCE = "sequence"


class LossType(str, Enum):
    """The loss of bypass mode."""

    PPO_CLIP = "ppo_clip"
    """PPO's clipped objective with pi_theta / pi_rollout as its ratio; no weights besides."""
    REINFORCE = "reinforce"
    """Policy gradient, weighted by pi_theta / pi_rollout."""


RATIO_CRITERIA = ("token_k1", "seq_sum_k1", "seq_mean_k1")
DIVERGENCE_CRITERIA = (
    *("token_k2", "token_k3", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
)
"""verl's criteria: a token's estimate of the divergence, or its response's sum, mean or maximum, with
l = log(pi_old / pi_rollout): k1 is -l, k2 is l^2 / 2, k3 is e^l - 1 - l (Schulman 2020,
http://joschu.net/blog/kl-approx.html)."""


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """One criterion by which tokens or whole responses leave the loss."""

    option: str
    """One of the criteria above, as in ``rollout_rs``."""
    upper: float
    """k1: the largest ratio pi_rollout / pi_old that is kept (its geometric mean for ``seq_mean``); k2 and k3: the
    largest divergence; > 0."""
    lower: float | None = None
    """k1: the smallest ratio, > 0; None for k2 and k3, which are never negative."""


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
    rejections: tuple[Rejection, ...] = ()
    """A token stays in the loss if every one of them keeps it."""
    bypass: LossType | None = None
    """None: decoupled mode, where the trainer computes pi_old and `correct_shard` the weights. Otherwise pi_old is
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
            rejections=_parse_rejections(node.get("rollout_rs"), node.get("rollout_rs_threshold")),
            bypass=_parse_loss_type(node.get("loss_type")) if node.get("bypass_mode") else None,
        )

    @property
    def threshold(self) -> str:
        """The bounds of a weight as verl spells them: '2.0', or '0.5_5.0'."""
        return _spell(self.lower, self.upper)

    @property
    def rejection_options(self) -> str:
        """The criteria as verl spells them: 'token_k1,seq_mean_k3'."""
        return ",".join(rejection.option for rejection in self.rejections)

    @property
    def rejection_thresholds(self) -> str:
        """Their bounds as verl spells them: '0.5_2.0,0.02'."""
        return ",".join(_spell(rejection.lower, rejection.upper) for rejection in self.rejections)


def _spell(lower: float | None, upper: float) -> str:
    return repr(upper) if lower is None else f"{lower!r}_{upper!r}"


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


def _parse_rejections(options: Any, thresholds: Any) -> tuple[Rejection, ...]:
    """Reads verl's comma-separated criteria and their thresholds: one for all, or one for each that differs."""
    if options is None:
        return ()
    names = list(dict.fromkeys(name.strip() for name in str(options).split(",") if name.strip()))
    known = (*RATIO_CRITERIA, *DIVERGENCE_CRITERIA)
    if not names or not set(names) <= set(known):
        key, reason = f"{CORRECTION}.rollout_rs", f"it is not a list, with commas, of {', '.join(known)}"
        refuse(key, options, reason, f"correction=geo_rs, or {key}=null for no rejection")
    specs = [] if thresholds is None else [spec.strip() for spec in str(thresholds).split(",") if spec.strip()]
    if len(specs) not in (1, len(names)):
        _refuse_rejection_threshold(thresholds, f"{len(names)} criteria take 1 or {len(names)} thresholds, with commas")
    specs = specs * len(names) if len(specs) == 1 else specs
    return tuple(_parse_rejection(name, spec) for name, spec in zip(names, specs, strict=True))


def _parse_rejection(option: str, spec: str) -> Rejection:
    ratios, bounds = option in RATIO_CRITERIA, _bounds(spec)
    if ratios and len(bounds) == 1 and bounds[0] >= 1:
        bounds = [1.0 / bounds[0], bounds[0]]
    if len(bounds) != 1 + ratios:
        kind = (
            "ratios lower_upper with 0 < lower <= upper, or an upper one of at least 1"
            if ratios
            else "one positive number"
        )
        _refuse_rejection_threshold(spec, f"{option} takes {kind}")
    return Rejection(option=option, upper=bounds[-1], lower=bounds[0] if ratios else None)


def _refuse_rejection_threshold(value: Any, reason: str) -> NoReturn:
    key = f"{CORRECTION}.rollout_rs_threshold"
    refuse(key, value, reason, f'{key}="0.999_1.001" (with seq_mean_k1) or {key}=0.01 (with seq_mean_k3)')


def _parse_loss_type(value: Any) -> LossType:
    try:
        return LossType.PPO_CLIP if value is None else LossType(value)
    except ValueError:
        key = f"{CORRECTION}.loss_type"
        refuse(key, value, "it is not a loss of bypass mode", f"{key}=ppo_clip or reinforce")
