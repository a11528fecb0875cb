# SPDX-License-Identifier: Apache-2.0
"""`flashrl bench training`: a layer, a head and a whole model from measured seconds by hand, on real passes of a tiny
model."""

import json

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import training
from benchmarks.__main__ import app
from benchmarks.training import TrainingConfig
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.tools.engines.shapes import load_config
from flashrl_verl.tools.plan.gpus import find

CONFIG = TrainingConfig(model="tiny", layers=(1, 2), tokens=24, repeats=3, device="cpu")


def timed(monkeypatch, seconds: dict[tuple[str, int], list[float]]) -> list[str]:
    """Passes run, and take as long as is said: by name and depth, the warm-up first."""
    ran = []

    def time(run, model, ids):
        run(model, ids)
        key = (run.__name__, len(model.model.layers))
        ran.append(key)
        return seconds[key][ran.count(key) - 1]

    monkeypatch.setattr(training, "_timed", time)
    return ran


def test_layers_heads_and_whole_models_by_hand(monkeypatch):
    """Medians 3 and 5 s: a layer takes 2, the head 1; tiny has two layers. The warm-up does not count."""
    seconds = {("_log_probs", 1): [99, 1, 3, 4], ("_log_probs", 2): [99, 4, 5, 9]}
    seconds |= {("_update", 1): [99, 10, 11, 30], ("_update", 2): [99, 17, 18, 40]}
    ran = timed(monkeypatch, seconds)
    log_probs, update = training.measure(CONFIG)
    assert (log_probs.layer_s, log_probs.head_s, log_probs.whole_s) == (2, 1, 5)
    assert (update.layer_s, update.head_s, update.whole_s) == (7, 4, 18)
    assert log_probs.seconds == {1: [1, 3, 4], 2: [4, 5, 9]} and log_probs.share is None
    assert len(ran) == 16


def test_the_share_is_of_the_data_sheet(monkeypatch):
    """An H200 that takes 1 s a layer and 1 s for the head; 2 operations a weight and token, attention over half the
    length."""
    monkeypatch.setattr(training, "of_device", lambda name: find("h200"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    shape = load_config("tiny")
    config = TrainingConfig(**{**vars(CONFIG), "device": "cuda"})
    found = training._pass(config, "policy update", {1: [2.0], 2: [3.0]}, passes=4)
    hidden, head = shape.hidden_size, shape.vocab_size * shape.hidden_size
    size = hidden // shape.num_attention_heads
    layer = 2 * hidden * hidden + 2 * hidden * size * shape.num_key_value_heads + 3 * hidden * shape.intermediate_size
    operations = 2 * 24 * (2 * layer + head) + 2 * 4 * hidden * 12 * 24
    assert found.whole_s == 3.0 and found.share == pytest.approx(4 * operations / 3.0 / 989e12)


def test_the_range_of_a_share_is_that_of_lines_through_one_time_at_each_depth(monkeypatch):
    """64 layers from depths of 2 and 6: 0.06 + 62/4 * 0.06 and 0.05 + 62/4 * 0.07 seconds."""
    monkeypatch.setattr(training, "of_device", lambda name: find("h200"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    config = TrainingConfig(model="qwen2.5-32b", layers=(2, 6), tokens=24, repeats=2, device="cuda")
    found = training._pass(config, "old log-probs", {2: [0.06, 0.05], 6: [0.12, 0.12]}, passes=1)
    operations = found.share * found.whole_s
    assert found.whole_s == pytest.approx(0.055 + 62 / 4 * 0.065)
    assert found.share_range == pytest.approx((operations / 1.135, operations / 0.99))
    noisy = training._pass(config, "old log-probs", {2: [0.06, 0.06, 0.13], 6: [0.12, 0.12, 0.12]}, passes=1)
    assert noisy.share == pytest.approx(operations / noisy.whole_s, rel=1e-6) and noisy.share_range is None


def test_an_update_has_a_gradient_for_every_weight_and_log_probs_none(monkeypatch):
    model, ids = training._model(CONFIG, 2), training._ids(CONFIG)
    monkeypatch.setattr(model, "zero_grad", lambda set_to_none: None)
    training._log_probs(model, ids)
    assert all(weight.grad is None for weight in model.parameters())
    training._update(model, ids)
    assert all(weight.grad.isfinite().all() and weight.grad.any() for weight in model.parameters())
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16} and model.is_gradient_checkpointing


def test_what_noise_makes_of_it_is_refused():
    with pytest.raises(
        FlashRLError, match="old log-probs: 0.3000 s with 1 layers and 0.2000 s .*--layers further apart"
    ):
        training._pass(CONFIG, "old log-probs", {1: [0.3], 2: [0.2]}, passes=1)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--layers", "2"], "--layers '2' is not two numbers"),
        (["--layers", "2,2"], "--layers 2,2"),
        (["--layers", "1,9"], "--layers 9: tiny has 2"),
        (["--model", "nonsense"], "--model 'nonsense'"),
        (["--hardware", "tpu"], "--hardware tpu: it is neither"),
        pytest.param(
            ["--hardware", "cuda"],
            "--hardware cuda: PyTorch finds no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_words_that_cannot_be_are_refused(tmp_path, words, part):
    result = CliRunner().invoke(app, ["training", "--tokens", "8", *words, "--output", str(tmp_path / "out")])
    assert result.exit_code == 1 and isinstance(result.exception, ConfigError) and part in str(result.exception)


def test_the_file_has_everything(tmp_path, monkeypatch):
    timed(
        monkeypatch,
        {(run, depth): [9, depth + 0.25, depth + 0.75] for run in ("_log_probs", "_update") for depth in (1, 2)},
    )
    words = ["--tokens", "8", "--repeats", "2", "--hardware", "cpu", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, ["training", *words])
    assert result.exit_code == 0, result.output
    assert "tiny on CPU" in result.output
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["settings"]["tokens"] == 8 and {"torch", "transformers", "device", "date"} <= set(
        record["environment"]
    )
    assert [one["name"] for one in record["passes"]] == ["old log-probs", "policy update"]
    assert record["passes"][0]["seconds"] == {"1": [1.25, 1.75], "2": [2.25, 2.75]}
    assert record["passes"][1]["head_s"] == 0.5
