# SPDX-License-Identifier: Apache-2.0
"""The tensors of a Hugging Face folder: those of its index, of ``model.safetensors``, or of all files where it has
neither."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from flashrl_verl.errors import ConfigError, FlashRLError

INDEX = "model.safetensors.index.json"
"""Of a folder whose tensors lie in several files: ``weight_map``, name to file."""

SINGLE = "model.safetensors"
"""Of a folder whose tensors lie in one file. Others beside it are the same model in other names, such as Mistral's
``consolidated.safetensors``, which transformers does not read either."""

_POINTER = b"version https://git-lfs"
"""How a file begins that git-lfs has put in the place of a large one."""

Found = TypeVar("Found")


def files(folder: Path) -> list[Path]:
    """The files that hold the weights.

    Raises:
        ConfigError: the index is no index.
        FlashRLError: it names files that are not there.
    """
    return _files(folder, _where(folder))


def shapes(folder: Path) -> dict[str, torch.Size]:
    """Name and shape of all that ``tensors`` yields, without reading it; raises what that raises."""
    return dict(_each(folder, lambda stream, name: torch.Size(stream.get_slice(name).get_shape())))


def tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor as it was saved.

    Raises:
        ConfigError: the index is no index.
        FlashRLError: a file is damaged or not there, or files and index do not agree.
    """
    yield from _each(folder, lambda stream, name: stream.get_tensor(name))


def _where(folder: Path) -> dict[str, str]:
    """The index, name to file; empty where there is none."""
    if not (folder / INDEX).is_file():
        return {}
    where = read_object(folder / INDEX).get("weight_map")
    if not where or not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise ConfigError(f"{folder / INDEX} has no weight_map of names to files. Download or save the model again")
    return where


def _files(folder: Path, where: dict[str, str]) -> list[Path]:
    if not where:
        single = folder / SINGLE
        return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    named = [folder / name for name in sorted(set(where.values()))]
    if missing := [file.name for file in named if not file.is_file()]:
        raise FlashRLError(
            f"{folder}: {INDEX} names files that are not there: {some(missing)}. Download or copy them from where the "
            "model is"
        )
    return named


def _each(folder: Path, read: Callable[[Any, str], Found]) -> Iterator[tuple[str, Found]]:
    """Yield each name with what ``read(open file, name)`` gives; all files are there, whole and in agreement with the
    index."""
    where = _where(folder)
    seen: set[str] = set()
    for file in _files(folder, where):
        for name, found in _each_of_file(file, read):
            if where.get(name, file.name) != file.name or name in seen:
                raise FlashRLError(
                    f"{folder}: {name} is in {file.name} and in another file too. Keep one of them, and the index that "
                    "names it"
                )
            seen.add(name)
            yield name, found
    if absent := sorted(where.keys() - seen):
        raise FlashRLError(
            f"{folder}: its index names tensors that are not there: {some(absent)}. Download the model again"
        )


def _each_of_file(file: Path, read: Callable[[Any, str], Found]) -> Iterator[tuple[str, Found]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as stream:
            for name in stream.keys():
                yield name, read(stream, name)
    except SafetensorError as error:
        with file.open("rb") as raw:
            pointer = raw.read(len(_POINTER)) == _POINTER
        why = (
            "it is git-lfs' pointer to the weights. Run `git lfs pull` there" if pointer else f"{error}. Copy it again"
        )
        raise FlashRLError(f"{file} ({file.stat().st_size} bytes) is damaged or not whole: {why}") from None
    except OSError as error:
        raise FlashRLError(
            f"{file} cannot be read: {error.strerror or error}. Allow reading it, or copy it again"
        ) from None


def read_object(file: Path) -> dict[str, Any]:
    """What a file of JSON holds.

    Raises:
        ConfigError: it is no object in JSON.
    """
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}. Download or save it again") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds {type(found).__name__} in JSON and no object. Download or save it again")
    return found


def some(names: list[str]) -> str:
    """The first few of several names."""
    return (", ".join(names[:4]) or "none") + (f" and {len(names) - 4} more" if len(names) > 4 else "")
