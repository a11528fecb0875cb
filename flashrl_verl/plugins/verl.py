# SPDX-License-Identifier: Apache-2.0
"""Entry point ``verl.plugins``: importing this module registers everything flashrl adds to verl, in every verl process.

verl loads plugins at the end of ``import verl``. What belongs to a heavy module (trainers, engines) waits until that is
imported: to import it here would cost seconds in every process and close an import cycle. It swallows a plugin's
errors at DEBUG level, so ``require_registered`` says loudly what is missing.
"""

import os
import types

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry
from wrapt import register_post_import_hook

from flashrl_verl.errors import FlashRLError
from flashrl_verl.platforms import (
    PLATFORM_VARIABLE,
    cpu,  # noqa: F401 - importing it registers the platform
)
from flashrl_verl.upstream import patches

NAME = "flashrl"


def _load_replica() -> type[RolloutReplica]:
    from flashrl_verl.rollout.server import FlashRLReplica

    return FlashRLReplica


def _register_trainer(module: types.ModuleType) -> None:
    import flashrl_verl.trainer.trainer  # noqa: F401 - importing it registers


def _on_cpu() -> bool:
    return os.environ.get(PLATFORM_VARIABLE, "").strip().lower() == "cpu"


def _register_cpu_engine(module: types.ModuleType) -> None:
    if not _on_cpu():
        return
    module.EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device=["cpu"])(
        module.FSDPEngineWithLMHead
    )


def _patch_distributed(module: types.ModuleType) -> None:
    if _on_cpu():
        patches.default_to_gloo(module)


RolloutReplicaRegistry.register(NAME, _load_replica)
_ROLLOUT_REGISTRY[(NAME, "async")] = "flashrl_verl.refit.sender.FlashRLServerAdapter"
register_post_import_hook(_register_trainer, "verl.trainer.ppo.v1")
register_post_import_hook(_register_cpu_engine, "verl.workers.engine.fsdp.transformer_impl")
register_post_import_hook(_patch_distributed, "verl.utils.distributed")


def require_registered() -> None:
    """Raise unless verl has loaded this plugin by itself (its workers will do the same).

    Raises:
        FlashRLError: the entry point was not found or switched off.
    """
    from importlib.metadata import entry_points

    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip()
    names = {entry.name for entry in entry_points(group="verl.plugins")}
    allowed = policy == "auto" or NAME in [name.strip() for name in policy.split(",")]
    if NAME not in names or not allowed:
        raise FlashRLError(
            f"verl does not load the flashrl plugin (entry points of verl.plugins: {sorted(names)}, "
            f"VERL_USE_EXTERNAL_PLUGINS={policy!r}); install it in this environment: pip install --no-deps -e ."
        )
