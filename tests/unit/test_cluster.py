# SPDX-License-Identifier: Apache-2.0
"""A cluster that cannot hold the run is refused; what reaches a run's processes does not depend on their node's
environment."""

import copy
import json

import pytest
from omegaconf import OmegaConf

from flashrl_verl.errors import ConfigError
from flashrl_verl.launch import LOG_PATHS, check_resources, prepare

RUNTIME_ENV = "ray_kwargs.ray_init.runtime_env"


@pytest.mark.parametrize(
    "nodes, gpus, cluster, said",
    [
        (4, 8, [8.0] * 4, None),
        (4, 8, [0.0, 8.0, 8.0, 8.0, 8.0], None),
        (4, 8, [16.0, 16.0], None),
        (4, 8, [], r"trainer.nnodes=4 with trainer.n_gpus_per_node=8 .* has 0 GPUs on 0 node\(s\)"),
        (4, 8, [8.0] * 3, r"has 24 GPUs on 3 node\(s\) \(8 \+ 8 \+ 8\)"),
        # Enough in all, and no node has its share.
        (4, 8, [4.0] * 8, "has 32 GPUs on 8 node"),
        (4, 8, [31.0], "has 31 GPUs on 1 node"),
    ],
)
def test_a_run_that_no_node_can_take_its_share_of_is_refused_with_both_keys_and_the_count(nodes, gpus, cluster, said):
    cluster = [(gpus, 64.0) for gpus in cluster]
    if said is None:
        check_resources(nodes, gpus, 8, cluster)
    else:
        with pytest.raises(ConfigError, match=said):
            check_resources(nodes, gpus, 8, cluster)


def test_a_run_that_would_wait_for_cpus_is_refused():
    for storage, cluster in ((8, [(8.0, 33.0)]), (1, [(8.0, 26.0)]), (8, [(8.0, 29.0), (0.0, 4.0)])):
        check_resources(1, 8, storage, cluster)
    with pytest.raises(ConfigError, match=r"32 CPUs, and 33 are reserved: 3 a GPU, 24 a node.*=8, .* least 33 on"):
        check_resources(1, 8, 8, [(8.0, 32.0)])
    # Enough in all: a node's share of storage leaves too little for its GPUs, or has no place.
    for cluster in ([(8.0, 27.0), (0.0, 64.0)], [(8.0, 64.0), (0.0, 0.0)]):
        with pytest.raises(ConfigError, match="CPUs, and 33 are reserved"):
            check_resources(1, 8, 8, cluster)


# ---- what every node gets ----


@pytest.fixture
def cfg(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR", *LOG_PATHS):
        monkeypatch.delenv(name, raising=False)
    for folder in ("model", "rewards", "checkpoints/run/global_step_2"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "train.parquet").touch()
    return OmegaConf.create(
        {
            "data": {"train_files": "train.parquet", "val_files": ["train.parquet", "hdfs://nodes/val.parquet"]},
            "actor_rollout_ref": {
                "model": {"path": "model"},
                "rollout": {"agent": {"agent_loop_config_path": "train.parquet"}},
            },
            "critic": {"model": {"path": "Qwen/Qwen2.5-32B"}},
            "reward": {"custom_reward_function": {"path": "pkg://flashrl_verl.quickstart.task"}},
            "trainer": {
                **{"default_local_dir": "checkpoints/new", "save_freq": 10, "logger": ["console", "file"]},
                "resume_from_path": "checkpoints/run/global_step_2",
            },
            "ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": {"VERL_PLATFORM": "cpu"}}}},
        }
    )


def shipped(cfg, what: str):
    return OmegaConf.to_container(OmegaConf.select(cfg, f"{RUNTIME_ENV}.{what}"))


def test_local_paths_are_the_drivers_and_names_and_addresses_stay(cfg, tmp_path):
    prepare(cfg)
    assert cfg.data.train_files == f"{tmp_path}/train.parquet"
    assert list(cfg.data.val_files) == [f"{tmp_path}/train.parquet", "hdfs://nodes/val.parquet"]
    assert cfg.actor_rollout_ref.model.path == f"{tmp_path}/model"
    assert cfg.critic.model.path == "Qwen/Qwen2.5-32B"
    assert cfg.reward.custom_reward_function.path == "pkg://flashrl_verl.quickstart.task"
    assert cfg.trainer.default_local_dir == f"{tmp_path}/checkpoints/new", "made later"
    assert cfg.trainer.resume_from_path == f"{tmp_path}/checkpoints/run/global_step_2"
    assert cfg.actor_rollout_ref.rollout.agent.agent_loop_config_path == f"{tmp_path}/train.parquet"


def test_metrics_go_where_the_drivers_variables_say_and_the_configuration_wins(cfg, tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", "elsewhere/metrics.jsonl")
    monkeypatch.setenv("TENSORBOARD_DIR", "gs://bucket/tb")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    configured = copy.deepcopy(cfg)
    OmegaConf.update(configured, f"{RUNTIME_ENV}.env_vars.VERL_FILE_LOGGER_PATH", "/shared/m.jsonl", force_add=True)
    for each, path in ((cfg, f"{tmp_path}/elsewhere/metrics.jsonl"), (configured, "/shared/m.jsonl")):
        prepare(each)
        assert shipped(each, "env_vars") == {
            "VERL_PLATFORM": "cpu",
            "VERL_FILE_LOGGER_ROOT": str(tmp_path),
            "VERL_FILE_LOGGER_PATH": path,
            "TENSORBOARD_DIR": "gs://bucket/tb",
        }


def test_what_a_job_brings_itself_is_left_to_it(cfg, monkeypatch):
    """Ray refuses to merge two runtime environments that have a key in common."""
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
    from ray.runtime_env.runtime_env import _merge_runtime_env

    job = {"env_vars": {"WANDB_DIR": "/job/wandb", "VERL_FILE_LOGGER_ROOT": "/job"}}
    monkeypatch.setenv("WANDB_DIR", "/job/wandb")  # the driver of a job has its variables
    monkeypatch.setenv(RAY_JOB_CONFIG_JSON_ENV_VAR, json.dumps({"runtime_env": job}))
    prepare(cfg)
    ours = OmegaConf.to_container(cfg.ray_kwargs.ray_init.runtime_env)
    assert _merge_runtime_env(job, ours)["env_vars"] == {"VERL_PLATFORM": "cpu", **job["env_vars"]}


@pytest.mark.parametrize("ship, count", [(True, 4), (False, 2)])
def test_the_package_is_added_to_the_users_modules_unless_switched_off(cfg, tmp_path, ship, count):
    modules = ["rewards", "s3://bucket/flashrl_verl_more.zip"]
    cfg.ray_kwargs.ray_init.runtime_env = {"env_vars": None, "py_modules": modules}
    prepare(cfg, ship_code=ship)
    assert shipped(cfg, "py_modules")[:2] == [f"{tmp_path}/rewards", modules[1]]
    assert len(shipped(cfg, "py_modules")) == count
    trained_there = ["/elsewhere/flashrl_verl", "/elsewhere/flashrl_verl-0.0.9.dist-info"]
    cfg.ray_kwargs.ray_init.runtime_env.py_modules = [*modules, *trained_there]
    prepare(cfg, ship_code=ship)
    assert set(trained_there).isdisjoint(shipped(cfg, "py_modules")) == ship


@pytest.mark.parametrize("address, counts", [(None, 16), ("local", 16), ("127.0.0.1:6379", None)])
def test_resources_are_asked_of_a_cluster_of_ones_own_only(cfg, monkeypatch, address, counts):
    del cfg.ray_kwargs.ray_init.runtime_env
    cfg.ray_kwargs.ray_init.num_cpus = 16
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    prepare(cfg)
    assert cfg.ray_kwargs.ray_init.num_cpus == counts and len(shipped(cfg, "py_modules")) == 2


def test_checkpoints_are_refused_in_rays_temporary_copy(cfg, tmp_path, monkeypatch):
    job = tmp_path / "runtime_resources/working_dir_files/_ray_pkg_1"
    job.mkdir(parents=True)
    monkeypatch.chdir(job)
    with pytest.raises(ConfigError, match="trainer.default_local_dir=.*deleted.*trainer.save_freq=-1"):
        prepare(copy.deepcopy(cfg))
    cfg.trainer.save_freq = -1
    prepare(copy.deepcopy(cfg))
    cfg.trainer.rollout_data_dir = "dump"
    with pytest.raises(ConfigError, match="trainer.rollout_data_dir=.*deleted.*, or null$"):
        prepare(copy.deepcopy(cfg))
    cfg.trainer.update({"rollout_data_dir": None, "save_freq": 1, "default_local_dir": "/shared/checkpoints"})
    prepare(cfg)
    assert shipped(cfg, "env_vars")["VERL_FILE_LOGGER_ROOT"] == "/shared/checkpoints"
