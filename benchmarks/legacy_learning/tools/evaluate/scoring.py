# SPDX-License-Identifier: Apache-2.0
"""What a response is worth: verl's own rewards by data source, or a function in the form of its custom ones."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashrl_verl.errors import ConfigError, FlashRLError
from benchmarks.legacy_learning.tools.evaluate.problems import Problem

Reward = Callable[..., Any]


def load_reward(spec: str | None) -> Reward:
    """Load a reward.

    Args:
        spec: ``path:name`` as ``reward.custom_reward_function.path`` and ``.name`` (``pkg://`` too); None for verl's
            default.

    Raises:
        ConfigError: there is no such file or function.
    """
    if spec is None:
        from verl.utils.reward_score import default_compute_score

        return default_compute_score
    from verl.utils.import_utils import load_extern_object

    path, colon, name = spec.rpartition(":")
    if not colon or not path or not name.isidentifier():
        raise ConfigError(f"--reward-function {spec!r} is not path:name, such as my_reward.py:compute_score")
    if "://" not in path and not Path(path).is_file():
        raise ConfigError(f"--reward-function {spec}: {path} is no file here")
    try:
        return load_extern_object(module_path=path, object_name=name)
    except Exception as error:  # noqa: BLE001 - it is the user's code
        raise ConfigError(f"--reward-function {spec} cannot be loaded: {type(error).__name__}: {error}") from error


def score(reward: Reward, problem: Problem, response: str) -> float:
    """Return ``acc`` where the reward gives it, as verl's validation does, else the score.

    Args:
        reward: called with ``data_source``, ``solution_str``, ``ground_truth`` and ``extra_info``.
        problem: what was asked.
        response: what was answered, without special tokens.

    Raises:
        ConfigError: the reward does not know the data source.
        FlashRLError: it failed, or gave no number.
    """
    try:
        found = reward(
            data_source=problem.data_source,
            solution_str=response,
            ground_truth=problem.ground_truth,
            extra_info=dict(problem.extra_info),
        )
        if inspect.isawaitable(found):
            found = asyncio.run(_awaited(found))
    except NotImplementedError as error:
        raise ConfigError(
            f"verl has no reward for data_source={problem.data_source!r}. Name yours: --reward-function path:name"
        ) from error
    except FlashRLError:
        raise
    except Exception as error:  # noqa: BLE001 - it is the user's code
        raise FlashRLError(
            f"the reward failed on a response to {problem.messages[-1]['content']!r:.80}: {type(error).__name__}: "
            f"{error}"
        ) from error
    if isinstance(found, dict):
        found = found.get("acc", found.get("score"))
    elif isinstance(found, tuple | list):
        found = found[0] if found else None
    try:
        value = float(found)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise FlashRLError(f"the reward of data_source={problem.data_source!r} gave {found!r}, which is no number")
    return value


async def _awaited(pending: Any) -> Any:
    return await pending
