# SPDX-License-Identifier: Apache-2.0
"""What an override was meant to be whose key or group the configuration does not have.

Hydra names the word and offers to add it with a ``+``. A misspelt key would then be a new one that nobody reads, a misspelt
group (``+corection=icepop``) a string at the top of a configuration that has no correction but the default.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flashrl_verl.errors import ConfigError

NEAR = 5 / 6
"""Least ratio of ``difflib`` that makes two names a misspelling of each other: one wrong letter in six.

The ratio is 2 M / T, with M letters in common and T letters in both. k wrong or swapped letters of n give (n - k) / n, k that
are left out 2 (n - k) / (2 n - k). So a swap is known in ``actoin`` (5/6) and a missing letter in ``gard`` (8/9), while
``n_sample`` (14/17) is not ``do_sample``. Names are compared between dots: a long path in common makes any two keys alike.
"""

GROUPS = ("precision", "correction", "hardware", "experiment")
"""Folders of ``flashrl_verl/configs``."""

SEARCHED = "hydra.searchpath"
"""Key of the override without which the configuration may not compose at all."""


def hints(words: Sequence[str], directory: Path, name: str) -> list[str]:
    """Look at the words of a command line that Hydra has refused.

    Args:
        words: of the command line; Hydra's own options, which begin with a dash, are passed over.
        directory: of the configuration.
        name: of the configuration's file, without ``.yaml``.

    Returns:
        A sentence for every key or group that is not there but is near one that is. None for keys where the groups that the
        words choose do not compose: the keys are then not known, and Hydra has named what can be chosen.
    """
    overrides = _parsed(word for word in words if not word.startswith("-"))
    always = [word for word, key in overrides if key == SEARCHED]
    plain = _composed(directory, name, always)
    if plain is None:
        return []
    groups = set(plain.hydra.runtime.choices)
    choices = [word for word, key in overrides if key in groups]
    chosen = _composed(directory, name, [*always, *choices]) if choices else plain
    keys = {} if chosen is None else dict(_keys(chosen))
    meant = {key: _meant(key, groups, keys) for _, key in overrides}
    told = "There is no {}. Did you mean {}? With a + it would be a new key that nothing reads."
    return [told.format(key, found) for key, found in meant.items() if found]


def check_groups(cfg: DictConfig) -> None:
    """Refuse what a ``+`` makes of a misspelt group: a run with the default's precision or correction under another one's name.

    Args:
        cfg: the composed configuration.

    Raises:
        ConfigError: a key at its top is spelt like one of our groups.
    """
    for key in map(str, cfg):
        if found := get_close_matches(key, GROUPS, n=1, cutoff=NEAR):
            value = OmegaConf.select(cfg, key)
            raise ConfigError(
                f"{key}={value} is read by nothing. Set {found[0]}={value} without a +, or name the key otherwise"
            )


def near_key(key: str, leaves: Collection[str]) -> str | None:
    """The dotted key that one was meant to be: one beside it, then one spelt like it throughout, then one in a deeper node.

    Args:
        key: that is not there.
        leaves: keys that hold a value.

    Returns:
        The key, or None if there is none so near or, without a likeness of letters, more than one.
    """
    parts = key.split(".")
    beside = {leaf.rpartition(".")[2]: leaf for leaf in leaves if leaf.split(".")[:-1] == parts[:-1]}
    if found := get_close_matches(parts[-1], beside, n=1, cutoff=NEAR):
        return beside[found[0]]
    longer = [leaf for last, leaf in beside.items() if last.startswith(f"{parts[-1]}_")]  # train_batch of train_batch_size
    if len(longer) == 1:
        return longer[0]
    alike = [leaf for leaf in leaves if _alike(parts, leaf.split("."))]
    if alike:
        return max(alike, key=lambda leaf: _ratio(key, leaf))
    deeper = [leaf for leaf in leaves if _within(parts, leaf.split("."))]  # actor.lr of actor.optim.lr
    return deeper[0] if len(deeper) == 1 else None


def _meant(key: str, groups: Collection[str], keys: dict[str, bool]) -> str | None:
    """What an override's key was meant to be, None for one that is there.

    Args:
        key: dotted, or a group's: ``correction``, ``hydra/launcher``, ``actor@actor_rollout_ref.actor``.
        groups: that can be chosen.
        keys: every dotted key, to whether it holds a value.
    """
    if key in groups or key in keys:
        return None
    if "." not in key or "@" in key:
        tops = [top for top in keys if "." not in top]
        written = [group for group in groups if ".." not in group]  # verl's own defaults name others relatively
        like = [choice for choice in (*written, *tops) if choice.count("/") == key.count("/")]
        if found := get_close_matches(key, like, n=1, cutoff=NEAR):
            return found[0]
    return near_key(key.replace("/", "."), [leaf for leaf, value in keys.items() if value and "." in leaf])


def _ratio(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()


def _alike(parts: Sequence[str], others: Sequence[str]) -> bool:
    return len(parts) == len(others) and all(
        one == other or _ratio(one, other) >= NEAR for one, other in zip(parts, others, strict=True)
    )


def _within(parts: Sequence[str], others: Sequence[str]) -> bool:
    """Whether a key is another one of which nodes are left out, but not its last part."""
    remaining = iter(others)
    return parts[-1] == others[-1] and all(part in remaining for part in parts)


def _parsed(words: Iterable[str]) -> list[tuple[str, str]]:
    """Words that change what has to be there, with its key or group; what cannot be parsed is Hydra's to say."""
    parser, found = OverridesParser.create(), []
    for word in words:
        try:
            override = parser.parse_override(word)
        except HydraException:
            continue
        if not (override.is_add() or override.is_force_add() or override.is_delete()):
            found.append((word, override.get_key_element()))
    return found


def _composed(directory: Path, name: str, overrides: list[str]) -> DictConfig | None:
    """The configuration, with Hydra's own, or None where it does not compose."""
    try:
        with initialize_config_dir(str(directory.resolve()), version_base=None):
            return compose(name, overrides=overrides, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException):
        return None


def _keys(cfg: DictConfig) -> Iterator[tuple[str, bool]]:
    """Every dotted key, and whether it holds a value instead of other keys."""

    def visit(prefix: str, node: dict) -> Iterator[tuple[str, bool]]:
        for key, value in node.items():
            is_node = isinstance(value, dict) and bool(value)
            yield f"{prefix}{key}", not is_node
            if is_node:
                yield from visit(f"{prefix}{key}.", value)

    yield from visit("", OmegaConf.to_container(cfg, resolve=False))
