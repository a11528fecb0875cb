# SPDX-License-Identifier: Apache-2.0
"""What every Ray process of a run gets from the driver: this package, absolute paths, and where the metrics go.

Ray's workers inherit the environment and the working directory of the node's ``ray start``, not the driver's. So nothing is
left to either: what they need travels in the configuration and in Ray's runtime environment
(https://docs.ray.io/en/latest/ray-core/handling-dependencies.html), and a node needs verl and vLLM alone.
"""

import importlib.metadata
import os
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

import flashrl_verl
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.local_paths import DATA, MODEL
from flashrl_verl.rules import get

DISTRIBUTION = "flashrl-verl"
RUNTIME_ENV = "ray_kwargs.ray_init.runtime_env"

LOG_PATHS = ("VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT", "TENSORBOARD_DIR", "WANDB_DIR")
"""verl's and its trackers' own variables for where metrics go; there are no configuration keys for them. Keys and passwords are
not among them: verl prints the runtime environment."""

_JOB_COPIES = "runtime_resources/working_dir_files"
"""Part of the path of the folders in which Ray keeps what ``ray job submit --working-dir`` copied, until it deletes them."""


def prepare(cfg: DictConfig) -> None:
    """Complete the composed configuration, in place, for processes that share nothing with the driver.

    Raises:
        ConfigError: checkpoints would go to a folder that Ray deletes.
        FlashRLError: this package has no metadata to ship.
    """
    root = Path.cwd()
    make_paths_absolute(cfg, root)
    refuse_temporary_checkpoints(cfg)
    with open_dict(cfg):
        if os.environ.get(
            "RAY_ADDRESS"
        ):  # a cluster that is there has what its nodes were started with, and Ray takes no counts
            cfg.ray_kwargs.ray_init.update({"num_cpus": None, "num_gpus": None})
        environment = get(cfg, RUNTIME_ENV, {})
        variables = {"VERL_FILE_LOGGER_ROOT": str(root), **environment.get("env_vars", {})}
        for name in LOG_PATHS:
            if name not in environment.get("env_vars", {}) and (value := os.environ.get(name)):
                variables[name] = str(root / os.path.expanduser(value))
        modules = [*environment.get("py_modules", []), *(package() if cfg.flashrl.ship_code else [])]
        OmegaConf.update(cfg, RUNTIME_ENV, {**environment, "env_vars": variables, "py_modules": modules}, force_add=True)


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
        f"the metadata of {DISTRIBUTION} {distribution.version} is not a folder that can be sent to other nodes. Remedy: "
        "pip install --no-deps -e <flashrl-verl> on every node, and flashrl.ship_code=false"
    )


def make_paths_absolute(cfg: DictConfig, root: Path) -> None:
    """Local paths that exist below ``root``, and the checkpoints' folder, as absolute ones.

    Args:
        cfg: the composed configuration; changed in place. Names of the model hub and addresses (``hdfs://``) are left alone.
        root: where relative paths start.
    """

    def absolute(text: str) -> str:
        return text if "://" in text or not (root / os.path.expanduser(text)).exists() else str(root / os.path.expanduser(text))

    for key in DATA:
        value = get(cfg, key)
        if value is not None:
            OmegaConf.update(cfg, key, absolute(value) if isinstance(value, str) else [absolute(text) for text in value])
    if model := get(cfg, MODEL):
        OmegaConf.update(cfg, MODEL, absolute(model))
    if reward := get(cfg, "reward.custom_reward_function.path"):
        OmegaConf.update(cfg, "reward.custom_reward_function.path", absolute(reward))
    if folder := get(cfg, "trainer.default_local_dir"):
        OmegaConf.update(cfg, "trainer.default_local_dir", str(root / os.path.expanduser(folder)))


def refuse_temporary_checkpoints(cfg: DictConfig) -> None:
    """``ray job submit --working-dir`` runs the driver in a copy that Ray deletes, on one node.

    Raises:
        ConfigError: checkpoints are saved, and into that copy.
    """
    folder = get(cfg, "trainer.default_local_dir", "")
    if get(cfg, "trainer.save_freq", -1) > 0 and _JOB_COPIES in folder:
        raise ConfigError(
            f"trainer.default_local_dir={folder} lies in Ray's temporary copy of the job's directory, which is deleted after "
            "it and which other nodes do not have. Set trainer.default_local_dir to an absolute path that every node "
            "mounts, or trainer.save_freq=-1"
        )
