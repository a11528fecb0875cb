# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face folder as a source: which of its files are the model, what keeps FP32, and damaged ones by name."""

import json
import shutil
from pathlib import Path

import engines  # noqa: F401 - chooses verl's platform, which verl reads once
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make, wire

from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.refit.sender import cast_for_rollout
from flashrl_verl.settings import Precision
from flashrl_verl.tools.export.export import Request, export
from flashrl_verl.tools.export.folder import INDEX
from flashrl_verl.tools.export.source import open_checkpoint

GATE = "model.layers.1.mlp.gate"
BIAS = torch.tensor([30.01, 30.03, 30.06])
"""One value in BF16, so that an order of three experts is lost."""

WEIGHTS = {
    f"{GATE}.e_score_correction_bias": BIAS.clone(),
    "model.layers.1.mlp.moe_statics.e_score_correction_bias": BIAS.clone(),
    "model.layers.1.mlp.expert_bias": BIAS.clone(),
    f"{GATE}.weight": torch.linspace(0.1, 0.9, 12).view(3, 4),
    "model.layers.1.mlp.gate_proj.weight": torch.linspace(0.1, 0.9, 12).view(3, 4),
    "model.norm.weight": torch.linspace(0.1, 0.9, 4),
}
MOE = ("e_score_correction_bias", "expert_bias", "gate.weight")


def folder_of(path: Path, config: str = "{}", **files: dict[str, torch.Tensor]) -> Path:
    """A folder of files and, for several that are numbered, their index."""
    path.mkdir()
    (path / "config.json").write_text(config)
    for name, weights in files.items():
        save_file(weights, path / f"{name}.safetensors")
    numbered = {tensor: f"{name}.safetensors" for name, weights in files.items() if "of" in name for tensor in weights}
    if numbered:
        (path / INDEX).write_text(json.dumps({"weight_map": numbered}))
    return path


def exported(folder: Path, output: Path) -> dict[str, torch.Tensor]:
    return load_file(export(Request(checkpoint=folder, output=output))[0] / "model.safetensors")


def test_what_experts_are_chosen_by_keeps_fp32_as_in_the_rollout(tmp_path):
    found = exported(folder_of(tmp_path / "model", model=WEIGHTS), tmp_path / "out")
    rollout = dict(cast_for_rollout(WEIGHTS.items(), torch.bfloat16))
    assert found.keys() == rollout.keys()
    for name, tensor in rollout.items():
        assert found[name].dtype == tensor.dtype == (torch.float32 if name.endswith(MOE) else torch.bfloat16), name
        assert torch.equal(found[name], tensor), name
    assert found[f"{GATE}.e_score_correction_bias"].argsort().tolist() == [0, 1, 2]
    assert len(BIAS.bfloat16().unique()) == 1, "rounded it would order nothing"


def test_the_room_that_is_asked_for_counts_fp32_of_routers(tmp_path, monkeypatch):
    router = {f"{GATE}.weight": torch.zeros(10**6, 10)}  # 40 MB, 20 in BF16
    folder = folder_of(tmp_path / "model", model=router)
    free = (64 << 20) + 30 * 10**6
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - free, free))
    with pytest.raises(ConfigError, match=r"needs 0\.1 GB"):
        export(Request(checkpoint=folder, output=tmp_path / "out"))


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.INT8])
def test_transformers_and_vllm_round_the_gate_of_a_model_that_holds_it_in_bf16(tmp_path, precision):
    """Qwen3-MoE: the export has FP32, what is loaded of it is what a BF16 model holds."""
    from transformers import AutoModelForCausalLM

    from flashrl_verl.tools.engines import model as engine_model

    model = make("qwen3-moe")
    model.save_pretrained(tmp_path / "model")
    name = "model.layers.0.mlp.gate.weight"
    output, _ = export(Request(checkpoint=tmp_path / "model", output=tmp_path / "out", format=precision))
    sent = wire(model)[name]
    assert sent.dtype == torch.float32 and torch.equal(load_file(output / "model.safetensors")[name], sent)
    if precision is Precision.BF16:
        read = AutoModelForCausalLM.from_pretrained(output, dtype="auto").state_dict()[name]
        assert read.dtype == torch.bfloat16 and torch.equal(read, sent.bfloat16())
    with engine_model.vllm_config(output) as config, engine_model.process_group():
        from vllm.model_executor.model_loader.utils import initialize_model

        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            built = initialize_model(vllm_config=config)
        finally:
            torch.set_default_dtype(before)
        built.load_weights(iter(load_file(output / "model.safetensors").items()))
        held = dict(built.named_parameters())[name]
        assert held.dtype == torch.bfloat16 and torch.equal(held.cpu(), sent.bfloat16())


# ---- which files ----

MISTRAL = {"layers.0.attention.wq.weight": torch.ones(300, 300), "norm.weight": torch.ones(4)}


@pytest.mark.parametrize("shards", [1, 2])
def test_the_same_weights_in_mistrals_names_beside_the_model_are_not_read(tmp_path, shards):
    names = ["model"] if shards == 1 else ["model-1-of-2", "model-2-of-2"]
    parts = {name: dict(list(WEIGHTS.items())[i::shards]) for i, name in enumerate(names)}
    folder = folder_of(tmp_path / "model", consolidated=MISTRAL, **parts)
    checkpoint = open_checkpoint(folder)
    assert [file.name for file in checkpoint.files()] == [f"{name}.safetensors" for name in names]
    assert [name for name, *_ in checkpoint.fingerprint()] == [f"{name}.safetensors" for name in names]
    assert checkpoint.shapes().keys() == WEIGHTS.keys() == dict(checkpoint.tensors()).keys()
    seen = []
    export(
        Request(checkpoint=folder, output=tmp_path / "out"),
        lambda doing, done, total: seen.append((doing, done, total)),
    )
    assert ("exporting", len(WEIGHTS), len(WEIGHTS)) in seen
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == WEIGHTS.keys()


def test_without_index_and_model_all_files_are_read_and_a_name_in_two_is_refused(tmp_path):
    halves = {"a": dict(list(WEIGHTS.items())[:3]), "b": dict(list(WEIGHTS.items())[3:])}
    assert open_checkpoint(folder_of(tmp_path / "two", **halves)).shapes().keys() == WEIGHTS.keys()
    twice = folder_of(tmp_path / "twice", a=WEIGHTS, b=dict(list(WEIGHTS.items())[:1]))
    with pytest.raises(FlashRLError, match="is in b.safetensors and in another file too"):
        export(Request(checkpoint=twice, output=tmp_path / "out"))


@pytest.mark.parametrize(
    "index, said",
    [
        ('{"weight_map": {"a": "model-9-of-9.safetensors"}}', r"not there: model-9-of-9\.safetensors"),
        ('{"weight_map": {"gone": "model.safetensors"}}', "names tensors that are not there: gone"),
        ('{"weight_map": ["a"]}', "no weight_map"),
        ("[1]", "holds list"),
        ("{", "is not JSON"),
    ],
)
def test_an_index_that_is_wrong_is_told(tmp_path, index, said):
    folder = folder_of(tmp_path / "model", model=WEIGHTS)
    (folder / INDEX).write_text(index)
    with pytest.raises((ConfigError, FlashRLError), match=said):
        export(Request(checkpoint=folder, output=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


# ---- damaged ----

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32\nsize 12345\n"
)


@pytest.mark.parametrize(
    "damage, said", [("pointer", "git lfs pull"), ("half", "Copy it again"), ("empty", r"\(0 bytes\)")]
)
def test_a_file_that_is_not_whole_is_named_with_what_to_do(tmp_path, damage, said):
    folder = folder_of(tmp_path / "model", model=WEIGHTS)
    file = folder / "model.safetensors"
    file.write_bytes({"pointer": POINTER, "half": file.read_bytes()[: file.stat().st_size // 2], "empty": b""}[damage])
    for read in (open_checkpoint(folder).shapes, lambda: list(open_checkpoint(folder).tensors())):
        with pytest.raises(FlashRLError, match=said) as raised:
            read()
        assert str(file) in str(raised.value) and "damaged or not whole" in str(raised.value)
    with pytest.raises(FlashRLError, match=said):
        export(Request(checkpoint=folder, output=tmp_path / "out"))


def test_a_quantization_that_is_null_is_none_and_one_that_is_named_is_refused(tmp_path):
    folder = folder_of(tmp_path / "model", '{"quantization_config": null}', model=WEIGHTS)
    assert exported(folder, tmp_path / "out").keys() == WEIGHTS.keys()
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    with pytest.raises(ConfigError, match=r"quantized already \(awq\)"):
        open_checkpoint(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds list in JSON and no object"):
        open_checkpoint(folder)
