# SPDX-License-Identifier: Apache-2.0
"""What a run would do, without doing it: the resolved configuration and its difference to verl's defaults."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.initialize import get_gh_backup, restore_gh_from_backup
from omegaconf import DictConfig, OmegaConf

from flashrl_verl.errors import ConfigError

Difference = list[tuple[str, str, str]]
"""Rows of (key, verl's default, our value); "-" stands for a key that verl's configuration does not have."""

ABSENT = "-"


def verl_defaults(model_engine: str = "dp") -> DictConfig:
    """Compose verl's PPO configuration alone.

    Args:
        model_engine: verl's training engine group: dp (FSDP), megatron, veomni or torchtitan.

    Returns:
        The configuration that ``python -m verl.trainer.main_ppo`` would see without an override.

    Raises:
        ConfigError: verl is not installed.
    """
    verl = find_spec("verl")
    if verl is None or not verl.submodule_search_locations:
        raise ConfigError("verl is not installed; see recipe/flashrl/REQUIRED_VERL.txt.")
    directory = Path(verl.submodule_search_locations[0]) / "trainer" / "config"
    # Hydra keeps one state per process, and a dry run already is inside hydra.main.
    state = get_gh_backup()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(directory.resolve()), version_base=None):
            return compose("ppo_trainer", overrides=[f"model_engine={model_engine}"])
    finally:
        restore_gh_from_backup(state)


def difference(ours: DictConfig, defaults: DictConfig) -> Difference:
    """Compare two configurations leaf by leaf.

    A key is different when what is *written* differs, so values that verl derives from a changed one are not
    repeated; the columns show the *resolved* values, and a reference to a whole node as it is written.

    Args:
        ours: The composed configuration.
        defaults: The configuration it is compared to.

    Returns:
        The rows in the order of our configuration; keys that we removed come last.
    """
    written_ours, written_defaults = leaves(ours, resolve=False), leaves(defaults, resolve=False)
    resolved_ours, resolved_defaults = leaves(ours, resolve=True), leaves(defaults, resolve=True)
    removed = [
        key
        for key in written_defaults
        if key not in written_ours and not any(name.startswith(f"{key}.") for name in written_ours)
    ]  # an empty node that we filled is not removed
    rows = []
    for key in [*written_ours, *removed]:
        if key in written_ours and key in written_defaults and written_ours[key] == written_defaults[key]:
            continue
        columns = ((written_defaults, resolved_defaults), (written_ours, resolved_ours))
        rows.append((key, *(_show(resolved.get(key, written.get(key, ABSENT))) for written, resolved in columns)))
    return rows


def report(cfg: DictConfig) -> str:
    """Render the resolved configuration, then the difference to verl's defaults.

    Args:
        cfg: The composed configuration.

    Returns:
        Text for a terminal; its last part is a table with one line per changed key.
    """
    rows = difference(cfg, verl_defaults(OmegaConf.select(cfg, "model_engine", default="dp")))
    return (
        f"# Resolved configuration\n{OmegaConf.to_yaml(cfg, resolve=True)}\n"
        f"# Difference to verl's defaults: {len(rows)} keys\n{table(rows)}\n"
    )


def table(rows: Difference) -> str:
    """Render rows of (key, default, value) as aligned text, one line per row."""
    header = ("key", "verl's default", "this run")
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(2)]
    return "".join(f"{key:<{widths[0]}}  {old:<{widths[1]}}  {new}\n" for key, old, new in [header, *rows])


def leaves(cfg: DictConfig, resolve: bool) -> dict[str, Any]:
    """Map the dotted key of every scalar, list and empty node to its value."""
    leaves: dict[str, Any] = {}

    def visit(prefix: str, node: Any) -> None:
        if isinstance(node, dict) and node:
            for key, value in node.items():
                visit(f"{prefix}.{key}" if prefix else str(key), value)
        else:
            leaves[prefix] = node

    visit("", OmegaConf.to_container(cfg, resolve=resolve))
    return leaves


def _show(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_show(item) for item in value) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
