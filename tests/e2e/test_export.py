# SPDX-License-Identifier: Apache-2.0
"""A trained FSDP checkpoint, exported, in vLLM as anybody has it: it gives the greedy tokens of the rollout (INT8: of
one without rotation); and exported in BF16, in vLLM with this package: it is the rollout."""

import random
from pathlib import Path

import plain_vllm
import pytest
import torch
from engines import CUDA, Refit, engine, in_own_process
from saved_checkpoints import save
from tiny_models import VOCAB, make, wire

from flashrl_verl.cli import app
from flashrl_verl.refit.sender import cast_for_rollout

pytestmark = [pytest.mark.slow]

TOKENS = 12
_DRAW = random.Random(0)
PROMPTS = [[_DRAW.randrange(3, VOCAB) for _ in range(_DRAW.randrange(3, 24))] for _ in range(40)]


def rollout(folder: Path, weights: dict[str, torch.Tensor], settings: dict):
    """Greedy tokens of the rollout's engine after a weight update, and their log-probs."""
    with engine(folder, settings) as llm:
        Refit(llm)(weights, step=0)
        return plain_vllm.greedy(llm, PROMPTS, TOKENS)


def served(checkpoint: Path, scratch: Path, *words: str) -> dict:
    """What plain vLLM answers with the export."""
    app(["export", str(checkpoint), "--output", str(scratch / "out"), *words], standalone_mode=False)
    answer = plain_vllm.ask(scratch / "out", PROMPTS, TOKENS, scratch)
    assert answer["quantization"] == "compressed-tensors"
    return answer


@pytest.mark.parametrize("precision", ["int8", pytest.param("fp8", marks=pytest.mark.gpu)])
def test_an_8_bit_export_gives_the_rollouts_greedy_tokens_in_plain_vllm(tmp_path, precision):
    # 352: vLLM 0.24 cannot load a compressed-tensors FP8 weight with a dimension that is no multiple of 16.
    checkpoint, weights = save(2, tmp_path, intermediate=352)
    sent = dict(cast_for_rollout(weights.items(), torch.bfloat16))
    settings = {"precision": precision, "ignore": ("re:.*o_proj",), "rotation": False if precision == "int8" else None}
    # In a new process: engines of other tests leave something behind that moves FP8's log-probs by 0.06.
    tokens, log_probs = in_own_process(rollout, checkpoint / "actor" / "huggingface", sent, settings)
    (checkpoint / "config.yaml").write_text("flashrl: {ignore: ['re:.*o_proj']}")
    answer = served(checkpoint, tmp_path, "--format", precision)
    same = [one == other for one, other in zip(answer["tokens"], tokens, strict=True)]
    # On a CPU vLLM multiplies with oneDNN and the rollout in float32, so that a tie may fall on the other side (34 of
    # 40 are alike without VNNI).
    assert all(same) if CUDA else sum(same) >= 0.8 * len(same), sum(same)
    far = (torch.tensor(answer["log_probs"]) - torch.tensor(log_probs)).abs()
    assert far[torch.tensor(same)].max() < (1e-3 if CUDA else 5e-2)
    # The prompts make a difference, or equality would say nothing.
    assert len({tuple(response) for response in tokens}) > len(tokens) / 2


def test_a_bf16_export_served_with_this_package_is_the_rollout(tmp_path):
    checkpoint, weights = save(2, tmp_path, intermediate=352)
    sent = dict(cast_for_rollout(weights.items(), torch.bfloat16))
    expected = rollout(checkpoint / "actor" / "huggingface", sent, {"precision": "int8"})
    app(["export", str(checkpoint), "--output", str(tmp_path / "out"), "--format", "bf16"], standalone_mode=False)
    with engine(tmp_path / "out", {"precision": "int8"}, load_format="auto") as llm:
        assert plain_vllm.greedy(llm, PROMPTS, TOKENS) == expected


@pytest.mark.gpu  # plain vLLM has no INT8 experts for a CPU
def test_experts_of_a_hugging_face_folder_load_in_plain_vllm(tmp_path):
    model = make("qwen3-moe")
    model.save_pretrained(tmp_path / "model")
    tokens, log_probs = in_own_process(rollout, tmp_path / "model", wire(model), {"precision": "fp8"})
    answer = served(tmp_path / "model", tmp_path, "--format", "fp8")
    first = torch.tensor([[line[0] for line in side] for side in (answer["log_probs"], log_probs)])
    assert (first[0] - first[1]).abs().max() < 5e-2
    same = sum(one[:4] == other[:4] for one, other in zip(answer["tokens"], tokens, strict=True))
    assert same >= 0.8 * len(PROMPTS), same
