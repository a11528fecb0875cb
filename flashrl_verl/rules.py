# SPDX-License-Identifier: Apache-2.0
"""A rule about one key of the configuration, and the one way in which a broken rule is reported."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from omegaconf import DictConfig, OmegaConf

from flashrl_verl.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"


class Rule(NamedTuple):
    """One key that has to pass one test."""

    key: str
    test: Callable[[Any], bool]
    reason: str
    """Why a value that fails is refused; the end of a sentence that starts with the key and the value."""
    remedy: str
    """What to write instead, as Hydra overrides."""
    default: Any = None
    """What verl takes when the key is absent."""


def apply(cfg: DictConfig, rules: tuple[Rule, ...]) -> None:
    """Raise for the first rule that the configuration breaks.

    Args:
        cfg: verl's composed configuration.
        rules: The rules, in the order of their importance to a user.

    Raises:
        ConfigError: A rule is broken.
    """
    for rule in rules:
        value = get(cfg, rule.key, rule.default)
        if not rule.test(value):
            refuse(rule.key, value, rule.reason, rule.remedy)


def refuse(key: str, value: Any, reason: str, remedy: str) -> NoReturn:
    """Raise the error a user sees: value, reason and what to change, one line."""
    raise ConfigError(f"{key}={words(value)} is refused: {reason}. Remedy: {remedy}.")


def one_of(*accepted: Any) -> Callable[[Any], bool]:
    """Test for equality with one of the values; True is not 1 here, although Python says so."""
    return lambda value: any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in accepted)


def positive_integer(value: Any) -> bool:
    """Whether it counts something that there has to be one of; True is no number here either."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def get(cfg: DictConfig, key: str, default: Any = None) -> Any:
    """Select a dotted key; absent and null keys give the default, nodes come back as dict or list."""
    value = OmegaConf.select(cfg, key, default=default)
    value = default if value is None else value
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def words(value: Any) -> str:
    """Write a value the way a user writes it on Hydra's command line."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
