# SPDX-License-Identifier: Apache-2.0
"""Local paths of the configuration that do not exist, found before Ray starts and said by their Hydra keys."""

import os
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig

from flashrl_verl.data.catalog import prepared_as
from flashrl_verl.errors import ConfigError
from flashrl_verl.rules import get

MODEL = "actor_rollout_ref.model.path"
DATA = ("data.train_files", "data.val_files")


def missing_paths(cfg: DictConfig, *, root: Path | None = None, made_later: Path | None = None) -> list[tuple[str, str]]:
    """Local paths that a run would read and that are not there.

    Args:
        cfg: The composed configuration.
        root: Where relative paths start; the working directory when it is None.
        made_later: A directory whose contents need not exist yet.

    Returns:
        Pairs of Hydra key and path as it is written; data first. Addresses (``hdfs://``) and names of the model hub are not
        local, and a dataset class of the user's own reads what it likes.
    """
    root = root or Path.cwd()
    return [
        (key, text)
        for key, text in _local(cfg, root)
        if not (root / text).exists() and not (made_later and (root / text).is_relative_to(made_later))
    ]


def check_paths(cfg: DictConfig, *, root: Path | None = None, made_later: Path | None = None) -> None:
    """Refuse a configuration whose local paths are not there.

    Args:
        cfg, root, made_later: as in ``missing_paths``.

    Raises:
        ConfigError: one message with every key and path.
    """
    missing = missing_paths(cfg, root=root, made_later=made_later)
    if missing:
        raise ConfigError(f"{describe(missing)} (relative paths start at {root or Path.cwd()}). {_remedy(cfg, missing)}")


def describe(missing: list[tuple[str, str]]) -> str:
    """What is missing, in words: ``key=path, key=path not found on this machine``."""
    return ", ".join(f"{key}={text}" for key, text in missing) + " not found on this machine"


def _remedy(cfg: DictConfig, missing: list[tuple[str, str]]) -> str:
    if get(cfg, "quickstart.assets") is not None:
        return (
            "Remedy: quickstart.assets=<folder>/assets of an earlier `flashrl quickstart --output <folder>`, which makes them "
            "(bash scripts/quickstart.sh), or paths of your own."
        )
    if get(cfg, "chain.assets") is not None:
        return (
            "Remedy: chain.assets=<folder>/assets of an earlier `flashrl bench learning --output <folder>`, which makes them."
        )
    home = f"; write your home folder out in {MODEL}, ~ is not expanded there" if get(cfg, MODEL, "").startswith("~") else ""
    known = prepared_as()
    names = sorted({known[Path(text).name].value for _, text in missing if Path(text).name in known})
    makes = "; or make them: " + ", ".join(f"`flashrl data {name}`" for name in names) if names else ""
    return f"Remedy: set these keys to paths that exist on every node{home}{makes}."


def _local(cfg: DictConfig, root: Path) -> Iterator[tuple[str, str]]:
    if get(cfg, "data.custom_cls.path") is None:
        for key in DATA:
            value = get(cfg, key, [])
            for text in [value] if isinstance(value, str) else value:
                if "://" not in text:
                    yield key, os.path.expanduser(text)  # as Hugging Face datasets does
    model = get(cfg, MODEL, "")
    if _looks_like_a_path(model, root):
        yield MODEL, model  # transformers takes ~ for a folder's name


def _looks_like_a_path(model: str, root: Path) -> bool:
    """A name of the model hub is ``name`` or ``owner/name``."""
    if "://" in model:
        return False
    folder = Path(model).parent
    return (
        model.startswith(("/", "./", "../", "~"))
        or len(Path(model).parts) > 2
        or (folder != Path(".") and (root / folder).is_dir())
    )
