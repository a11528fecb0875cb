# SPDX-License-Identifier: Apache-2.0
"""An exported folder holds the trainer's weights, bit by bit, and in 8 bits the codes of an independent
recomputation."""

import json
import shutil

import engines  # noqa: F401 - chooses verl's platform, which verl reads once
import pytest
import references
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from saved_checkpoints import assert_rounded, save, tensors

from flashrl_verl.settings import FlashRLConfig, Precision
from flashrl_verl.tools.bar import sha256
from flashrl_verl.tools.export.chosen import layers_of
from flashrl_verl.tools.export.export import Request, export
from flashrl_verl.tools.export.source import open_checkpoint
from flashrl_verl.trainer import run_settings


@pytest.fixture(scope="module")
def exported(of_two, tmp_path_factory):
    return export(Request(checkpoint=of_two[0], output=tmp_path_factory.mktemp("exported") / "bf16"))


def test_two_ranks_weights_are_the_trainers_rounded_to_bf16(of_two, exported):
    assert_rounded(tensors(exported[0]), of_two[1])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_number_of_ranks_does_not_change_the_export(tmp_path, ranks):
    checkpoint, weights = save(ranks, tmp_path)
    assert_rounded(tensors(export(Request(checkpoint=checkpoint, output=tmp_path / "out"))[0]), weights)


@pytest.mark.slow
def test_of_two_replicas_the_shards_of_one_are_the_model(tmp_path):
    checkpoint, weights = save(4, tmp_path, hybrid=True)
    assert_rounded(tensors(export(Request(checkpoint=checkpoint, output=tmp_path / "out"))[0]), weights)


def test_verls_own_merger_writes_the_same_weights(of_two, exported, tmp_path):
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    actor = of_two[0] / "actor"
    (actor / "huggingface" / "tokenizer_config.json").unlink(missing_ok=True)
    merger = FSDPModelMerger(
        ModelMergerConfig(
            operation="merge",
            backend="fsdp",
            local_dir=str(actor),
            hf_model_config_path=str(actor / "huggingface"),
            target_dir=str(tmp_path / "merged"),
        )
    )
    world = merger._get_world_size()
    state = merger._load_and_merge_state_dicts(world, world, (world,), ("fsdp",))
    ours = tensors(exported[0])
    assert state.keys() == ours.keys()
    assert all(torch.equal(state[name], ours[name]) for name in ours)


@pytest.mark.slow
def test_tied_embeddings_are_written_once_and_transformers_ties_them_again(tmp_path):
    from transformers import AutoModelForCausalLM

    checkpoint, weights = save(2, tmp_path, "llama3")
    folder, _ = export(Request(checkpoint=checkpoint, output=tmp_path / "out"))
    assert "lm_head.weight" not in tensors(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert_rounded(dict(model.named_parameters()), weights)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_experts_are_written_one_by_one_and_transformers_packs_the_same_ones(tmp_path):
    from transformers import AutoModelForCausalLM

    checkpoint, weights = save(2, tmp_path, "qwen3-moe")
    folder, _ = export(Request(checkpoint=checkpoint, output=tmp_path / "out"))
    found = tensors(folder)
    packed = weights["model.layers.1.mlp.experts.gate_up_proj"].to(torch.bfloat16)
    rows = packed.shape[1] // 2
    assert torch.equal(found["model.layers.1.mlp.experts.5.gate_proj.weight"], packed[5, :rows])
    assert torch.equal(found["model.layers.1.mlp.experts.5.up_proj.weight"], packed[5, rows:])
    assert_rounded(dict(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").named_parameters()), weights)


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_codes_and_scales_are_an_independent_recomputation_and_compressed_tensors_reads_them(
    of_two, tmp_path, precision
):
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    checkpoint, weights = of_two
    layers = {"ignore": ["re:.*down_proj"], "keep_first_layers": 0, "keep_last_layers": 1}
    folder, record = export(
        Request(checkpoint=checkpoint, output=tmp_path / "out", format=Precision(precision), layers=layers)
    )
    found, config = tensors(folder), json.loads((folder / "config.json").read_text())
    settings = QuantizationConfig.model_validate(config["quantization_config"])
    scheme = settings.config_groups["group_0"]
    assert {"lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj"} < set(settings.ignore)
    quantized = [name for name in weights if f"{name}_scale" in found]
    parts = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    )
    assert sorted(quantized) == sorted(f"model.layers.0.{part}.weight" for part in parts)
    assert record["quantized_layers"] == len(parts)
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


def test_the_runs_own_record_says_what_stays_in_bf16(of_two, tmp_path):
    checkpoint = shutil.copytree(of_two[0], tmp_path / "global_step_2")
    run_settings.save(checkpoint, FlashRLConfig(ignore=("re:.*v_proj",), keep_first_layers=1, fp32_lm_head=True))
    for path in (checkpoint, checkpoint / "actor"):
        recorded = open_checkpoint(path).settings
        assert recorded["fp32_lm_head"] is True and recorded["precision"] == "int8"
        chosen = layers_of(recorded, (), None, 2)
        assert chosen == {"ignore": ["re:.*v_proj"], "keep_first_layers": 1, "keep_last_layers": 2}
    assert layers_of(recorded, ("lm_head",), 0, None)["ignore"] == ["lm_head"]


# ---- what is written beside the weights ----


def test_files_have_a_bounded_size_an_index_and_checksums(of_two, exported, tmp_path):
    folder, record = export(Request(checkpoint=of_two[0], output=tmp_path / "out", max_shard_bytes=100_000))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("model-*-of-*.safetensors"))
    assert len(files) > 3 and files[-1].name == f"model-{len(files):05}-of-{len(files):05}.safetensors"
    whole = tensors(exported[0])
    assert index["weight_map"].keys() == whole.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    for file in files:
        with safe_open(file, "pt") as stream:
            names = list(stream.keys())
        assert len(names) == 1 or file.stat().st_size < 100_000 + 10_000
        assert {index["weight_map"][name] for name in names} == {file.name}
    assert record["files"] == {f.name: {"bytes": f.stat().st_size, "sha256": sha256(f)} for f in files}
    assert record["step"] == 2 and record["format"] == "bf16" and record["source"] == str(of_two[0] / "actor")
    # A folder of several files is a source too, and gives the same again.
    again, _ = export(Request(checkpoint=folder, output=tmp_path / "again"))
    assert_rounded(tensors(again), whole)
    assert open_checkpoint(again).step == 2


def test_the_configuration_says_bf16_and_the_tokenizer_comes_along_but_no_stale_weights(of_two, tmp_path):
    checkpoint = shutil.copytree(of_two[0], tmp_path / "global_step_7")
    extra = checkpoint / "actor" / "huggingface"
    (extra / "tokenizer.json").write_text("{}")
    (extra / "chat_template.jinja").write_text("{{ messages }}")
    save_file({"stale": torch.ones(1)}, extra / "model.safetensors")
    folder, _ = export(Request(checkpoint=checkpoint, output=tmp_path / "out"))
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}" and (folder / "tokenizer.json").exists()
    assert "stale" not in tensors(folder)
