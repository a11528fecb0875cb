# SPDX-License-Identifier: Apache-2.0
"""verl platforms that this package adds, and the one place that selects one."""

import os

from omegaconf import DictConfig

from flashrl_verl.errors import ConfigError

PLATFORM_VARIABLE = "VERL_PLATFORM"
"""verl's own variable; it reads no configuration key for its platform."""


def activate(config: DictConfig) -> None:
    """Make this process (the driver) use the platform that ``trainer.device`` names.

    Ray's workers get theirs from ``ray_kwargs.ray_init.runtime_env.env_vars`` (``hardware=cpu`` sets both). Call it
    after the configuration is composed and before verl's trainer modules are imported.

    Raises:
        ConfigError: the environment already names another platform.
    """
    if config.trainer.device != "cpu":
        return
    chosen = os.environ.setdefault(PLATFORM_VARIABLE, "cpu")
    if chosen != "cpu":
        raise ConfigError(
            f"trainer.device=cpu, but {PLATFORM_VARIABLE}={chosen} is set in the environment; unset it or choose "
            "hardware=cuda"
        )
    from verl.plugin.platform import get_platform

    if get_platform().device_name != "cpu":
        raise ConfigError(
            f"verl had already chosen the platform {get_platform().device_name!r} before the configuration was read; "
            f"set {PLATFORM_VARIABLE}=cpu in the environment of this command"
        )
