# SPDX-License-Identifier: Apache-2.0
"""A configuration with some settings changed, and the one message by which it is refused."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from flashrl_verl.errors import ConfigError
from flashrl_verl.validation import validate_config

ROOT = Path(__file__).resolve().parents[2]
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
ENGINE = f"{ROLLOUT}.engine_kwargs.vllm"
CORRECTION = "algorithm.rollout_correction"
ENV = "ray_kwargs.ray_init.runtime_env.env_vars"

Case = tuple[dict[str, Any], str, str]
"""Settings, the value as the message states it, and the remedy."""


def composed(*overrides: str) -> DictConfig:
    """The recipe's configuration."""
    with initialize_config_dir(str(ROOT / "recipe" / "flashrl" / "config"), version_base=None):
        return compose("flashrl_trainer", overrides=list(overrides))


@functools.cache
def base(hardware: str) -> DictConfig:
    """The base experiment on cuda or cpu; not to be changed."""
    return composed("experiment=base", f"hardware={hardware}")


def changed(settings: dict[str, Any], hardware: str = "cuda") -> DictConfig:
    """Base with some keys set to other values, as overrides with + or without would."""
    cfg = copy.deepcopy(base(hardware))
    for key, value in settings.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    return cfg


def names(cases: list[Case]) -> list[str]:
    """What pytest calls them."""
    return [",".join(f"{key}={value}" for key, value in case[0].items()) for case in cases]


def refusal(cfg: DictConfig) -> str:
    """The message, which is one line."""
    with pytest.raises(ConfigError) as caught:
        validate_config(cfg)
    message = str(caught.value)
    assert "\n" not in message
    return message


def assert_refused(settings: dict[str, Any], value: str, remedy: str, hardware: str = "cuda") -> None:
    """The message states the value before the remedy."""
    stated, _, suggested = refusal(changed(settings, hardware)).partition(" Remedy: ")
    assert " is refused: " in stated and value in stated
    assert remedy in suggested
