# SPDX-License-Identifier: Apache-2.0
"""`flashrl bench rollout` with real engines: they are what their arms say, their weights were written, their KV cache
is counted."""

import json
import os
import subprocess
import sys

import pytest
from transformers import Qwen2Config

pytestmark = [pytest.mark.cpu_e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

KV_ELEMENTS_PER_TOKEN = 2 * 2 * 2 * 32  # layers, K and V, heads, channels
TENSORS = 2 * (7 + 3 + 2) + 3  # projections, biases and norms of a layer; embedding, head, last norm


def test_two_arms_are_measured_and_their_memory_is_the_shapes(tmp_path):
    config = Qwen2Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False,
        architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path / "shape")
    words = ["--model", str(tmp_path / "shape"), "--arm", "bf16,int8", "--work", "4x16+40", "--repeats", "2"]
    words += ["--max-num-batched-tokens", "512", "--max-num-seqs", "16", "--gpu-memory-utilization", "0.2"]
    command = [sys.executable, "-m", "flashrl_verl", "bench", "rollout", *words, "--output", str(tmp_path / "out")]
    done = subprocess.run(
        command, env=dict(os.environ, HF_HUB_OFFLINE="1"), capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out" / "rollout.json").read_text())["results"]
    bf16, int8 = (result["answer"] for result in results)
    projections = 2 * (128 * (128 + 64 + 64) + 128 * 128 + 3 * 128 * 256)
    assert bf16["memory"]["weight_bytes"] - int8["memory"]["weight_bytes"] == projections - 4 * 2 * (
        256 + 128 + 512 + 128
    )
    assert not bf16["layers"]["quantized"]
    assert sum(int8["layers"]["quantized"].values()) == 8
    for answer in (bf16, int8):
        assert answer["memory"]["kv_bytes"] == answer["memory"]["kv_tokens"] * KV_ELEMENTS_PER_TOKEN * 2
        # vLLM's dummy weights have another deviation, and codes that nobody wrote are zeros.
        assert answer["weights"]["tensors"] == TENSORS
        assert answer["weights"]["zeros"] < 0.03 and answer["weights"]["std"] == pytest.approx(0.02, rel=0.05)
        (timing,) = answer["timings"]
        assert len(timing["seconds"]) == 2 and min(timing["seconds"]) > 0
        profile = timing["profile"]
        # The first prompts may be some steps ahead when the last one arrives.
        assert profile["sequences"] == 4 and profile["steps"] == 8 and 16 <= profile["context"] <= 16 + 40
        assert profile["milliseconds"]["linear layers"] > 0 and profile["milliseconds"]["attention"] > 0
        longest = sum(milliseconds for _, _, milliseconds, _ in profile["kernels"])
        assert 0.5 < longest / sum(profile["milliseconds"].values()) <= 1 + 1e-9
    assert "A decode step" in done.stdout and "x BF16" in done.stdout
