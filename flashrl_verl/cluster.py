# SPDX-License-Identifier: Apache-2.0
"""Whether the Ray cluster can hold the run: verl would wait for GPUs that are not there, without a word."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig

from flashrl_verl.errors import ConfigError
from flashrl_verl.rules import positive_integer, refuse


def check_gpus(nodes: int, gpus_per_node: int, cluster: Sequence[float]) -> None:
    """Refuse a run that no node can take its share of.

    Args:
        nodes: trainer.nnodes.
        gpus_per_node: trainer.n_gpus_per_node; verl reserves them on one node each, so a sum over nodes is not enough.
        cluster: GPUs of every node that is alive, as Ray counts them (on the CPU platform they are logical ones).

    Raises:
        ConfigError: there are too few, and the message has both keys and what the cluster has; or the run asks for none.
    """
    for key, value in (("trainer.nnodes", nodes), ("trainer.n_gpus_per_node", gpus_per_node)):
        if not positive_integer(value):
            refuse(key, value, "a run needs at least one", f"{key}=1 or more")
    if sum(int(gpus) // gpus_per_node for gpus in cluster) >= nodes:
        return
    counts = " + ".join(f"{gpus:g}" for gpus in sorted(cluster, reverse=True)) or "0"
    raise ConfigError(
        f"trainer.nnodes={nodes} with trainer.n_gpus_per_node={gpus_per_node} is refused: the Ray cluster has "
        f"{sum(cluster):g} GPUs on {len(cluster)} node(s) ({counts}), so the workers would wait for ever. Remedy: "
        "trainer.nnodes and trainer.n_gpus_per_node that fit; or start the missing nodes first (`ray status` shows who has "
        "joined; an autoscaling cluster takes ray.autoscaler.sdk.request_resources); or hardware=cpu for the toy model."
    )


def check_cluster(cfg: DictConfig) -> None:
    """``check_gpus`` with the running cluster. Ray has to be initialized."""
    import ray

    cluster = [node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]]
    check_gpus(cfg.trainer.nnodes, cfg.trainer.n_gpus_per_node, cluster)


def checked_runner(runner: Any, cfg: DictConfig, **options: Any) -> SimpleNamespace:
    """verl's task runner, made only on a cluster that can hold the run.

    verl initializes Ray and makes the runner in one function, and the runner waits for resources before it makes a trainer.

    Args:
        runner: verl's Ray actor class.
        cfg: The composed configuration.
        **options: Ray's, for the actor.

    Returns:
        What verl's ``run_ppo`` needs of an actor class: ``remote`` and ``options``.
    """

    def remote(*args: Any, **kwargs: Any) -> Any:
        check_cluster(cfg)
        return runner.options(**{"scheduling_strategy": _here(), **options}).remote(*args, **kwargs)

    return SimpleNamespace(remote=remote, options=lambda **more: checked_runner(runner, cfg, **{**options, **more}))


def _here() -> Any:
    """The driver's node: metrics and console stay where the run was started. Elsewhere only when that offers no CPUs at all;
    for one that is taken Ray waits."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
