# SPDX-License-Identifier: Apache-2.0
"""How a configuration differs from verl's defaults."""

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.initialize import get_gh_backup, restore_gh_from_backup
from omegaconf import DictConfig, OmegaConf

from flashrl_verl.errors import words
from flashrl_verl.settings import leaves
from flashrl_verl.upstream.versions import require, verl_configs


def report(cfg: DictConfig) -> str:
    """A table with one line for each key that differs from verl's defaults."""
    rows = [("key", "verl's default", "this run"), *difference(cfg, verl_defaults())]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = (f"{key:<{widths[0]}}  {old:<{widths[1]}}  {new}\n" for key, old, new in rows)
    return f"# Difference to verl's defaults: {len(rows) - 1} keys\n{''.join(lines)}\n"


def verl_defaults() -> DictConfig:
    """The configuration that ``python -m verl.trainer.main_ppo`` sees without an override.

    Raises:
        ConfigError: verl is not installed.
    """
    require("verl")
    state = get_gh_backup()  # Hydra keeps one state per process, and a dry run is inside hydra.main
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(verl_configs().resolve()), version_base=None):
            return compose("ppo_trainer")
    finally:
        restore_gh_from_backup(state)


def difference(ours: DictConfig, defaults: DictConfig) -> list[tuple[str, str, str]]:
    """Rows of (key, verl's default, our value), in the order of our configuration; "-" where verl has no such key.

    A key differs where what is *written* differs, so that a value which verl derives from a changed one is not
    repeated. Shown are *resolved* values.
    """
    (written, shown), (default, shown_default) = (
        [leaves(OmegaConf.to_container(cfg, resolve=resolve)) for resolve in (False, True)] for cfg in (ours, defaults)
    )
    return [
        (key, words(shown_default.get(key, default.get(key, "-"))), words(shown.get(key, value)))
        for key, value in written.items()
        if key not in default or default[key] != value
    ]
