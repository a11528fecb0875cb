# SPDX-License-Identifier: Apache-2.0
"""The recipe: the configuration that it sees, and where and in which environment a process of its own starts it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from flashrl_verl.errors import ConfigError
from flashrl_verl.settings import RENAMED
from flashrl_verl.upstream.versions import require, verl_configs
from flashrl_verl.validation import GROUPS

ROOT = Path(__file__).resolve().parents[2]
"""The checkout: the recipe is not part of the installed package."""

MODULE = "recipe.flashrl.main_flashrl"
"""What ``python -m`` runs, started in ``ROOT``."""


def environment(metrics: Path) -> dict[str, str]:
    """Variables of a run that logs to ``metrics``, has a Ray of its own and asks no network."""
    env = {name: value for name, value in os.environ.items() if name != "RAY_JOB_ADDRESS"}
    return env | {
        "RAY_ADDRESS": "local",  # left out, it would be the cluster that `ray start` has made on this machine
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray gives up after 30 s, which a laptop with other work may need to start it.
        "RAY_raylet_start_wait_time_s": os.environ.get("RAY_raylet_start_wait_time_s", "120"),
        "VLLM_NO_USAGE_STATS": "1",
    }


def compose(overrides: Sequence[str]) -> DictConfig:
    """The configuration that the recipe will see.

    Raises:
        ConfigError: verl or the recipe is not there, or Hydra refuses an override.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    require("verl")
    configs = ROOT / "recipe" / "flashrl" / "config"
    if not configs.is_dir():
        raise ConfigError(
            f"{configs} is not there. This runs from a checkout: pip install --no-deps -e . and try again."
        )
    # As a path: resolving pkg://verl.trainer.config would import verl and torch.
    searchpath = f"hydra.searchpath=[{quoted(f'file://{verl_configs()}')},pkg://flashrl_verl.configs]"
    try:
        with initialize_config_dir(str(configs), version_base=None):
            return hydra_compose("flashrl_trainer", [searchpath, *map(at_home, overrides)])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(hydra_message(error)) from error


def at_home(word: str) -> str:
    """An override whose value starts with ``~/``, with what a shell makes of that where a word begins."""
    return word.replace("=~/", f"={Path.home()}/", 1)


def hydra_message(error: Exception) -> str:
    """What Hydra has against a command line, in one line, with the name that was meant."""
    said, cause = str(error).partition("\nConfig search path:")[0], error.__cause__
    if isinstance(cause, ConfigAttributeError | ConfigKeyError):  # the first name on the way that is not there
        parent = cause.full_key.rpartition(".")[0]
        near = get_close_matches(str(cause.key), [*map(str, cause.parent_node or ()), *(() if parent else GROUPS)])
        meant = f"{parent}.{near[0]}".lstrip(".") if near else "--cfg job prints all keys"
        meant = RENAMED.get(str(cause.key), meant)
        said = f"there is no key {cause.full_key}. Remedy: {meant}"
    elif word := re.match(r"Error parsing override '(.*)'\s+missing EQUAL", said):
        said = f"{word[1]} is no key=value. Remedy: one such as trainer.nnodes=1, or experiment=NAME"
    elif cause is not None:
        said += f": {cause}"
    return f"Hydra refuses the command line: {' '.join(said.split())}"


def quoted(text: str) -> str:
    """A string in Hydra's override grammar, whatever is in it."""
    return "'" + text.replace("'", r"\'") + "'"
