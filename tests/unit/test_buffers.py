# SPDX-License-Identifier: Apache-2.0
"""With masters in BF16 only parameters are, not the frequencies of RoPE."""

import types

import pytest
import torch
from tiny_models import make
from transformers import AutoModelForCausalLM
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from flashrl_verl.upstream.patches import keep_buffers


@pytest.mark.parametrize("rank", [0, 1])
def test_verls_model_in_bf16_has_the_buffers_of_one_in_fp32(tmp_path, rank):
    made = make("qwen2.5")
    made.save_pretrained(tmp_path)
    model_config = types.SimpleNamespace(
        hf_config=made.config,
        model_type="language_model",
        local_path=str(tmp_path),
        trust_remote_code=False,
        use_liger=False,
        use_fused_kernels=False,
        fused_kernel_options=None,
        enable_gradient_checkpointing=False,
    )
    engine = types.SimpleNamespace(
        engine_config=types.SimpleNamespace(model_dtype="bfloat16", forward_only=False),
        model_config=model_config,
        device_mesh=types.SimpleNamespace(get_coordinate=lambda: [rank]),  # parameters of rank 1 are on the meta device
        use_remove_padding=False,
        ulysses_sequence_parallel_size=1,
    )
    patched = type("FSDPEngine", (), {"_build_module": FSDPEngine._build_module})
    keep_buffers(patched)
    module, verls = patched._build_module(engine), FSDPEngine._build_module(engine)
    assert {(p.dtype, p.is_meta) for p in module.parameters()} == {(torch.bfloat16, rank == 1)}
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).named_buffers())
    found, rounded = dict(module.named_buffers()), dict(verls.named_buffers())
    assert found.keys() == loaded.keys() and any("inv_freq" in key for key in found)
    for key, buffer in loaded.items():
        torch.testing.assert_close(found[key], buffer, rtol=0, atol=0)
    assert any((rounded[key] - buffer).abs().max() > 0 for key, buffer in loaded.items()), "drop the entry"
