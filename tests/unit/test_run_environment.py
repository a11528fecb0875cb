# SPDX-License-Identifier: Apache-2.0
"""What the environment lacks is said before Ray starts."""

import socket
import types

import pytest
import refusals
from omegaconf import OmegaConf
from refusals import ENGINE

from flashrl_verl import run_environment
from flashrl_verl.errors import ConfigError
from flashrl_verl.run_environment import settle_packages
from flashrl_verl.settings import ACTOR
from flashrl_verl.upstream import patches
from flashrl_verl.validation import ATTENTION, validate_config

ACTOR_MODEL = "actor_rollout_ref.model"


def changed(settings: dict, hardware: str = "cuda"):
    return refusals.changed({"trainer.logger": ["console"], **settings}, hardware)


@pytest.fixture
def online(monkeypatch, tmp_path):
    """Trackers are installed, and nobody has logged in."""
    monkeypatch.setattr(
        run_environment, "find_spec", find := lambda name, real=run_environment.find_spec: real(name) or "there"
    )
    assert find("wandb")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "SWANLAB_API_KEY", "SWANLAB_MODE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_tracker_without_a_key_is_refused_and_with_one_it_is_not(online, monkeypatch):
    cfg = changed({"trainer.logger": ["console", "wandb"]})
    with pytest.raises(ConfigError, match="wandb has no key here. Remedy: .*WANDB_MODE=offline"):
        settle_packages(cfg)
    (online / "netrc").write_text("machine api.wandb.ai login user password 0123\n")
    settle_packages(cfg)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example:8080")
    with pytest.raises(ConfigError, match="no key"):
        settle_packages(cfg)
    monkeypatch.setenv("WANDB_MODE", "offline")
    settle_packages(cfg)
    monkeypatch.delenv("WANDB_MODE")
    variables = "ray_kwargs.ray_init.runtime_env.env_vars.WANDB_API_KEY"
    settle_packages(changed({"trainer.logger": ["wandb"], variables: "0123"}))
    with socket.create_server(("127.0.0.1", 0)) as cluster:  # whose nodes may have one
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{cluster.getsockname()[1]}")
        settle_packages(cfg)
        monkeypatch.setattr("ray.is_initialized", lambda: True)  # in its trainer
        with pytest.raises(ConfigError, match="no key"):
            settle_packages(cfg)


def test_a_tracker_that_is_not_installed_is_refused():
    with pytest.raises(ConfigError, match="trainer.logger=clearml is refused: clearml is not installed"):
        settle_packages(changed({"trainer.logger": ["clearml"]}))


def test_arguments_that_vllm_lacks_are_refused_and_those_it_has_are_not():
    has = {
        "kv_cache_memory_bytes": 1,
        "enforce-eager": True,
        "no-enable-prefix-caching": True,
        "compilation_config.mode": 3,
    }
    settle_packages(
        changed({ENGINE: {**has, "disable_log_requests_": None, "served_model_name": "x", "root_path": "/a"}}, "cpu")
    )
    for name in ("kv_cache_memory_byte_s", "swap_spaces"):
        with pytest.raises(ConfigError, match=f"{name}=1 is refused: vLLM .* has no such argument"):
            settle_packages(changed({ENGINE: {name: 1}}, "cpu"))


def test_a_variable_that_vllm_does_not_read_and_a_cluster_that_is_not_there_are_refused(monkeypatch):
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "XFORMERS")
    with pytest.raises(ConfigError, match="VLLM_ATTENTION_BACKEND=XFORMERS is refused.*attention_backend"):
        settle_packages(changed({}, "cpu"))
    monkeypatch.delenv("VLLM_ATTENTION_BACKEND")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free.getsockname()[1]}")
        with pytest.raises(ConfigError, match="nobody answers there"):
            settle_packages(changed({}, "cpu"))


def test_without_flash_attn_the_trainer_takes_pytorchs_own_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr(run_environment, "version_of", lambda name: False)
    monkeypatch.setattr(
        run_environment, "find_spec", lambda name, real=run_environment.find_spec: name == "vllm" and real(name) or None
    )
    cfg = changed({f"{ACTOR}.ulysses_sequence_parallel_size": 2})
    settle_packages(cfg)
    assert OmegaConf.select(cfg, ATTENTION) == "varlen"
    assert f"{ATTENTION}=varlen" in capsys.readouterr().err
    validate_config(cfg)  # with sequence parallelism too
    with pytest.raises(ConfigError, match="flash-attn is not installed.*leave it out"):
        settle_packages(changed({ATTENTION: "flash_attention_2"}))
    with pytest.raises(ConfigError, match=r"Remedy: \+critic\.model.*=sdpa"):
        settle_packages(changed({"critic.enable": True}))
    with pytest.raises(ConfigError, match=r"use_remove_padding=false.*=sdpa"):
        settle_packages(changed({f"{ACTOR_MODEL}.use_remove_padding": False}))
    with pytest.raises(ConfigError, match="liger-kernel is not installed.*use_liger=false"):
        settle_packages(changed({"actor_rollout_ref.model.use_liger": True}))
    for kept in (changed({}, "cpu"), changed({ATTENTION: "eager"})):
        before = OmegaConf.to_container(kept)
        settle_packages(kept)
        assert OmegaConf.to_container(kept) == before


def test_flash_attn_4_alone_is_no_flash_attn_and_is_named_where_it_is_taken(monkeypatch, capsys):
    monkeypatch.setattr(run_environment, "version_of", lambda name: name == "flash-attn-4")
    settle_packages(cfg := changed({}))
    assert OmegaConf.select(cfg, ATTENTION) == "varlen" and "FlashAttention 4" in capsys.readouterr().err
    monkeypatch.setattr(run_environment, "version_of", lambda name: True)
    settle_packages(cfg := changed({}))
    assert OmegaConf.select(cfg, ATTENTION) is None


def test_groups_of_workers_look_for_ports_apart_from_each_other_and_from_those_that_linux_gives():
    asked = []
    verls = types.SimpleNamespace(RayWorkerGroup=lambda **kwargs: asked.append(kwargs))
    for _ in range(2):  # a second trainer of a process
        patches.choose_ports(verls)
    for _ in range(20):
        verls.RayWorkerGroup(resource_pool="pool")
    starts = [kwargs.pop("master_port_range") for kwargs in asked]
    assert all(20_000 <= start < end == 30_000 for start, end in starts) and len({start for start, _ in starts}) > 10
    assert asked == [{"resource_pool": "pool"}] * 20
