# SPDX-License-Identifier: Apache-2.0
"""Tests that need a GPU say so where there is none, instead of failing or waiting for one."""

import logging

import engines  # noqa: F401 - chooses verl's platform, which verl reads once, before a test's module imports it
import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; torch.cuda.is_available() is False here"))


def pytest_unconfigure() -> None:
    """vLLM's exit hooks log after pytest has closed the streams: their tracebacks would stand below the summary."""
    logging.raiseExceptions = False
