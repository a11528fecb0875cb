# SPDX-License-Identifier: Apache-2.0
"""The toy tasks' reward, in the form of verl's `reward.custom_reward_function`."""

from typing import Any

from flashrl_verl.errors import ConfigError
from benchmarks.legacy_learning.quickstart import chain
from benchmarks.legacy_learning.quickstart.task import DATA_SOURCE


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
) -> dict[str, float]:
    """1 for exactly the expected digits, else 0.

    Args:
        data_source: `toy_addition`, or `toy_chain`, whose answer stands behind the last `#`.
        solution_str: the response, decoded without special tokens.
        ground_truth: the number in digits. A response with anything around it (spaces, more digits) is wrong.
        extra_info: not used.

    Returns:
        `score`, what is optimized, and `acc`, by which dynamic sampling finds the groups that carry no
        signal.

    Raises:
        ConfigError: the data are not the toy task's.
    """
    if data_source == chain.DATA_SOURCE:
        solution_str = solution_str.rpartition("#")[2] if "#" in solution_str else ""
    elif data_source != DATA_SOURCE:
        raise ConfigError(
            f"data_source={data_source!r} is not {DATA_SOURCE!r} or {chain.DATA_SOURCE!r}: this reward knows no other "
            "task. Set reward.custom_reward_function.path to the reward of data.train_files."
        )
    correct = float(solution_str == ground_truth)
    return {"score": correct, "acc": correct}
