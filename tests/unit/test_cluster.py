# SPDX-License-Identifier: Apache-2.0
"""A cluster that cannot hold the run is refused; what reaches a run's processes does not depend on their node's
environment."""

import copy
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from omegaconf import OmegaConf

from flashrl_verl.errors import ConfigError
from flashrl_verl.trainer.cluster import LOG_PATHS, check_cluster, check_gpus, checked_runner, package, prepare


@pytest.mark.parametrize("cluster", [[8.0] * 4, [8.0] * 5, [0.0, 8.0, 8.0, 8.0, 8.0], [16.0, 16.0]])
def test_a_cluster_that_holds_the_run_is_accepted(cluster):
    check_gpus(4, 8, cluster)


@pytest.mark.parametrize("cluster", [[], [0.0], [8.0] * 3, [4.0] * 8, [31.0]])
def test_too_few_gpus_on_a_node_are_refused_with_both_keys_and_the_count(cluster):
    with pytest.raises(ConfigError) as caught:
        check_gpus(4, 8, cluster)
    message = str(caught.value)
    assert "trainer.nnodes=4" in message and "trainer.n_gpus_per_node=8" in message and "\n" not in message
    assert f"has {sum(cluster):g} GPUs on {len(cluster)} node(s)" in message and "ray status" in message


@pytest.mark.parametrize("nothing", [0, -1, None])
@pytest.mark.parametrize("cluster", [[], [8.0]])
def test_a_run_of_nothing_is_refused_by_its_key(nothing, cluster):
    with pytest.raises(ConfigError, match="^trainer.nnodes="):
        check_gpus(nothing, 8, cluster)
    with pytest.raises(ConfigError, match="^trainer.n_gpus_per_node="):
        check_gpus(1, nothing, cluster)


# ---- a real cluster ----


@ray.remote(num_cpus=0)
class Runner:
    """In the place of verl's task runner: an actor that remembers what it was made with."""

    def __init__(self, *words, **more):
        self._made_with = words, more

    def made_with(self):
        return self._made_with


def _run(nodes: int, gpus: int):
    return OmegaConf.create({"trainer": {"nnodes": nodes, "n_gpus_per_node": gpus}})


def test_no_cluster_is_asked_before_the_runner_is_made():
    """verl initializes Ray in between."""
    before = ray.is_initialized()
    checked_runner(Runner, _run(1, 3)).options(name="later")
    assert ray.is_initialized() == before


@pytest.fixture(scope="module")
def one_node():
    """A Ray of this test's own: one node with two GPUs, which are logical as on the CPU platform."""
    ray.init("local", num_cpus=1, num_gpus=2, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 2), (2, 1)])
def test_a_live_cluster_is_counted(one_node, nodes, gpus):
    check_cluster(_run(nodes, gpus))


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 3), (2, 2), (3, 1)])
def test_a_live_cluster_that_is_too_small_is_refused(one_node, nodes, gpus):
    with pytest.raises(ConfigError, match=r"the Ray cluster has 2 GPUs on 1 node\(s\) \(2\)"):
        check_cluster(_run(nodes, gpus))


def test_a_runner_that_fits_is_made_with_its_arguments_and_options(one_node):
    runner = checked_runner(Runner, _run(1, 2))
    assert ray.get(runner.remote("word", key=1).made_with.remote()) == (("word",), {"key": 1})
    actor = runner.options(name="named").remote("again")
    assert ray.get(ray.get_actor("named").made_with.remote()) == (("again",), {})
    ray.kill(actor)


def test_a_runner_that_does_not_fit_is_refused_and_not_made(one_node):
    runner = checked_runner(Runner, _run(1, 3))
    for made in (runner, runner.options(name="refused")):
        with pytest.raises(ConfigError, match="trainer.n_gpus_per_node=3 is refused"):
            made.remote()
    with pytest.raises(ValueError, match="refused"):
        ray.get_actor("refused")


# ---- what every node gets ----


@pytest.fixture
def cfg(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR", *LOG_PATHS):
        monkeypatch.delenv(name, raising=False)
    for folder in ("model", "elsewhere"):
        (tmp_path / folder).mkdir()
    (tmp_path / "train.parquet").touch()
    return OmegaConf.create(
        {
            "data": {"train_files": "train.parquet", "val_files": ["train.parquet", "hdfs://nodes/val.parquet"]},
            "actor_rollout_ref": {"model": {"path": "model"}},
            "reward": {"custom_reward_function": {"path": "pkg://flashrl_verl.quickstart.reward"}},
            "trainer": {"default_local_dir": "checkpoints/run", "save_freq": 10},
            "ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": {"VERL_PLATFORM": "cpu"}}}},
        }
    )


def variables(cfg) -> dict:
    return OmegaConf.to_container(cfg.ray_kwargs.ray_init.runtime_env.env_vars)


def test_the_plugins_are_found_from_what_is_shipped_alone(tmp_path):
    """Ray puts each folder into a folder of its own, and those on PYTHONPATH."""
    shipped = []
    for i, folder in enumerate(package()):
        shutil.copytree(folder, tmp_path / str(i) / Path(folder).name, ignore=shutil.ignore_patterns("__pycache__"))
        shipped.append(str(tmp_path / str(i)))
    program = (
        "import importlib.metadata as m, json, flashrl_verl\n"
        "groups = [m.entry_points(group=g) for g in ('verl.plugins', 'vllm.general_plugins')]\n"
        "print(json.dumps([flashrl_verl.__file__, str(m.distribution('flashrl-verl').locate_file('')),\n"
        "                  *([e.value for e in g if e.name == 'flashrl'] for g in groups)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(shipped)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    code, metadata, of_verl, of_vllm = json.loads(done.stdout)
    assert code.startswith(shipped[0]) and metadata.startswith(shipped[1])
    assert of_verl == ["flashrl_verl.plugins.verl"] and of_vllm == ["flashrl_verl.plugins.vllm:register"]


def test_local_paths_are_made_absolute_and_others_left_alone(cfg, tmp_path):
    prepare(cfg)
    assert cfg.data.train_files == f"{tmp_path}/train.parquet"
    assert list(cfg.data.val_files) == [f"{tmp_path}/train.parquet", "hdfs://nodes/val.parquet"]
    assert cfg.actor_rollout_ref.model.path == f"{tmp_path}/model"
    assert cfg.reward.custom_reward_function.path == "pkg://flashrl_verl.quickstart.reward"
    assert cfg.trainer.default_local_dir == f"{tmp_path}/checkpoints/run", "made later"


def test_a_checkpoint_to_resume_from_is_the_drivers_and_names_and_addresses_stay(cfg, tmp_path, monkeypatch):
    (tmp_path / "checkpoints/run/global_step_2").mkdir(parents=True)
    cfg.actor_rollout_ref.model.path = "Qwen/Qwen2.5-32B"
    OmegaConf.update(cfg, "trainer.resume_from_path", "checkpoints/run/global_step_2", force_add=True)
    monkeypatch.setenv("TENSORBOARD_DIR", "gs://bucket/tb")
    prepare(cfg)
    assert cfg.trainer.resume_from_path == f"{tmp_path}/checkpoints/run/global_step_2"
    assert variables(cfg)["TENSORBOARD_DIR"] == "gs://bucket/tb"
    assert cfg.actor_rollout_ref.model.path == "Qwen/Qwen2.5-32B", "a name of the model hub"


def test_what_a_job_brings_itself_is_left_to_it(cfg, monkeypatch):
    """Ray refuses to merge two runtime environments that have a key in common."""
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
    from ray.runtime_env.runtime_env import _merge_runtime_env

    job = {"env_vars": {"WANDB_DIR": "/job/wandb", "VERL_FILE_LOGGER_ROOT": "/job"}}
    monkeypatch.setenv("WANDB_DIR", "/job/wandb")  # the driver of a job has its variables
    monkeypatch.setenv(RAY_JOB_CONFIG_JSON_ENV_VAR, json.dumps({"runtime_env": job}))
    prepare(cfg)
    assert variables(cfg) == {"VERL_PLATFORM": "cpu"}
    ours = OmegaConf.to_container(cfg.ray_kwargs.ray_init.runtime_env)
    assert _merge_runtime_env(job, ours)["env_vars"] == {"VERL_PLATFORM": "cpu", **job["env_vars"]}
    monkeypatch.setenv(RAY_JOB_CONFIG_JSON_ENV_VAR, json.dumps({"runtime_env": {"py_modules": ["gcs://x.zip"]}}))
    with pytest.raises(ConfigError, match="ship_code=true with py_modules=.*flashrl.ship_code=false"):
        prepare(cfg)


def test_metrics_go_where_the_drivers_variables_say_and_the_configuration_wins(cfg, tmp_path, monkeypatch):
    configured = copy.deepcopy(cfg)
    configured.ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH = "/shared/metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", "elsewhere/metrics.jsonl")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    prepare(cfg)
    assert variables(cfg) == {
        "VERL_PLATFORM": "cpu",
        "VERL_FILE_LOGGER_ROOT": str(tmp_path),
        "VERL_FILE_LOGGER_PATH": f"{tmp_path}/elsewhere/metrics.jsonl",
    }
    prepare(configured)
    assert variables(configured)["VERL_FILE_LOGGER_PATH"] == "/shared/metrics.jsonl"


@pytest.mark.parametrize("ship, count", [(True, 3), (False, 1)])
def test_the_package_is_added_to_the_users_modules_unless_switched_off(cfg, ship, count):
    OmegaConf.update(cfg, "ray_kwargs.ray_init.runtime_env.py_modules", ["/shared/rewards"], force_add=True)
    prepare(cfg, ship_code=ship)
    modules = list(cfg.ray_kwargs.ray_init.runtime_env.py_modules)
    assert modules[0] == "/shared/rewards" and len(modules) == count


@pytest.mark.parametrize("address, counts", [(None, 16), ("local", 16), ("127.0.0.1:6379", None)])
def test_resources_are_asked_of_a_cluster_of_ones_own_only(cfg, monkeypatch, address, counts):
    OmegaConf.update(cfg, "ray_kwargs.ray_init.num_cpus", 16, force_add=True)
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    prepare(cfg)
    assert cfg.ray_kwargs.ray_init.num_cpus == counts


def test_without_a_runtime_environment_one_is_made(cfg):
    del cfg.ray_kwargs.ray_init.runtime_env
    prepare(cfg)
    assert len(cfg.ray_kwargs.ray_init.runtime_env.py_modules) == 2


def test_metrics_in_rays_temporary_copy_are_warned_of_with_the_remedy(cfg, tmp_path, monkeypatch, logged):
    job = tmp_path / "runtime_resources/working_dir_files/_ray_pkg_1"
    job.mkdir(parents=True)
    monkeypatch.chdir(job)
    cfg.trainer.save_freq = -1
    remedied = copy.deepcopy(cfg)
    for loggers, warnings in ((["console"], 0), (["console", "file"], 1), ("file", 2)):
        OmegaConf.update(cfg, "trainer.logger", loggers, force_add=True)
        cfg.ray_kwargs.ray_init.runtime_env = {"env_vars": {"VERL_PLATFORM": "cpu"}}
        prepare(cfg)
        assert len(logged(logging.WARNING)) == warnings
    [text, _] = logged(logging.WARNING)
    key, _, _ = text.partition("To keep it: +")[2].partition("=")
    OmegaConf.update(remedied, key, "/shared/metrics.jsonl", force_add=True)
    OmegaConf.update(remedied, "trainer.logger", ["file"], force_add=True)
    prepare(remedied)
    assert len(logged(logging.WARNING)) == 2


def test_the_users_modules_are_sent_from_where_the_driver_is_and_addresses_stay(cfg, tmp_path):
    (tmp_path / "rewards").mkdir()
    modules = ["rewards", "s3://bucket/more.zip"]
    cfg.ray_kwargs.ray_init.runtime_env = {"env_vars": None, "py_modules": modules}
    prepare(cfg, ship_code=False)
    assert list(cfg.ray_kwargs.ray_init.runtime_env.py_modules) == [f"{tmp_path}/rewards", modules[1]]


def test_what_ray_is_to_leave_out_would_be_left_out_of_the_package_and_is_refused(cfg):
    cfg.ray_kwargs.ray_init.runtime_env = {"excludes": ["*.yaml"]}
    with pytest.raises(ConfigError, match=r"excludes=\['\*\.yaml'\].*flashrl\.ship_code=false"):
        prepare(cfg)
    prepare(cfg, ship_code=False)


def test_checkpoints_in_rays_temporary_copy_are_refused(cfg):
    cfg.trainer.default_local_dir = "/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1/checkpoints"
    with pytest.raises(ConfigError, match="trainer.default_local_dir=.*deleted.*trainer.save_freq=-1"):
        prepare(cfg)
    cfg.trainer.save_freq = -1
    prepare(cfg)
