# SPDX-License-Identifier: Apache-2.0
"""A server stops unless the model its engine really holds is what the settings say."""

from types import SimpleNamespace

import pytest
import torch

from flashrl_verl.errors import FlashRLError
from flashrl_verl.rollout.inspection import head_dtype, require_settings
from flashrl_verl.settings import FlashRLConfig

HELD = {
    "precision": "int8",
    "quantized": {"int8": 8},
    "quantized_layers": 8,
    "quantized_names": ["model.layers.0.mlp.down_proj"],
    "rotated": 2,
    "unrotated": [],
    "quantized_bytes_as_bf16": 4096,
    "unquantized_layers": {},
    "never_quantized": {"model.layers.0.mlp.gate": 512},
    "kept_layers": [],
    "ignore_unused": [],
    "head_dtype": "bfloat16",
    "kv_cache": {"dtypes": {"auto": 2}, "backends": ["FLASH_ATTN"], "equalized": 0},
}
"""What ``flashrl_layers`` says of a small INT8 model; every run of the recipe compares the keys with an
engine's."""

BF16 = {
    "precision": "bf16",
    "quantized": {},
    "quantized_layers": 0,
    "unquantized_layers": {"a": "ColumnParallelLinear"},
}
FP8 = {"precision": "fp8", "quantized": {"float8_e4m3fn": 8}, "rotated": 0}
ROW, NEW = {"unquantized_layers": {"x": "RowParallelLinear"}}, {"unquantized_layers": {"x": "NewLinear"}}
NO_HEAD = {"head_dtype": "unknown (TypeError: x)"}


def kv_cache(equalized: int = 2, **dtypes: int) -> dict:
    return {"kv_cache": {"dtypes": dtypes, "backends": ["FLASH_ATTN"], "equalized": equalized}}


@pytest.mark.parametrize(
    ("settings", "held"),
    [
        ({}, {}),
        ({}, {**ROW, "kept_layers": ["x"]}),
        ({}, NO_HEAD),
        ({}, kv_cache(bfloat16=2)),
        ({"precision": "fp8"}, FP8),
        ({"precision": "bf16"}, BF16),
        ({"fp32_lm_head": True}, {"head_dtype": "float32"}),
        ({"kv_cache": "int8_per_token_head"}, kv_cache(int8_per_token_head=2)),
    ],
)
def test_an_engine_that_holds_what_was_asked_for_is_accepted(settings, held):
    require_settings(FlashRLConfig(**settings), {**HELD, **held})


@pytest.mark.parametrize(
    ("settings", "held", "words"),
    [
        ({}, {"precision": "bf16"}, ["quantization 'bf16'", "engine_kwargs.vllm"]),
        ({}, NEW, ["'x'", "NewLinear", "flashrl.ignore"]),
        ({}, ROW, ["RowParallelLinear", "precision=bf16"]),
        (
            {},
            {"never_quantized": {"model.layers.0.experts": 4097}},
            ["most of this model", "0.experts", "precision=bf16"],
        ),
        ({}, {"quantized": {"int8": 7, "float8_e4m3fn": 1}}, ["float8_e4m3fn", "flashrl.precision=int8"]),
        ({}, {"quantized": {}, "quantized_layers": 0, "kept_layers": ["a", "b"]}, ["none", "2 layer"]),
        ({"precision": "fp8"}, {"precision": "fp8"}, ["flashrl.precision=fp8", "'int8': 8"]),
        ({"precision": "bf16"}, {"precision": "bf16"}, ["flashrl.precision=bf16", "'int8': 8"]),
        # layers to keep that the model does not have
        ({}, {"ignore_unused": ["lm_haed"]}, ["lm_haed", "flashrl.ignore", "model.layers.0.mlp.down_proj"]),
        # the head
        ({"fp32_lm_head": True}, {}, ["flashrl.fp32_lm_head=true", "in bfloat16", "fp32_lm_head=false"]),
        ({"fp32_lm_head": True}, NO_HEAD, ["in unknown (TypeError: x)", "fp32_lm_head=false"]),
        ({}, {"head_dtype": "float32"}, ["flashrl.fp32_lm_head=false", "head_dtype", "fp32_lm_head=true"]),
        # the KV cache
        ({"kv_cache": "int8_per_token_head"}, {}, ["{'auto': 2}", "FLASH_ATTN", "kv_cache=auto"]),
        ({"kv_cache": "int8_per_token_head"}, kv_cache(int8_per_token_head=1, auto=1), ["'auto': 1"]),
        ({"kv_cache": "int8_per_token_head"}, kv_cache(), ["none"]),
        ({"kv_cache": "int8_per_token_head"}, kv_cache(1, int8_per_token_head=2), ["only 1 of 2", "kv_cache=auto"]),
        ({}, kv_cache(fp8=2), ["flashrl.kv_cache=auto", "{'fp8': 2}"]),
    ],
)
def test_an_engine_that_holds_something_else_stops_the_run_with_the_reason(settings, held, words):
    with pytest.raises(FlashRLError) as caught:
        require_settings(FlashRLConfig(**settings), {**HELD, **held})
    assert all(word in str(caught.value) for word in words), str(caught.value)


# ---- the precision of the logits, from their values, whatever tensor they come in ----


WEIGHT = torch.randn(300, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
DUMMY = (torch.rand(300, 64, generator=torch.Generator().manual_seed(2)) * 2e-3 - 1e-3).bfloat16()
"""As vLLM's ``load_format=dummy`` makes them: uniform within 1e-3."""


class Model:
    """Stands where a vLLM model does: only ``compute_logits`` is asked, on the device of its parameters."""

    def __init__(self, compute_logits):
        self.compute_logits = compute_logits

    def parameters(self):
        return iter([WEIGHT])


CONFIG = SimpleNamespace(dtype=torch.bfloat16, get_hidden_size=lambda: 64)


def masked(logits: torch.Tensor) -> torch.Tensor:
    logits[..., 250:] = float("-inf")  # as verl masks tokens past the tokenizer
    return logits


@pytest.mark.parametrize(
    "compute, found",
    [
        (lambda h: h.float() @ WEIGHT.float().t(), "float32"),
        (lambda h: masked(h.float() @ WEIGHT.float().t()), "float32"),
        (lambda h: h @ WEIGHT.t(), "bfloat16"),
        (lambda h: (h @ WEIGHT.t()).float(), "bfloat16"),  # rounded first, cast later
        (lambda h: masked((h @ WEIGHT.t()).float()), "bfloat16"),
        (lambda h: h.float() @ DUMMY.float().t(), "float32"),
        (lambda h: None, "unknown (this rank gets no logits)"),
        (lambda h: WEIGHT[:3, :3] @ h, "unknown (RuntimeError"),
    ],
)
def test_logits_are_told_apart_by_their_values(compute, found):
    assert head_dtype(Model(compute), CONFIG).startswith(found)
