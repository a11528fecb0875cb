# SPDX-License-Identifier: Apache-2.0
"""verl and vLLM load the plugins by themselves."""

import os
import subprocess
import sys

import pytest

from flashrl_verl.errors import FlashRLError

FRESH = """
import torch
torch.cuda.is_available = lambda: False
from vllm.plugins import load_general_plugins
from vllm.model_executor.layers.quantization import get_quantization_config
load_general_plugins()
quantization = get_quantization_config("flashrl").__name__
from flashrl_verl.plugins.vllm import register
register()
import verl  # loads its plugins
from verl.plugin.platform import get_platform
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import RolloutReplicaRegistry
import flashrl_verl.trainer.refill  # loads verl.trainer.ppo.v1, and that our trainer, while it is half read
from verl.trainer.ppo.v1.trainer_base import get_trainer_cls
import verl.utils.distributed
print("REGISTERED", RolloutReplicaRegistry.get("flashrl").__name__, get_rollout_class("flashrl", "async").__name__,
    get_trainer_cls("flashrl").__name__, quantization)
print("PLATFORM", get_platform().device_name)
print("PATCHED", hasattr(verl.utils.distributed.initialize_global_process_group_ray, "keywords"))
"""


def test_a_fresh_process_has_all_that_is_registered_and_no_accelerator_does_not_mean_the_cpu_platform():
    env = {key: value for key, value in os.environ.items() if key != "VERL_PLATFORM"}
    done = subprocess.run([sys.executable, "-c", FRESH], env=env, capture_output=True, text=True, timeout=400)
    assert "REGISTERED FlashRLReplica FlashRLServerAdapter FlashRLTrainer FlashRLQuantizationConfig" in done.stdout, (
        done.stderr
    )
    assert "PLATFORM cuda\nPATCHED False" in done.stdout


def test_a_plugin_that_verl_was_told_not_to_load_is_an_error(monkeypatch):
    from flashrl_verl.plugins.verl import require_registered

    require_registered()
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "another")
    with pytest.raises(FlashRLError, match="VERL_USE_EXTERNAL_PLUGINS='another'"):
        require_registered()


def test_rotated_experts_whose_inputs_vllm_quantizes_by_another_function_are_refused():
    """They would be rotated weights times activations that are not."""
    from vllm.model_executor.layers.fused_moe import fused_moe

    from flashrl_verl.upstream.patches import quantizing_experts_inputs

    vllms = fused_moe.moe_kernel_quantize_input
    with pytest.raises(FlashRLError, match=r"1 of 2 times.*experts.*flashrl\.ignore"):
        with quantizing_experts_inputs(fused_moe, lambda x: x):
            assert fused_moe.moe_kernel_quantize_input(A=3, A_scale=None, per_act_token_quant=True) == 3
    assert fused_moe.moe_kernel_quantize_input is vllms
