# SPDX-License-Identifier: Apache-2.0
"""Run a function right after a module has been imported for the first time in this process.

verl loads its plugins at the end of ``import verl``. What registers itself with a heavy module (trainers, engines) must
not import that module there: it would cost seconds in every process and close an import cycle. It waits for the module
instead.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence

Action = Callable[[types.ModuleType], None]


class _AfterImport(importlib.abc.MetaPathFinder):
    def __init__(self):
        self.actions: dict[str, list[Action]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.actions:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            for action in self.actions.pop(fullname, []):  # not before: a spec may be asked for and never loaded
                action(module)

        spec.loader.exec_module = exec_module
        return spec


_finder = _AfterImport()


def after_import(name: str, action: Action) -> None:
    """Call ``action(module)`` once the module ``name`` is imported; at once if it already is."""
    if name in sys.modules:
        action(sys.modules[name])
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.actions.setdefault(name, []).append(action)
