# SPDX-License-Identifier: Apache-2.0
import sys

import pytest

from flashrl_verl.plugins.import_hooks import after_import


@pytest.fixture
def module(tmp_path, monkeypatch):
    name = f"flashrl_hook_target_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def test_the_action_runs_once_after_the_first_import(module):
    seen = []
    after_import(module, lambda m: seen.append(m.VALUE))
    assert seen == []
    __import__(module)
    __import__(module)
    assert seen == [1]


def test_actions_run_in_order_and_at_once_when_already_imported(module):
    seen = []
    after_import(module, lambda m: seen.append("first"))
    after_import(module, lambda m: seen.append("second"))
    __import__(module)
    after_import(module, lambda m: seen.append("third"))
    assert seen == ["first", "second", "third"]


def test_an_error_in_an_action_reaches_the_importer(module):
    def fail(m):
        raise RuntimeError("cannot register")

    after_import(module, fail)
    with pytest.raises(RuntimeError, match="cannot register"):
        __import__(module)


def test_a_module_that_does_not_exist_stays_an_import_error():
    after_import("flashrl_no_such_module", lambda m: None)
    with pytest.raises(ModuleNotFoundError):
        __import__("flashrl_no_such_module")
