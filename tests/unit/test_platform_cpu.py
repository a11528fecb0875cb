# SPDX-License-Identifier: Apache-2.0
"""The CPU platform is used when it is chosen and only then; the one patch behaves as the ledger says. Each case is a
process: verl decides its platform once."""

import subprocess
import sys

import pytest


def run(code: str, **variables: str) -> subprocess.CompletedProcess:
    import os

    env = {k: v for k, v in os.environ.items() if k != "VERL_PLATFORM"} | variables
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=400)


def test_it_is_never_chosen_because_no_accelerator_was_found():
    code = (
        "import torch; torch.cuda.is_available = lambda: False\n"
        "import flashrl_verl.plugins.verl\n"
        "from verl.plugin.platform import get_platform; print('PLATFORM', get_platform().device_name)"
    )
    assert "PLATFORM cuda" in run(code).stdout


def test_it_is_chosen_by_name_and_the_patched_group_is_gloo():
    code = (
        "import functools, flashrl_verl.plugins.verl\n"
        "from verl.plugin.platform import get_platform\n"
        "import verl.utils.distributed as d\n"
        "p = d.initialize_global_process_group_ray\n"
        "print('PLATFORM', get_platform().device_name, isinstance(p, functools.partial), p.keywords)\n"
        "import verl.workers.engine.fsdp.transformer_impl as t\n"
        "from verl.workers.engine import EngineRegistry\n"
        "print('ENGINE', EngineRegistry.get_engine_cls('language_model', 'fsdp2') is t.FSDPEngineWithLMHead)\n"
    )
    out = run(code, VERL_PLATFORM="cpu").stdout
    assert "PLATFORM cpu True {'backend': 'gloo'}" in out and "ENGINE True" in out


def test_verl_is_left_alone_on_other_platforms():
    code = (
        "import functools, flashrl_verl.plugins.verl, verl.utils.distributed as d\n"
        "print('PATCHED', isinstance(d.initialize_global_process_group_ray, functools.partial))"
    )
    assert "PATCHED False" in run(code, VERL_PLATFORM="nvidia").stdout


def test_the_reason_for_the_patch_still_holds():
    """When torch accepts a repeated device, the ledger's entry can go."""
    import torch.distributed as dist

    with pytest.raises(ValueError):
        dist.init_process_group("cpu:gloo,cpu:gloo", rank=0, world_size=1, init_method="tcp://127.0.0.1:0")


def test_a_config_for_the_cpu_contradicting_the_environment_is_refused():
    code = (
        "from omegaconf import OmegaConf\nfrom flashrl_verl.platforms import activate\n"
        "activate(OmegaConf.create({'trainer': {'device': 'cpu'}}))"
    )
    result = run(code, VERL_PLATFORM="nvidia")
    assert result.returncode != 0 and "unset it or choose hardware=cuda" in result.stderr
