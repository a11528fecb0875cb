# SPDX-License-Identifier: Apache-2.0
"""The errors a user can meet: each gives the value, the reason and the Hydra key (or the step) to change.

Standard library only: this is imported where the environment may be missing (``environment_needed``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn


class FlashRLError(RuntimeError):
    """Base class: the run stops, and the message says why and what to do."""


class ConfigError(FlashRLError, ValueError):
    """The configuration contradicts itself, verl, vLLM or the hardware; raised before anything is loaded."""


class RefitError(FlashRLError):
    """A weight update did not arrive whole in the rollout engine; the engine's weights must not be sampled from."""


class DynamicSamplingError(FlashRLError):
    """Dynamic sampling used up its budget of prompts without filling a training batch."""


class ResponseError(FlashRLError):
    """Responses ended with an error, or a reward function raised or returned something other than a finite number, more
    often than it may."""


class GuardError(FlashRLError):
    """The mismatch of rollout and trainer was beyond a limit for longer than ``flashrl.guard`` allows, or is not
    known."""


class WorkerLostError(FlashRLError):
    """A process of the run was killed, or has left with its node."""


def refuse(key: str, value: Any, reason: str, remedy: str) -> NoReturn:
    """Raise the one error for a wrong setting, in one line.

    Args:
        key: Hydra's, dotted.
        value: as it was set.
        reason: the end of a sentence that starts with key and value.
        remedy: what to write instead, as Hydra overrides.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(f"{key}={words(value)} is refused: {reason}. Remedy: {remedy}.")


def words(value: Any) -> str:
    """Write a value the way a user writes it on Hydra's command line."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def listed(names: Sequence[str], most: int = 8) -> str:
    """The first ``most`` names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@contextmanager
def environment_needed() -> Iterator[None]:
    """Where the block lacks a module of the environment, end with one line on stderr and exit status 1.

    A module of this package that is missing, or one below a package that is there, is an error of the code: it is
    raised.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if not error.name or "." in error.name or error.name == __package__:
            raise
        sys.exit(
            f"error: {sys.executable} has no module {error.name!r}. Remedy: `source .venv/bin/activate` "
            "(`bash scripts/setup_env.sh` makes it); or, in an environment of your own with verl and vLLM, "
            "`pip install --no-deps -e .`"
        )
