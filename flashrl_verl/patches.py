# SPDX-License-Identifier: Apache-2.0
"""The ledger of everything this package changes in verl outside a subclass or a registry. One entry a function.

=====================================  =================================================================================
target                                 ``verl.utils.distributed.initialize_global_process_group_ray``
why                                    it joins "cpu:gloo" and "<device>:<backend>"; on the CPU platform that is
                                       "cpu:gloo,cpu:gloo", which torch refuses. It takes ``backend=``, but its caller
                                       (``TrainingWorker.__init__``) passes none
applied                                only when VERL_PLATFORM=cpu, when the module is imported
upstream                               https://github.com/verl-project/verl/blob/main/verl/utils/distributed.py
versions                               verl 0.9.1
drop it when                           the function leaves out a repeated device
tested by                              tests/unit/test_platform_cpu.py, every end-to-end run on CPU
=====================================  =================================================================================
"""

import functools
import types


def default_to_gloo(distributed: types.ModuleType) -> None:
    """Apply the entry above to ``verl.utils.distributed``."""
    original = distributed.initialize_global_process_group_ray
    if isinstance(original, functools.partial):
        return
    distributed.initialize_global_process_group_ray = functools.partial(original, backend="gloo")
