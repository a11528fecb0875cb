# SPDX-License-Identifier: Apache-2.0
"""What a Python without the environment is told: one line with the remedy. Imports the standard library only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

MODULES = frozenset(
    {
        # requirements in setup.py
        *("hydra", "omegaconf", "numpy", "pyarrow", "rich", "typer", "packaging", "zmq", "orjson", "psutil"),
        # what verl and vLLM bring
        *("torch", "transformers", "tensordict", "ray", "huggingface_hub"),
    }
)
"""Modules of the environment that start-up may find missing. Not verl and vLLM (`compat` speaks of them) and not
matplotlib, which only `flashrl report` draws with and asks for itself."""


@contextmanager
def environment_needed() -> Iterator[None]:
    """Where the block lacks a module of the environment, end with one line on stderr and exit status 1.

    A module of this package that is missing, or one below a package that is there, is an error of the code: it is raised.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in MODULES:
            raise
        sys.exit(
            f"error: {sys.executable} has no module {error.name!r}. Remedy: `source .venv/bin/activate` "
            "(`bash scripts/setup_env.sh` makes it); or, in an environment of your own with verl and vLLM, "
            "`pip install --no-deps -e .`"
        )
