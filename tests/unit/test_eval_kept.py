# SPDX-License-Identifier: Apache-2.0
"""What `flashrl eval` finds in its output: used again only where it is what would be generated, and whole."""

import dataclasses
import errno
import json
import os
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

import flashrl_verl.quickstart.reward as toy
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.settings import Precision
from flashrl_verl.tools.evaluate.engine import Answer
from flashrl_verl.tools.evaluate.evaluate import EvalConfig, _is_export_of, _write_responses, prompts_of, run
from flashrl_verl.tools.evaluate.kept import ANSWER, GENERATED, finished, read_answer, settings_of, write_answer
from flashrl_verl.tools.evaluate.problems import read_problems
from flashrl_verl.tools.export.source import open_checkpoint
from flashrl_verl.trainer import atomic_write as whole_file

ANSWERED = Answer(
    responses=[[[3], [4]]],
    truncated=[[False, False]],
    layers={"quantized_layers": 0, "unquantized_layers": 0},
    kernels={"linear": "unquantized"},
    seconds={"start": 1.0, "generate": 2.0},
)
BOTH = (Precision.BF16, Precision.INT8)


@pytest.fixture
def model(tmp_path) -> Path:
    """A toy's folder, whose weights nobody reads here."""
    from transformers import GenerationConfig

    from flashrl_verl.quickstart.model import ToyModelConfig, build_model
    from flashrl_verl.quickstart.tokenizer import build_tokenizer

    folder, tokenizer = tmp_path / "checkpoint", build_tokenizer()
    build_model(tokenizer, ToyModelConfig(), seed=0).config.save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").touch()
    return folder


@pytest.fixture
def config(model, tmp_path) -> EvalConfig:
    row = {
        "data_source": "toy_addition",
        "prompt": [{"role": "user", "content": "1+1="}],
        "reward_model": {"ground_truth": "2"},
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "data.parquet")
    return EvalConfig(
        checkpoint=model,
        data=(tmp_path / "data.parquet",),
        precisions=BOTH,
        samples=2,
        max_tokens=8,
        reward=f"{toy.__file__}:compute_score",
        output=tmp_path / "out",
    )


@pytest.fixture
def done(config) -> EvalConfig:
    """An evaluation of which both precisions are finished."""
    checkpoint = open_checkpoint(config.checkpoint)
    prompts, stops, tokenizer = prompts_of(checkpoint, read_problems(config.data)[0], config)
    for precision in config.precisions:
        folder = config.output / precision.value
        folder.mkdir(parents=True)
        write_answer(folder, ANSWERED, settings_of(config, checkpoint, prompts, stops, len(tokenizer), precision))
    return config


def test_every_precisions_settings_are_told(done):
    told = json.loads(run(done).to_json())
    assert set(told["settings"]) == {"bf16", "int8"}
    assert told["settings"]["bf16"]["layers"] is None
    assert told["settings"]["int8"]["layers"] == done.layers


def test_another_end_of_turn_is_not_scored_as_the_models(done, model):
    run(done)
    file = model / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [7]}))
    with pytest.raises(ConfigError, match=r"generated otherwise: stop_token_ids .*7"):
        run(done)


def test_another_configuration_of_the_same_weights_is_not_scored_as_the_models(done, model):
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 0.5}))
    with pytest.raises(ConfigError, match="generated otherwise: config "):
        run(done)


def test_a_longer_tokenizer_is_another_vocabulary(config):
    checkpoint = open_checkpoint(config.checkpoint)
    one, other = (settings_of(config, checkpoint, [[1]], [2], size, Precision.INT8) for size in (15, 16))
    assert {key for key in one if one[key] != other[key]} == {"vocab_size"}


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_export_is_made_again_when_the_configuration_beside_the_weights_changed(config, tmp_path, file):
    theirs = config.checkpoint / "config.json"
    theirs.write_text(json.dumps(json.loads(theirs.read_text()) | {"quantization_config": None}))
    checkpoint = open_checkpoint(config.checkpoint)
    exported = shutil.copytree(config.checkpoint, tmp_path / "model")
    (exported / "export.json").write_text(json.dumps({"source_files": checkpoint.fingerprint()}))
    ours = exported / "config.json"
    content = json.loads(ours.read_text()) | {"dtype": "bfloat16"}  # as an export does
    del content["quantization_config"]  # it too
    ours.write_text(json.dumps(content, indent=2))
    assert _is_export_of(checkpoint, exported)
    changed = checkpoint.folder / file
    changed.write_text(json.dumps(json.loads(changed.read_text()) | {"eos_token_id": 7}))
    assert not _is_export_of(open_checkpoint(config.checkpoint), exported)


# ---- damage ----


@pytest.mark.parametrize("name", [GENERATED, ANSWER])
@pytest.mark.parametrize("content", ["", "{", "[]", None])
def test_a_damaged_file_is_one_error_that_names_force(done, name, content):
    file = done.output / "bf16" / name
    if content is None:
        file.unlink()
        if name == GENERATED:
            return  # not finished
    else:
        file.write_text(content)
    with pytest.raises(ConfigError, match=f"bf16/{name} cannot be used .*--force"):
        run(done)
    assert not finished(done.output, Precision.BF16, {}, force=True)


def test_an_answer_of_other_fields_is_damaged_too(tmp_path):
    (tmp_path / ANSWER).write_text('{"responses": []}')
    with pytest.raises(ConfigError, match="TypeError.*--force"):
        read_answer(tmp_path)


def test_a_full_disk_leaves_the_precision_unfinished_and_no_empty_file(tmp_path, monkeypatch):
    written = []

    def full(path, content):
        written.append(path)
        if len(written) == 2:
            path.touch()
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_bytes(content)

    monkeypatch.setattr(whole_file, "write_synced", full)
    with pytest.raises(FlashRLError, match="cannot be written .*No space left.*Make room"):
        write_answer(tmp_path, ANSWERED, {"seed": 0})
    assert [path.name for path in tmp_path.iterdir()] == [ANSWER]
    assert not finished(tmp_path.parent, Precision.BF16, {"seed": 0}, force=False)


def test_a_full_disk_leaves_the_responses_that_were_there(config, monkeypatch):
    file, problems = config.output / "responses.jsonl", read_problems(config.data)[0]
    config.output.mkdir()
    _write_responses(file, problems, [["2", "3"]], [[1.0, 0.0]], ANSWERED)
    before = file.read_bytes()

    def full(path, content):
        path.write_bytes(content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(whole_file, "write_synced", full)
    with pytest.raises(OSError, match="No space left"):
        _write_responses(file, problems, [["4", "5"]], [[0.0, 0.0]], ANSWERED)
    assert json.loads(before)["responses"] == ["2", "3"]
    assert file.read_bytes() == before and list(config.output.iterdir()) == [file]


def test_what_is_written_is_what_is_read(tmp_path):
    write_answer(tmp_path, ANSWERED, {"seed": 0})
    assert dataclasses.asdict(read_answer(tmp_path)) == dataclasses.asdict(ANSWERED)


def test_what_was_chosen_otherwise_is_told_by_its_option_and_files_without_their_checksums(done, model):
    with pytest.raises(ConfigError, match=r"generated otherwise: --n 2 \(now 3\)\. Choose"):
        run(dataclasses.replace(done, samples=3))
    weights = next(model.glob("*.safetensors"))
    os.utime(weights, (1, 1))
    with pytest.raises(ConfigError, match=r"generated otherwise: weights \(another one\)\. Choose"):
        run(done)
