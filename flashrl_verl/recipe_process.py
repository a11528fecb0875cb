# SPDX-License-Identifier: Apache-2.0
"""The recipe in a process of its own: where it is started, and in which environment."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The checkout: the recipe is not part of the installed package."""

MODULE = "recipe.flashrl.main_flashrl"
"""What ``python -m`` runs, started in ``ROOT``."""


def environment(metrics: Path) -> dict[str, str]:
    """Variables of a run that logs to ``metrics``, has a Ray of its own and asks no network."""
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return env | {
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
