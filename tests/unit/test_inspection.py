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
    "unquantized_layers": {},
    "kept_layers": [],
    "kept_numbers": [],
    "ignore_unused": [],
    "head_dtype": "bfloat16",
    "kv_cache": {"dtypes": {"auto": 2}, "backends": ["FLASH_ATTN"]},
}
"""What ``flashrl_layers`` says of a small INT8 model; tests/e2e/test_engine_refit.py compares the keys with an
engine's."""


def require(wanted: str, changes: dict) -> None:
    require_settings(FlashRLConfig(precision=wanted), {**HELD, **changes})


@pytest.mark.parametrize(
    "precision, changes",
    [
        ("int8", {}),
        (
            "int8",
            {"unquantized_layers": {"model.layers.0.x": "RowParallelLinear"}, "kept_layers": ["model.layers.0.x"]},
        ),
        ("fp8", {"precision": "fp8", "quantized": {"float8_e4m3fn": 8}}),
        (
            "bf16",
            {
                "precision": "bf16",
                "quantized": {},
                "quantized_layers": 0,
                "unquantized_layers": {"a": "ColumnParallelLinear"},
            },
        ),
    ],
)
def test_a_model_that_is_what_was_asked_for_is_accepted(precision, changes):
    require(precision, changes)


@pytest.mark.parametrize(
    "precision, changes, words",
    [
        ("int8", {"precision": "bf16"}, ["quantization 'bf16'", "engine_kwargs.vllm"]),
        (
            "int8",
            {"unquantized_layers": {"model.layers.0.x": "NewLinear"}},
            ["layers.0.x", "NewLinear", "flashrl.ignore"],
        ),
        (
            "int8",
            {"unquantized_layers": {"model.layers.0.x": "RowParallelLinear"}},
            ["RowParallelLinear", "precision=bf16"],
        ),
        ("int8", {"quantized": {"int8": 7, "float8_e4m3fn": 1}}, ["float8_e4m3fn", "flashrl.precision=int8"]),
        (
            "int8",
            {"quantized": {}, "quantized_layers": 0, "kept_layers": ["a", "b"]},
            ["none", "keep_first_layers", "2 layer"],
        ),
        ("fp8", {"precision": "fp8"}, ["flashrl.precision=fp8", "'int8': 8"]),
        ("bf16", {"precision": "bf16"}, ["flashrl.precision=bf16", "'int8': 8"]),
        ("int8", {"ignore_unused": ["lm_haed"]}, ["lm_haed", "flashrl.ignore", "model.layers.0.mlp.down_proj"]),
    ],
)
def test_a_model_that_is_something_else_stops_the_run_with_the_reason(precision, changes, words):
    with pytest.raises(FlashRLError) as caught:
        require(precision, changes)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "wanted, found, words",
    [
        (True, "bfloat16", ["flashrl.fp32_lm_head=true", "in bfloat16", "quantization config", "fp32_lm_head=false"]),
        (True, "unknown (TypeError: x)", ["in unknown (TypeError: x)", "fp32_lm_head=false"]),
        (False, "float32", ["flashrl.fp32_lm_head=false", "head_dtype", "fp32_lm_head=true"]),
    ],
)
def test_a_head_that_is_not_the_one_asked_for_stops_the_run(wanted, found, words):
    with pytest.raises(FlashRLError) as caught:
        require_settings(FlashRLConfig(fp32_lm_head=wanted), {**HELD, "head_dtype": found})
    for word in words:
        assert word in str(caught.value)
    right = "float32" if wanted else "bfloat16"
    require_settings(FlashRLConfig(fp32_lm_head=wanted), {**HELD, "head_dtype": right})
    if not wanted:
        require_settings(FlashRLConfig(), {**HELD, "head_dtype": "unknown (TypeError: x)"})


@pytest.mark.parametrize(
    "wanted, dtypes",
    [("auto", {"bfloat16": 2}), ("auto", {"auto": 2}), ("int8_per_token_head", {"int8_per_token_head": 2})],
)
def test_a_kv_cache_that_is_the_one_asked_for_is_accepted(wanted, dtypes):
    require_settings(FlashRLConfig(kv_cache=wanted), {**HELD, "kv_cache": {**HELD["kv_cache"], "dtypes": dtypes}})


@pytest.mark.parametrize(
    "wanted, dtypes, words",
    [
        (
            "int8_per_token_head",
            {"auto": 2},
            ["kv_cache=int8_per_token_head", "{'auto': 2}", "FLASH_ATTN", "kv_cache=auto"],
        ),
        ("int8_per_token_head", {"int8_per_token_head": 1, "auto": 1}, ["'auto': 1"]),
        ("int8_per_token_head", {}, ["none"]),
        ("auto", {"fp8": 2}, ["flashrl.kv_cache=auto", "{'fp8': 2}"]),
    ],
)
def test_another_kv_cache_stops_the_run(wanted, dtypes, words):
    with pytest.raises(FlashRLError) as caught:
        require_settings(FlashRLConfig(kv_cache=wanted), {**HELD, "kv_cache": {**HELD["kv_cache"], "dtypes": dtypes}})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("kept, accepted", [([0, 1, 27], True), ([0, 1], False), ([], False)])
def test_layers_to_keep_that_the_model_does_not_have_are_refused(kept, accepted):
    settings = FlashRLConfig(keep_first_layers=2, keep_last_layers=1)
    held = {**HELD, "kept_numbers": kept}
    if accepted:
        require_settings(settings, held)
        return
    with pytest.raises(FlashRLError, match=f"keep {len(kept)} layers of this model instead of 3.*flashrl.ignore"):
        require_settings(settings, held)


# ---- the precision of the logits, from their values, whatever tensor they come in ----


WEIGHT = torch.randn(300, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


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
        (lambda h: None, "unknown (this rank gets no logits)"),
        (lambda h: WEIGHT[:3, :3] @ h, "unknown (RuntimeError"),
    ],
)
def test_logits_are_told_apart_by_their_values(compute, found):
    assert head_dtype(Model(compute), CONFIG).startswith(found)


def test_dummy_weights_are_enough():
    """vLLM's ``load_format=dummy``: uniform within 1e-3."""
    weight = (torch.rand(300, 64, generator=torch.Generator().manual_seed(2)) * 2e-3 - 1e-3).bfloat16()
    model = Model(lambda h: h.float() @ weight.float().t())
    assert head_dtype(model, CONFIG) == "float32"
