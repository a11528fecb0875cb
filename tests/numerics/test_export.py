# SPDX-License-Identifier: Apache-2.0
"""An exported folder holds the trainer's weights, bit by bit, and in 8 bits the codes of an independent
recomputation."""

import json
import shutil

import pytest
import references
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from saved_checkpoints import assert_rounded, save, tensors
from tiny_models import make

from flashrl_verl.cli import app
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.settings import FlashRLConfig
from flashrl_verl.tools.export.checkpoint import find
from flashrl_verl.tools.export.eight_bit import INDEX, locate, quantize
from flashrl_verl.tools.export.merge import merge


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """A checkpoint of two FSDP ranks, which takes seconds to make."""
    return save(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def merged(of_two, tmp_path_factory):
    """The checkpoint of two ranks in BF16."""
    folder = tmp_path_factory.mktemp("merged") / "bf16"
    merge(find(of_two[0]), folder)
    return folder


# ---- BF16 ----


def test_two_ranks_weights_are_the_trainers_rounded_to_bf16_and_the_tokenizer_comes_along(of_two, merged):
    assert_rounded(tensors(merged), of_two[1])
    assert json.loads((merged / "config.json").read_text())["dtype"] == "bfloat16"
    assert transformers.AutoTokenizer.from_pretrained(merged).vocab_size > 10


def test_experts_come_one_by_one_what_chooses_them_keeps_fp32_and_a_tied_head_is_written_once(tmp_path):
    checkpoint, weights = save(2, tmp_path, "glm4-moe", intermediate=96)
    merge(find(checkpoint), tmp_path / "out")
    found = tensors(tmp_path / "out")
    packed = weights["model.layers.1.mlp.experts.gate_up_proj"].to(torch.bfloat16)
    rows = packed.shape[1] // 2
    assert torch.equal(found["model.layers.1.mlp.experts.5.gate_proj.weight"], packed[5, :rows])
    assert torch.equal(found["model.layers.1.mlp.experts.5.up_proj.weight"], packed[5, rows:])
    routers = ("model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate.e_score_correction_bias")
    for name in routers:
        assert found[name].dtype == torch.float32 and torch.equal(found[name], weights[name]), name
    assert len(weights[routers[1]].bfloat16().unique()) < weights[routers[1]].numel(), "rounded it would order less"
    assert {tensor.dtype for name, tensor in found.items() if name not in routers} == {torch.bfloat16}
    assert "lm_head.weight" not in found
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, weight in weights.items():
        assert torch.equal(model.state_dict()[name], weight if name in routers else weight.bfloat16().float()), name


def test_a_missing_or_damaged_shard_and_an_output_that_is_there_are_told_and_nothing_is_left(of_two, tmp_path):
    checkpoint = shutil.copytree(of_two[0], tmp_path / "global_step_2")
    shard = checkpoint / "actor" / "model_world_size_2_rank_1.pt"
    shard.write_bytes(b"PK no archive")
    with pytest.raises(FlashRLError, match="verl's merger cannot read"):
        merge(find(checkpoint), tmp_path / "out")
    shard.unlink()
    with pytest.raises(FlashRLError, match=r"model_world_size_2_rank_1\.pt.*copy them from the nodes"):
        merge(find(checkpoint), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_2"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(ConfigError, match="is not overwritten"):
        app(["export", str(of_two[0]), "--output", str(tmp_path / "out")], standalone_mode=False)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


# ---- 8 bits ----


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_codes_and_scales_are_an_independent_recomputation_and_compressed_tensors_reads_them(
    of_two, tmp_path, precision
):
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    # What the run kept in BF16.
    checkpoint, folder = shutil.copytree(of_two[0], tmp_path / "global_step_2"), tmp_path / "out"
    (checkpoint / "config.yaml").write_text("flashrl: {ignore: ['re:.*down_proj', 're:.*layers\\.1\\.']}")
    words = ["export", checkpoint, "--format", precision, "--output", folder]
    app(list(map(str, words)), standalone_mode=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_2", "out"]
    weights = of_two[1]
    found, config = tensors(folder), json.loads((folder / "config.json").read_text())
    settings = QuantizationConfig.model_validate(config["quantization_config"])
    scheme = settings.config_groups["group_0"]
    assert {"lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj"} < set(settings.ignore)
    quantized = [name for name in weights if f"{name}_scale" in found]
    attention = [f"self_attn.{part}_proj" for part in "qkvo"]
    parts = [*attention, "mlp.gate_proj", "mlp.up_proj"]
    assert sorted(quantized) == sorted(f"model.layers.0.{part}.weight" for part in parts)
    for name in quantized:
        codes, scales = references.quantize(weights[name].to(torch.bfloat16), precision)
        assert found[name].dtype == {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[precision]
        assert found[f"{name}_scale"].dtype == torch.float32 and found[f"{name}_scale"].shape == scales.shape
        assert torch.equal(found[name].double(), torch.from_numpy(codes))
        assert torch.equal(found[f"{name}_scale"], torch.from_numpy(scales))
        theirs = dequantize(found[name], found[f"{name}_scale"], args=scheme.weights, dtype=torch.float32)
        assert torch.equal(theirs, torch.from_numpy(codes).float() * torch.from_numpy(scales))
    rest = {name: tensor for name, tensor in weights.items() if name not in quantized}
    assert_rounded({name: found[name] for name in rest}, rest)
    read = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=transformers.CompressedTensorsConfig(run_compressed=False), dtype=torch.bfloat16
    )
    for name in quantized:  # transformers rounds scales to BF16, and the product again
        exact = found[name].float() * found[f"{name}_scale"]
        assert ((read.get_parameter(name).float() - exact).abs() <= 2**-7 * exact.abs()).all(), name


def test_files_have_a_bounded_size_and_an_index_and_hold_the_same(merged, tmp_path):
    quantize(merged, tmp_path / "one", FlashRLConfig())
    quantize(merged, tmp_path / "many", FlashRLConfig(), shard_size=50_000)
    whole = load_file(tmp_path / "one" / "model.safetensors")
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    files = sorted((tmp_path / "many").glob("model-*-of-*.safetensors"))
    assert len(files) > 3 and index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    for file in files:
        with safe_open(file, "pt") as stream:
            names = list(stream.keys())
        assert len(names) <= 2 or file.stat().st_size < 50_000 + 10_000
        assert {index["weight_map"][name] for name in names} == {file.name}
    parts = tensors(tmp_path / "many")
    assert parts.keys() == whole.keys() and all(torch.equal(parts[name], whole[name]) for name in whole)
    assert (tmp_path / "many" / "tokenizer.json").is_file()


def test_a_router_keeps_its_fp32_beside_experts_in_codes(tmp_path):
    model = make("qwen3-moe")
    model.save_pretrained(tmp_path / "model")
    layers = quantize(tmp_path / "model", tmp_path / "out", FlashRLConfig())
    found, name = tensors(tmp_path / "out"), "model.layers.0.mlp.gate.weight"
    assert found[name].dtype == torch.float32 and torch.equal(found[name], model.state_dict()[name])
    assert len(layers.quantized) == 2 * (4 + 8 * 3)
    assert found["model.layers.1.mlp.experts.7.up_proj.weight"].dtype == torch.int8


def test_the_same_weights_in_mistrals_names_beside_the_model_are_not_read(tmp_path):
    save_file({"norm.weight": torch.ones(4)}, tmp_path / "consolidated.safetensors")
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    assert list(locate(tmp_path)) == ["model.norm.weight"]


def test_a_weight_that_is_not_finite_or_a_file_that_is_not_whole_is_named(merged, tmp_path):
    folder = shutil.copytree(merged, tmp_path / "model")
    weights, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    weights[name][2, 5] = torch.nan
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(FlashRLError, match=rf"{name} holds NaN or Inf"):
        quantize(folder, tmp_path / "out", FlashRLConfig())
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(FlashRLError, match="git lfs pull"):
        quantize(folder, tmp_path / "out", FlashRLConfig())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_export_that_would_quantize_nothing_is_refused(merged, tmp_path):
    with pytest.raises(ConfigError, match="leave nothing to quantize"):
        quantize(merged, tmp_path / "out", FlashRLConfig(ignore=("re:model",)))
