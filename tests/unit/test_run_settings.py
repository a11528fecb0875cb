# SPDX-License-Identifier: Apache-2.0
"""What a run writes into its checkpoints of its quantization, and what `flashrl export` and `flashrl eval` make of
it."""

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from flashrl_verl.cli import app
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.settings import FlashRLConfig, KVCache, Precision
from flashrl_verl.tools.evaluate.command import _layers
from flashrl_verl.tools.export.chosen import kv_cache_of, layers_of
from flashrl_verl.tools.export.command import _say_result, say_layers
from flashrl_verl.trainer import run_settings

RUN = FlashRLConfig(ignore=("re:.*v_proj",), keep_first_layers=1, kv_cache="int8_per_token_head")


def printed(say, *args) -> str:
    console = Console(width=400)
    with console.capture() as captured:
        say(console, *args)
    return captured.get()


def test_the_record_has_the_kv_cache_and_an_older_one_without_it_had_the_models(tmp_path):
    run_settings.save(tmp_path, RUN)
    recorded = run_settings.load(tmp_path)
    assert recorded["kv_cache"] == "int8_per_token_head"
    assert kv_cache_of(recorded) is KVCache.INT8_PER_TOKEN_HEAD
    file = tmp_path / run_settings.FILE
    file.write_text(
        json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "kv_cache"})
    )
    assert run_settings.load(tmp_path)["kv_cache"] == "auto"
    file.write_text(json.dumps(recorded | {"kv_cache": "int3"}))
    with pytest.raises(FlashRLError, match="damaged.*int3"):
        run_settings.load(tmp_path)
    assert kv_cache_of(None) is kv_cache_of({"precision": "int8"}) is KVCache.AUTO


@pytest.fixture
def model(tmp_path) -> Path:
    """A Hugging Face folder that `flashrl export` left of the run, as far as it is read here."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "export.json").write_text(json.dumps({"settings": run_settings.record(RUN)}))
    return tmp_path


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.INT8])
def test_eval_says_that_the_runs_kv_cache_is_not_applied(model, precision):
    said = printed(_layers, model, (precision,), ([], None, None))
    assert "flashrl.kv_cache=int8_per_token_head, which is not applied" in said
    (model / "export.json").unlink()
    assert "kv_cache" not in printed(_layers, model, (precision,), ([], None, None))


@pytest.mark.parametrize(
    "settings, told", [(run_settings.record(RUN), 1), (run_settings.record(FlashRLConfig()), 0), (None, 0)]
)
def test_export_says_that_the_runs_kv_cache_is_not_applied(settings, told, tmp_path):
    record = {"files": {}, "step": 3, "format": "bf16", "settings": settings}
    said = printed(_say_result, tmp_path, record)
    assert said.count("flashrl.kv_cache=int8_per_token_head, which is not applied") == told


# ---- what the command line says over the record ----


def test_ignore_none_empties_what_the_run_ignored_and_stands_alone():
    recorded = run_settings.record(RUN)
    assert layers_of(recorded, (), None, None)["ignore"] == ["re:.*v_proj"]
    chosen = layers_of(recorded, ("none",), None, None)
    assert chosen == {"ignore": [], "keep_first_layers": 1, "keep_last_layers": 0}
    with pytest.raises(ConfigError, match="--ignore none --ignore lm_head: none stands for no layer"):
        layers_of(recorded, ("none", "lm_head"), None, None)


def test_each_setting_is_said_with_who_chose_it():
    recorded = run_settings.record(RUN)
    kept = (["none"], None, 2)
    assert printed(say_layers, layers_of(recorded, *kept), kept, recorded).strip() == (
        "kept in BF16: ignore=[], keep_last_layers=2 (by the command line); keep_first_layers=1 (by the run's record)"
    )
    zero = ([], 0, None)
    said = printed(say_layers, layers_of(None, *zero), zero, None)
    assert "keep_first_layers=0 (by the command line)" in said and "keep_last_layers=0 (by the defaults" in said


def test_ignore_none_with_bf16_is_refused_as_any_other_is(model):
    words = ["eval", str(model), "--data", "x.parquet", "--ignore", "none"]
    assert "no effect with --precision bf16" in str(CliRunner().invoke(app, words).exception)
