# SPDX-License-Identifier: Apache-2.0
"""Which CPU cores an engine computes on, and in how many processes.

vLLM's CPU backend binds each rank to a NUMA node of its own and stops where a machine has fewer nodes than ranks, as a
laptop has. It takes the cores of each rank only from the environment.
"""

import os
from collections.abc import Sequence
from typing import Any

VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"


def share_cores(cores: Sequence[int], ranks: int) -> str:
    """Cut the cores into one run for each rank, as even as they go; with fewer cores than ranks, ranks share one.

    Args:
        cores: numbers of the cores this process may use, at least one.
        ranks: of the engine on this machine.

    Returns:
        ``VLLM_CPU_OMP_THREADS_BIND``: the ranks' cores, such as ``0,1|2,3``.
    """
    if len(cores) < ranks:
        return "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    bounds = [len(cores) * rank // ranks for rank in range(ranks + 1)]
    runs = [cores[first:last] for first, last in zip(bounds, bounds[1:], strict=False)]
    return "|".join(",".join(map(str, run)) for run in runs)


def bind_ranks(ranks: int) -> None:
    """Set the variable for the engine this process is about to start, unless there is one rank only or the user has set
    it."""
    if ranks > 1:
        os.environ.setdefault(VARIABLE, share_cores(sorted(os.sched_getaffinity(0)), ranks))


def one_process(engine_kwargs: dict[str, Any]) -> None:
    """Have a CPU engine of one rank compute in the process that schedules it. verl asks for a worker of its own, which
    waits for its next step in a loop: a third of a core. A GPU engine keeps its worker (docs/LOG.md).

    Args:
        engine_kwargs: of vLLM; changed unless the user has chosen.
    """
    if engine_kwargs.setdefault("distributed_executor_backend", "uni") == "uni":
        # vLLM's CPU platform takes "mp" instead otherwise (vllm/platforms/cpu.py); an AsyncLLM reads it nowhere else.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
