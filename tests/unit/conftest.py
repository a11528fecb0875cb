# SPDX-License-Identifier: Apache-2.0
import logging

import pytest

from flashrl_verl.tools.recipe_process import compose


@pytest.fixture
def logged(monkeypatch, caplog):
    """Messages on verl.flashrl by level; verl keeps its loggers apart from the root logger, which caplog reads."""
    monkeypatch.setattr(logging.getLogger("verl"), "propagate", True)
    caplog.set_level(logging.INFO, logger="verl.flashrl")
    return lambda level: [r.getMessage() for r in caplog.records if r.levelno == level]


@pytest.fixture(scope="session")
def base():
    """``experiment=base``, composed; not to be changed."""
    return compose(["experiment=base"])
