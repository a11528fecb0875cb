# SPDX-License-Identifier: Apache-2.0
"""How a configuration differs from verl's defaults."""

from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.initialize import get_gh_backup, restore_gh_from_backup
from omegaconf import DictConfig, OmegaConf

from flashrl_verl.errors import words
from flashrl_verl.upstream.versions import require, verl_configs


def report(cfg: DictConfig) -> str:
    """A table with one line for each key that differs from verl's defaults."""
    rows = difference(cfg, verl_defaults(OmegaConf.select(cfg, "model_engine", default="dp")))
    return f"# Difference to verl's defaults: {len(rows)} keys\n{table(rows)}\n"


def verl_defaults(model_engine: str = "dp") -> DictConfig:
    """The configuration that ``python -m verl.trainer.main_ppo`` sees without an override.

    Args:
        model_engine: verl's training engine: dp (FSDP), megatron, veomni or torchtitan.

    Raises:
        ConfigError: verl is not installed.
    """
    require("verl")
    state = get_gh_backup()  # Hydra keeps one state per process, and a dry run is inside hydra.main
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(verl_configs().resolve()), version_base=None):
            return compose("ppo_trainer", overrides=[f"model_engine={model_engine}"])
    finally:
        restore_gh_from_backup(state)


def difference(ours: DictConfig, defaults: DictConfig) -> list[tuple[str, str, str]]:
    """Rows of (key, verl's default, our value), in the order of our configuration; "-" where verl has no such key.

    A key differs where what is *written* differs, so that a value which verl derives from a changed one is not
    repeated. Shown are *resolved* values.
    """
    written, default = leaves(ours, resolve=False), leaves(defaults, resolve=False)
    shown, shown_default = leaves(ours, resolve=True), leaves(defaults, resolve=True)
    return [
        (key, words(shown_default.get(key, default.get(key, "-"))), words(shown.get(key, value)))
        for key, value in written.items()
        if key not in default or default[key] != value
    ]


def table(rows: list[tuple[str, str, str]]) -> str:
    """The rows as aligned text, one a line."""
    rows = [("key", "verl's default", "this run"), *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "".join(f"{key:<{widths[0]}}  {old:<{widths[1]}}  {new}\n" for key, old, new in rows)


def leaves(cfg: DictConfig, resolve: bool) -> dict[str, Any]:
    """Scalars, lists and empty nodes by dotted key."""

    def visit(prefix: str, node: Any) -> dict[str, Any]:
        if not (isinstance(node, dict) and node):
            return {prefix: node}
        found = {}
        for key, value in node.items():
            found |= visit(f"{prefix}.{key}" if prefix else str(key), value)
        return found

    return visit("", OmegaConf.to_container(cfg, resolve=resolve))
