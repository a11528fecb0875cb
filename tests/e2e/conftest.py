# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
from recipe_runs import Run, command, finish, make_assets, start


@pytest.fixture(scope="session")
def assets(tmp_path_factory) -> Path:
    return make_assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture
def recipe(assets, tmp_path):
    """A function that runs the recipe with overrides and returns the finished ``Run``."""

    def run(*overrides: str, fault: str | None = None, assets: Path = assets, timeout: float = 900) -> Run:
        return finish(start(command(assets, tmp_path, *overrides), tmp_path, fault=fault), tmp_path, timeout)

    return run
