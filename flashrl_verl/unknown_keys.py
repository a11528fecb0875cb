# SPDX-License-Identifier: Apache-2.0
"""What an override was meant to be whose key the configuration does not have.

Hydra names the key and offers to add it with a ``+``, with which a misspelt one would be a new one that nobody reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

NEAR = 0.75
"""Least ratio of ``difflib`` that makes two keys a misspelling of each other."""


def hints(words: Sequence[str], directory: Path, name: str) -> list[str]:
    """Look at the words of a command line that Hydra has refused.

    Args:
        words: of the command line, Hydra's own options among them.
        directory: of the configuration.
        name: of the configuration's file, without ``.yaml``.

    Returns:
        A line for every key that is not there but is near one that is; empty where the reason was another.
    """
    overrides = _parsed(word for word in words if not word.startswith("-"))
    GlobalHydra.instance().clear()
    known = known_keys(directory, name, [word for word, key in overrides if "." not in key])
    found = []
    for _, key in overrides:
        if "." in key and key not in known and (meant := near(key, known)):
            found.append(f"There is no {key}. Did you mean {meant}? With a + it would be a new key that nothing reads.")
    return found


def known_keys(directory: Path, name: str, groups: Sequence[str], always: Sequence[str] = ()) -> list[str]:
    """Every dotted key of a configuration, of nodes too.

    Args:
        directory: of the configuration.
        name: of its file, without ``.yaml``.
        groups: overrides that choose files; left out if they are refused themselves.
        always: overrides without which it cannot be composed.

    Returns:
        The keys; empty where it cannot be composed at all.
    """
    with initialize_config_dir(str(directory.resolve()), version_base=None):
        for chosen in ([*always, *groups], always):
            try:
                return _keys(compose(name, overrides=list(chosen)))
            except HydraException:
                continue
    return []


def near(key: str, known: Sequence[str]) -> str | None:
    """The key that one was meant to be, if there is one so near."""
    return next(iter(get_close_matches(key, known, n=1, cutoff=NEAR)), None)


def _parsed(words: Iterable[str]) -> list[tuple[str, str]]:
    """Words that change a key which has to be there, with it; what cannot be parsed is Hydra's to say."""
    parser, found = OverridesParser.create(), []
    for word in words:
        try:
            override = parser.parse_override(word)
        except HydraException:
            continue
        if not (override.is_add() or override.is_force_add() or override.is_delete()):
            found.append((word, override.key_or_group.replace("/", ".")))
    return found


def _keys(cfg: DictConfig) -> list[str]:
    found: list[str] = []

    def visit(prefix: str, node: object) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                found.append(f"{prefix}{key}")
                visit(f"{prefix}{key}.", value)

    visit("", OmegaConf.to_container(cfg, resolve=False))
    return found
