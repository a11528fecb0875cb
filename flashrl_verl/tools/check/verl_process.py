# SPDX-License-Identifier: Apache-2.0
"""In a fresh process: `import verl` has loaded our plugin, and all that it registers can be had."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from flashrl_verl.plugins.versions import INSTALL_COMMAND, TESTED
from flashrl_verl.tools.check.findings import Finding, fail, guarded, ok
from flashrl_verl.tools.check.metadata import PLUGIN
from flashrl_verl.tools.check.plugins import check_loaded
from flashrl_verl.tools.check.settings import CheckSettings
from flashrl_verl.tools.check.subjects import IMPORTED, VERL_PLUGIN
from flashrl_verl.tools.check.versions import check_imported


def run(settings: CheckSettings) -> Iterator[Finding]:
    """What the child finds; nothing of verl may be imported before it."""
    import verl  # noqa: F401 - it loads the plugins at the end of its import

    yield from guarded(VERL_PLUGIN, check_plugin)
    imported = {name: getattr(sys.modules[name], "__version__", None) for name in TESTED if name in sys.modules}
    yield from guarded(IMPORTED, check_imported, {name: str(v) for name, v in imported.items() if v})


def check_plugin() -> Iterator[Finding]:
    """The plugin registered itself, and verl gets replica, adapter and trainer from its registries."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY, get_rollout_class
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    registered = (PLUGIN, "async") in _ROLLOUT_REGISTRY
    wrong = list(
        check_loaded(VERL_PLUGIN, "verl.plugins", "VERL_USE_EXTERNAL_PLUGINS", "auto", registered, lambda p: p.load())
    )
    yield from wrong
    if wrong:
        return
    try:
        import verl.trainer.ppo.v1  # noqa: F401 - the trainer registers after it
        from verl.trainer.ppo.v1.trainer_base import get_trainer_cls

        classes = (RolloutReplicaRegistry.get(PLUGIN), get_rollout_class(PLUGIN, "async"), get_trainer_cls(PLUGIN))
    except Exception as error:  # noqa: BLE001 - a missing hook, or verl's and vLLM's own imports
        text = f"registered, but replica, adapter and trainer cannot be had: {type(error).__name__}: {error}"
        yield fail(VERL_PLUGIN, text, f"what the error names; else tested versions: {INSTALL_COMMAND}")
        return
    yield ok(VERL_PLUGIN, f"loaded by verl in a fresh process: {', '.join(cls.__name__ for cls in classes)}")
