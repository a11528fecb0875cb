# SPDX-License-Identifier: Apache-2.0
"""``--format fp8_block``: codes and scales of an independent recomputation, which compressed-tensors reads, or a refusal."""

import io
import json
from pathlib import Path

import pytest
import references
import torch
from safetensors.torch import load_file
from tiny_models import LAYERS, make, sizes, wire

from flashrl_verl.config import Precision
from flashrl_verl.errors import ConfigError
from flashrl_verl.export.export import Request, export


def saved(folder: Path, **changes: int) -> dict[str, torch.Tensor]:
    """A Hugging Face folder of a random model in BF16, and its weights."""
    model = make("qwen2.5", **changes)
    model.to(torch.bfloat16).save_pretrained(folder)
    return wire(model)


def test_codes_and_scales_are_an_independent_recomputation_and_compressed_tensors_reads_them(tmp_path):
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    weights = saved(tmp_path / "model", **sizes("qwen2.5", "fp8_block"))
    folder, record = export(Request(checkpoint=tmp_path / "model", output=tmp_path / "out", format=Precision.FP8_BLOCK))
    found = {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(settings).config_groups["group_0"]
    assert scheme.weights.block_structure == [128, 128] and scheme.input_activations.group_size == 128
    assert scheme.input_activations.dynamic and "by block" in record["scheme"] and "by group" in record["scheme"]
    assert record["serve_with"] == {"VLLM_USE_DEEP_GEMM": "0"}
    quantized = [name for name in weights if f"{name}_scale" in found]
    assert len(quantized) == 7 * LAYERS and all(name.endswith("_proj.weight") for name in quantized)
    for name, tensor in weights.items():
        if name not in quantized:
            assert torch.equal(found[name], tensor), name
            continue
        codes, scales = references.quantize(tensor, "fp8_block")
        assert found[name].dtype == torch.float8_e4m3fn and found[f"{name}_scale"].dtype == torch.float32
        assert torch.equal(found[name].double(), torch.from_numpy(codes)), name
        assert torch.equal(found[f"{name}_scale"], torch.from_numpy(scales)), name
        theirs = dequantize(found[name], found[f"{name}_scale"], args=scheme.weights, dtype=torch.float32)
        spread = torch.from_numpy(scales).repeat_interleave(128, 0).repeat_interleave(128, 1)
        assert torch.equal(theirs, torch.from_numpy(codes).float() * spread), name


@pytest.mark.parametrize(
    "precision, command", [("fp8_block", "VLLM_USE_DEEP_GEMM=0 vllm serve out"), ("fp8", "vllm serve out")]
)
def test_the_command_that_serves_it_keeps_vllm_from_other_scales(tmp_path, precision, command):
    from rich.console import Console

    from flashrl_verl.export.command import _say_result

    saved(tmp_path / "model", **sizes("qwen2.5", precision))
    _, record = export(Request(checkpoint=tmp_path / "model", output=tmp_path / "out", format=Precision(precision)))
    said = io.StringIO()
    _say_result(Console(file=said), Path("out"), record)
    assert f"Serve it: {command}\n" in said.getvalue()
    assert ("powers of two" in said.getvalue()) == (precision == "fp8_block")


def test_a_weight_that_is_not_whole_blocks_is_refused_and_nothing_is_written(tmp_path):
    saved(tmp_path / "model")
    wanted = r"--format fp8_block: model\.layers\.0\.self_attn\.k_proj\.weight is 64 x 128.*--format fp8, .*--ignore"
    with pytest.raises(ConfigError, match=wanted):
        export(Request(checkpoint=tmp_path / "model", output=tmp_path / "out", format=Precision.FP8_BLOCK))
    assert not (tmp_path / "out").exists()
