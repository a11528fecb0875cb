# SPDX-License-Identifier: Apache-2.0
"""The Ray cluster of a run: whether it can hold the run, and what every one of its processes gets from the driver.

verl compares the sum of the GPUs, and waits without a word where no node has its share. And Ray's workers inherit the
environment and the working directory of the node's ``ray start``, not the driver's. So nothing is left to either: this
package, absolute paths, and where the metrics go travel in the configuration and in Ray's runtime environment
(https://docs.ray.io/en/latest/ray-core/handling-dependencies.html), and a node needs verl and vLLM alone.
"""

import importlib.metadata
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

import flashrl_verl
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.settings import DATA, MODEL, ROLLOUT, get
from flashrl_verl.upstream.versions import DISTRIBUTION

RUNTIME_ENV = "ray_kwargs.ray_init.runtime_env"

_ROOT = "VERL_FILE_LOGGER_ROOT"
LOG_PATHS = ("VERL_FILE_LOGGER_PATH", _ROOT, "TENSORBOARD_DIR", "WANDB_DIR")
"""verl's and its trackers' own variables for where metrics go; there are no configuration keys for them. Keys and
passwords are not among them: verl prints the runtime environment."""

_JOB_COPIES = "runtime_resources/working_dir_files"
"""Part of the path of the folders in which Ray keeps what ``ray job submit --working-dir`` copied, until it deletes
them."""

WRITTEN = ("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir")
READ = (
    *(MODEL, *(MODEL.removesuffix("path") + kind + "_path" for kind in ("tokenizer", "hf_config", "lora_adapter"))),
    *("critic.model.path", "critic.model.tokenizer_path", "reward.reward_model.model_path", "trainer.resume_from_path"),
    *("reward.custom_reward_function.path", "reward.reward_manager.module.path", "data.custom_cls.path"),
    *(f"{ROLLOUT}.agent.agent_loop_config_path", f"{ROLLOUT}.multi_turn.tool_config_path"),
    *(f"{ROLLOUT}.multi_turn.function_tool_path", "trainer.v1.sampler.custom_sampler.path"),
)
"""Keys of paths: folders that a run makes, and what it reads; the latter may be names of the model hub."""


# ---- whether it can hold the run ----


_CPUS_PER_RANK = 3
"""That verl reserves beside each GPU: its resource pools' ``max_colocate_count``."""
_SIMPLE = "transfer_queue.backend.SimpleStorage"
_STORAGE = f"{_SIMPLE}.num_data_storage_units"


def check_resources(nodes: int, gpus_per_node: int, storage: int, cluster: Sequence[tuple[float, float]]) -> None:
    """Refuse a run that no node can take its share of. Ray would wait for it without an end.

    Args:
        nodes: trainer.nnodes.
        gpus_per_node: trainer.n_gpus_per_node; verl reserves them on one node each, so a sum over nodes is not enough.
        storage: TransferQueue's storage units. Each takes a CPU, on every node as many (one more on some), and its
            controller another (transfer_queue/storage/simple_storage.py, controller.py).
        cluster: GPUs and CPUs of every node that is alive, as Ray counts them (on the CPU platform GPUs are logical).

    Raises:
        ConfigError: there are too few; the message has both keys and what the cluster has.
    """
    asked = f"trainer.nnodes={nodes} with trainer.n_gpus_per_node={gpus_per_node} is refused: the Ray cluster has"
    if sum(int(gpus) // gpus_per_node for gpus, _ in cluster) < nodes:
        counts = " + ".join(f"{gpus:g}" for gpus, _ in sorted(cluster, reverse=True)) or "0"
        raise ConfigError(
            f"{asked} {sum(gpus for gpus, _ in cluster):g} GPUs on {len(cluster)} node(s) ({counts}), which leaves "
            "workers without a place. Remedy: trainer.nnodes and trainer.n_gpus_per_node that fit; or start the "
            "missing nodes first (`ray status` shows who has joined; an autoscaling cluster takes "
            "ray.autoscaler.sdk.request_resources). Without a GPU, scripts/quickstart.sh trains a toy."
        )
    cpus, share = _CPUS_PER_RANK * gpus_per_node, storage // len(cluster)
    needed, has = nodes * cpus + storage + 1, [int(cpus) for _, cpus in cluster]
    fit = sum(max(0, min(int(gpus) // gpus_per_node, (int(of) - share) // cpus)) for gpus, of in cluster)
    if fit < nodes or sum(has) < needed or min(has) < share:
        raise ConfigError(
            f"{asked} {' + '.join(map(str, has))} CPUs, and {needed} are reserved: {_CPUS_PER_RANK} a GPU, {cpus} a "
            f"node, and for TransferQueue one and {_STORAGE}={storage}, on every node as many. Remedy: "
            f"ray_kwargs.ray_init.num_cpus=null or at least {needed} on a cluster of its own (Ray only counts them), "
            "`ray start --num-cpus=<more>` on one that runs; or fewer GPUs or storage units, "
            f"or +{_SIMPLE}.required_node_resource=<a resource of the nodes that take them>."
        )


def check_cluster(cfg: DictConfig) -> None:
    """``check_resources`` with the running cluster. Ray has to be initialized."""
    import ray

    offered = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cluster = [(node.get("GPU", 0.0), node.get("CPU", 0.0)) for node in offered]
    simple = get(cfg, "transfer_queue.backend.storage_backend") == "SimpleStorage"
    chosen = get(cfg, f"{_SIMPLE}.required_node_resource")  # the user's own choice of nodes for them
    storage = get(cfg, _STORAGE, 0) if simple and not chosen else 0
    check_resources(cfg.trainer.nnodes, cfg.trainer.n_gpus_per_node, storage, cluster)


def checked_runner(runner: Any, cfg: DictConfig, **options: Any) -> SimpleNamespace:
    """verl's task runner, made only on a cluster that can hold the run.

    verl initializes Ray and makes the runner in one function, and the runner waits for resources before it makes a
    trainer.

    Args:
        runner: verl's Ray actor class.
        cfg: The composed configuration.
        **options: Ray's, for the actor.

    Returns:
        What verl's ``run_ppo`` needs of an actor class: ``remote`` and ``options``.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def remote(*args: Any, **kwargs: Any) -> Any:
        check_cluster(cfg)
        # On the driver's node: metrics and console stay where the run was started. Elsewhere only when that offers no
        # CPUs at all; for one that is taken Ray waits.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        return runner.options(**{"scheduling_strategy": here, **options}).remote(*args, **kwargs)

    return SimpleNamespace(remote=remote, options=lambda **more: checked_runner(runner, cfg, **{**options, **more}))


# ---- what every node gets ----


def prepare(cfg: DictConfig, *, ship_code: bool = True) -> None:
    """Complete the composed configuration, in place, for processes that share nothing with the driver.

    Args:
        cfg: verl's composed configuration. Local paths that exist, and the folders that the run makes, become absolute;
            names of the model hub and addresses (``hdfs://``) are left alone.
        ship_code: ``flashrl.ship_code``.

    Raises:
        ConfigError: checkpoints would go to a folder that Ray deletes.
        FlashRLError: this package has no metadata to ship.
    """
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

    root = Path.cwd()
    for key in (*DATA, *READ, *WRITTEN):
        value = get(cfg, key)
        if isinstance(value, str):
            absolute = _below(root, value) if key in WRITTEN else _existing(root, [value])[0]
            OmegaConf.update(cfg, key, absolute)
        elif isinstance(value, list):  # files of data
            OmegaConf.update(cfg, key, _existing(root, value))
    kept = ("trainer.default_local_dir",) if get(cfg, "trainer.save_freq", -1) > 0 else ()
    for key in (*kept, *WRITTEN[1:]):
        if _JOB_COPIES in (get(cfg, key) or ""):
            raise ConfigError(
                f"{key}={get(cfg, key)} lies in Ray's temporary copy of the job's directory, which is deleted after it "
                f"and which other nodes do not have. Set {key} to an absolute path that every node mounts, or null"
                + " with trainer.save_freq=-1"
                * (key in kept)
            )
    ours = get(cfg, RUNTIME_ENV, {})
    # Of ``ray job submit``, if this is its driver.
    of_job = json.loads(os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR, "{}")).get("runtime_env") or {}
    variables, modules = dict(ours.get("env_vars") or {}), _existing(root, ours.get("py_modules") or [])
    # Ray merges a job's variables with a driver's only where no name is in both; the job's reach every process anyway.
    given = {**variables, **(of_job.get("env_vars") or {})}
    found = {name: value for name in LOG_PATHS if (value := os.environ.get(name))}
    if _JOB_COPIES in (written := str(root)):  # metrics go where checkpoints do
        written = get(cfg, "trainer.default_local_dir") or written
    variables |= {name: _below(root, value) for name, value in {_ROOT: written, **found}.items() if name not in given}
    if ship_code:  # in a checkpoint's configuration is the package that trained it, which may have moved
        # The code and its metadata, by whole name: a module of the user's may begin alike.
        modules = [module for module in modules if re.split("[-.]", Path(module).name)[0] != flashrl_verl.__name__]
        modules += package()
    with open_dict(cfg):
        if os.environ.get("RAY_ADDRESS", "local") != "local":
            # A cluster that is there has what its nodes were started with, and Ray takes no counts.
            cfg.ray_kwargs.ray_init.update({"num_cpus": None, "num_gpus": None})
        shipped = {"py_modules": modules} if modules else {}
        OmegaConf.update(cfg, RUNTIME_ENV, {**ours, "env_vars": variables, **shipped}, force_add=True)


def _below(root: Path, text: str) -> str:
    return text if "://" in text else str(root / os.path.expanduser(text))


def _existing(root: Path, texts: Iterable[str]) -> list[str]:
    """Those that are paths here as absolute ones; names of the model hub and addresses as they are."""
    return [_below(root, text) if (root / os.path.expanduser(text)).exists() else text for text in texts]


def package() -> list[str]:
    """Folders to ship: the code, and the metadata in whose entry points verl's and vLLM's processes find the plugins.

    Raises:
        FlashRLError: there is no metadata, as when the checkout is only on PYTHONPATH.
    """
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise FlashRLError(
            f"{DISTRIBUTION} is importable but not installed, so that verl and vLLM would not find its plugins. "
            "Remedy: pip install --no-deps -e <flashrl-verl>"
        ) from None
    code = Path(flashrl_verl.__file__).resolve().parent
    name = DISTRIBUTION.replace("-", "_")
    for folder in (f"{name}-{distribution.version}.dist-info", f"{name}.egg-info"):
        metadata = Path(str(distribution.locate_file(folder)))
        if metadata.is_dir():
            return [str(code), str(metadata.resolve())]
    raise FlashRLError(
        f"the metadata of {DISTRIBUTION} {distribution.version} is not a folder that can be sent to other nodes. "
        "Remedy: pip install --no-deps -e <flashrl-verl> on every node, and flashrl.ship_code=false"
    )
