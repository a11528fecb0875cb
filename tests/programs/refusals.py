# SPDX-License-Identifier: Apache-2.0
"""A configuration with some settings changed, and the one message by which it is refused."""

import copy
import functools
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from flashrl_verl.errors import ConfigError
from flashrl_verl.settings import ROLLOUT
from flashrl_verl.tools.recipe_process import compose
from flashrl_verl.validation import validate_config

ENGINE = f"{ROLLOUT}.engine_kwargs.vllm"


@functools.cache
def base(hardware: str) -> DictConfig:
    """The base experiment on cuda or cpu; not to be changed."""
    return compose(["experiment=base", f"hardware={hardware}"])


def changed(settings: dict[str, Any], hardware: str = "cuda") -> DictConfig:
    """Base with some keys set to other values, as overrides with + or without would."""
    cfg = copy.deepcopy(base(hardware))
    for key, value in settings.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    return cfg


def refusal(cfg: DictConfig) -> str:
    """The message, which is one line."""
    with pytest.raises(ConfigError) as caught:
        validate_config(cfg)
    message = str(caught.value)
    assert "\n" not in message
    return message
