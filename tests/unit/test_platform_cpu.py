# SPDX-License-Identifier: Apache-2.0
"""The CPU platform is used when it is chosen. The runs of test_recipe.py train on it."""

import pytest
from omegaconf import OmegaConf

from flashrl_verl.errors import ConfigError
from flashrl_verl.platforms import activate


def test_a_config_for_the_cpu_contradicting_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "nvidia")
    activate(OmegaConf.create({"trainer": {"device": "cuda"}}))
    with pytest.raises(ConfigError, match="unset it or choose hardware=cuda"):
        activate(OmegaConf.create({"trainer": {"device": "cpu"}}))
