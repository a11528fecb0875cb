# SPDX-License-Identifier: Apache-2.0
"""The toy task's reward, in the form of verl's `reward.custom_reward_function`."""

from typing import Any

from flashrl_verl.errors import ConfigError
from flashrl_verl.quickstart.task import DATA_SOURCE


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
) -> dict[str, float]:
    """1 for exactly the expected digits, else 0: a response with anything around them is wrong.

    Returns:
        `score`, what is optimized, and `acc`, by which dynamic sampling finds the groups that carry no
        signal.

    Raises:
        ConfigError: the data are not the toy task's.
    """
    if data_source != DATA_SOURCE:
        raise ConfigError(
            f"data_source={data_source!r} is not {DATA_SOURCE!r}: this reward knows no other task. "
            "Set reward.custom_reward_function.path to the reward of data.train_files."
        )
    correct = float(solution_str == ground_truth)
    return {"score": correct, "acc": correct}
