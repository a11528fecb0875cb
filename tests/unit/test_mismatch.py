# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of `flashrl bench mismatch` against values worked out here in float64, and what it refuses."""

import json
import math
from pathlib import Path

import engines  # noqa: F401 - chooses verl's platform, which verl reads once
import numpy as np
import pytest
import torch
from recipe_runs import make_assets
from references import quantize
from tiny_models import make
from typer.testing import CliRunner

from benchmarks import mismatch_report
from benchmarks.__main__ import app
from benchmarks.mismatch import MismatchConfig, PrecisionResult, Report, run
from benchmarks.mismatch_metrics import CORRELATION, K3_ERROR, K3_KL, PROBS_DIFF, log_prob_metrics
from benchmarks.mismatch_noise import NoiseMeter, measure, output_sqnr, weight_sqnr
from benchmarks.mismatch_prompts import load_prompts
from benchmarks.mismatch_trainer import Trainer
from flashrl_verl.errors import ConfigError
from flashrl_verl.quantization.formats import weight_format
from flashrl_verl.quickstart.task import TaskConfig, split_problems
from flashrl_verl.quickstart.warmup import Encoder
from flashrl_verl.settings import Precision

FORMATS = {p.value: weight_format(p) for p in (Precision.BF16, Precision.INT8, Precision.FP8)}
"""Those that take the tiny models' shapes."""


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    return make_assets(tmp_path_factory.mktemp("assets"))


def trainer_of(name: str, folder: Path) -> Trainer:
    make(name).to(torch.bfloat16).save_pretrained(folder)
    return Trainer(folder, torch.device("cpu"))


# ---- metrics ----


def test_metrics_are_those_worked_out_by_hand_over_ragged_responses():
    trainer, rollout = [[-1.0, -2.0], [-0.5]], [[-1.1, -1.8], [-0.5]]
    metrics = log_prob_metrics(trainer, rollout)
    d = np.array([0.1, -0.2, 0.0])
    p, q = np.exp([-1.0, -2.0, -0.5]), np.exp([-1.1, -1.8, -0.5])
    assert metrics["tokens"] == 3 and metrics["responses"] == 2
    assert metrics[K3_KL] == pytest.approx(np.mean(np.exp(d) - d - 1), rel=1e-7)
    assert metrics[PROBS_DIFF] == pytest.approx(np.abs(p - q).mean(), rel=1e-7)
    assert metrics[CORRELATION] == pytest.approx(np.corrcoef(p, q)[0, 1], rel=1e-7)


def test_a_tiny_difference_keeps_its_digits():
    d = 1e-5  # in float32, exp(d) - d - 1 would be 0 or one unit of 1e-7
    metrics = log_prob_metrics([[-1.0 + d] * 4] * 2, [[-1.0] * 4] * 2)
    assert metrics[K3_KL] == pytest.approx(d**2 / 2 + d**3 / 6, rel=1e-4)


def test_the_error_of_responses_of_one_token_is_that_of_a_mean():
    d = np.array([0.1, -0.2, 0.3, 0.05, -0.01])
    terms = np.exp(d) - d - 1
    metrics = log_prob_metrics([[x - 1] for x in d], [[-1.0]] * 5)
    assert metrics[K3_ERROR] == pytest.approx(terms.std(ddof=1) / math.sqrt(5), rel=1e-9)


def test_tokens_of_one_response_are_not_counted_as_independent():
    d = np.array([0.1, -0.2, 0.3, 0.05, -0.01])
    once = log_prob_metrics([[x - 1] for x in d], [[-1.0]] * 5)
    repeated = log_prob_metrics([[x - 1] * 7 for x in d], [[-1.0] * 7] * 5)
    assert repeated[K3_ERROR] == pytest.approx(once[K3_ERROR], rel=1e-9)


@pytest.mark.parametrize("rollout", [[[-1.0], [-1.0, -1.0]], [[-1.0, -1.0]], [[-1.0, -1.0], [-1.0], []]])
def test_responses_that_differ_in_length_are_refused(rollout):
    with pytest.raises(ValueError, match="lengths differ"):
        log_prob_metrics([[-1.0, -1.0], [-1.0]], rollout)


# ---- signal-to-noise ratios ----


def decibels(exact: np.ndarray, approximation: np.ndarray) -> float:
    return 10 * np.log10(np.square(exact).sum() / np.square(exact - approximation).sum())


def w8a8(x: torch.Tensor, weight: torch.Tensor, precision: str) -> tuple[np.ndarray, np.ndarray]:
    """Dequantized weight and emulated product in float64, from the numpy reference."""
    codes, scales = quantize(weight, precision)
    tokens, token_scales = quantize(x, precision)
    stored = codes * scales.astype(np.float64)
    return stored, (tokens * token_scales.astype(np.float64)).reshape(x.shape) @ stored.T


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_ratios_of_a_matrix_are_those_of_a_float64_reference(precision):
    g = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 96, generator=g).bfloat16() for n in (40, 24))
    exact = x.double() @ weight.double().t()
    stored, product = w8a8(x, weight, precision)
    rounded = torch.from_numpy(product).bfloat16().double().numpy()
    fmt = weight_format(Precision(precision))
    assert weight_sqnr(weight, fmt) == pytest.approx(decibels(weight.double().numpy(), stored), abs=1e-6)
    assert output_sqnr(weight, x, fmt, exact) == pytest.approx(decibels(exact.numpy(), rounded), abs=0.05)


def test_bf16_has_no_weight_noise_and_the_least_output_noise():
    g = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 96, generator=g).bfloat16() for n in (40, 24))
    exact = x.double() @ weight.double().t()
    outputs = {name: output_sqnr(weight, x, fmt, exact) for name, fmt in FORMATS.items()}
    assert weight_sqnr(weight, None) == math.inf
    assert outputs["bf16"] > 48 > outputs["int8"] > outputs["fp8"] > 25


def test_inside_a_model_the_ratios_are_of_the_real_tokens_and_not_rounded_by_autocast(tmp_path):
    """The model runs under autocast to BF16, which would round the float32 product of the emulation; padding would
    count."""
    trainer = trainer_of("qwen2.5", tmp_path)
    name = "model.layers.1.mlp.down_proj"
    module = trainer.module.get_submodule(name)
    inputs: list[torch.Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, args: inputs.append(args[0].clone()))
    meter = NoiseMeter(FORMATS)
    measure(trainer, meter, [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14]], left_alone=())
    handle.remove()
    x = torch.cat([inputs[0][0], inputs[0][1, :3]]).bfloat16()  # without the four tokens of padding
    weight = module.weight.detach()
    exact = x.double() @ weight.double().t()
    for precision in ("int8", "fp8"):
        measured = meter._found[name][precision]
        _, product = w8a8(x, weight, precision)
        rounded = torch.from_numpy(product).bfloat16().double().numpy()
        assert measured.weight == weight_sqnr(weight, FORMATS[precision])
        assert measured.output == pytest.approx(decibels(exact.numpy(), rounded), abs=0.02)
        (down,) = [kind for kind in meter.by_type(precision) if kind.kind == "down_proj"]
        assert down.matrices == 2 and down.output.lowest <= down.output.median


def test_every_quantized_type_of_a_dense_model_is_measured_and_nothing_else(tmp_path):
    meter = NoiseMeter(FORMATS)
    measure(trainer_of("qwen2.5", tmp_path), meter, [[5, 6, 7]], left_alone={"model.layers.0.mlp.up_proj"})
    kinds = {kind.kind: kind.matrices for kind in meter.by_type("int8")}
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert kinds == {name: 1 if name == "up_proj" else 2 for name in names} and list(kinds) == list(names)


def test_experts_are_measured_one_by_one(tmp_path):
    trainer = trainer_of("qwen3-moe", tmp_path)
    config, meter = trainer.module.config, NoiseMeter(FORMATS)
    measure(trainer, meter, [[5, 6]], left_alone=())
    kinds = {kind.kind: kind for kind in meter.by_type("fp8")}
    assert list(kinds) == ["q_proj", "k_proj", "v_proj", "o_proj", "experts"]
    assert kinds["experts"].matrices == config.num_hidden_layers * config.num_experts * 2
    # Two tokens reach at most four of eight experts: the others have a weight but no output.
    measured = [m["fp8"].output for name, m in meter._found.items() if ".experts." in name]
    assert 0 < len([output for output in measured if output is not None]) <= 2 * 4 * config.num_hidden_layers
    expert = trainer.module.model.layers[0].mlp.experts
    stored, _ = w8a8(torch.zeros(1, expert.gate_up_proj.shape[-1]), expert.gate_up_proj[3].detach(), "fp8")
    name = "model.layers.0.mlp.experts.3.gate_up_proj"
    expected = decibels(expert.gate_up_proj[3].detach().double().numpy(), stored)
    assert meter._found[name]["fp8"].weight == pytest.approx(expected, abs=1e-6)


# ---- trainer ----


def test_the_trainers_log_probs_are_those_of_the_model_whatever_the_batch(tmp_path, monkeypatch):
    trainer = trainer_of("qwen2.5", tmp_path)
    prompts, responses = [[5, 6, 7], [8], [9, 10, 11, 12]], [[13, 14], [15, 16, 17, 18, 19], [20]]
    together = trainer.log_probs(prompts, responses)
    monkeypatch.setattr("benchmarks.mismatch_trainer._LOGIT_BYTES", 1)
    alone = trainer.log_probs(prompts, responses)
    reference = make("qwen2.5").bfloat16().double()
    for prompt, response, *found in zip(prompts, responses, together, alone, strict=True):
        ids = torch.tensor([[*prompt, *response]])
        with torch.no_grad():
            log_probs = reference(input_ids=ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
        expected = log_probs.gather(-1, torch.tensor(response)[:, None])[:, 0].numpy()
        for values in found:
            np.testing.assert_allclose(values, expected, atol=0.06)  # BF16 logits and log-probs near -5: steps of 0.03


# ---- prompts ----


def test_toy_prompts_are_written_as_verl_writes_them_and_end_of_turn_stops(assets):
    from transformers import AutoTokenizer

    prompts = load_prompts(assets / "model", None, 5, seed=7)
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    problems = split_problems(TaskConfig(), seed=7).train[:5]
    assert prompts.tokens == [Encoder(tokenizer).prompt_ids(problem) for problem in problems]
    assert prompts.stop_token_ids == [tokenizer.eos_token_id] and prompts.vocab_size == len(tokenizer)


def test_a_response_ends_at_the_tokenizers_end_of_turn_and_at_those_of_the_generation_config(tmp_path):
    folder = make_assets(tmp_path / "assets") / "model"
    generation = folder / "generation_config.json"
    eos = load_prompts(folder, None, 1, seed=0).stop_token_ids
    generation.write_text(json.dumps({**json.loads(generation.read_text()), "eos_token_id": [7, 9]}))
    assert load_prompts(folder, None, 1, seed=0).stop_token_ids == sorted([*eos, 7, 9])
    generation.unlink()
    assert load_prompts(folder, None, 1, seed=0).stop_token_ids == eos and len(eos) == 1


def test_prompts_of_a_data_file_are_repeated_when_there_are_too_few(assets):
    prompts = load_prompts(assets / "model", assets / "test.parquet", 20, seed=0)
    assert len(prompts.tokens) == 20 and prompts.tokens[0] == prompts.tokens[8] != prompts.tokens[1]


# ---- options ----


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--precision", "bf16,int4"], "--precision 'int4': 'int4' is not one of int8, fp8, bf16"),
        (["--precision", "int8:fp4"], "--precision 'int8:fp4': 'fp4' is not one of auto, int8_per_token_head"),
        (["--precision", ","], "--precision ',' names no precision"),
        (["--model", "no/such"], "--model no/such is neither 'toy' nor a folder with a config.json"),
        (["--model", "MODEL", "--tokens", "600"], "--tokens 600: with the longest prompt's"),
        (
            ["--model", "MODEL", "--data", "MODEL/config.json"],
            "config.json is not a parquet file with a column `prompt`",
        ),
    ],
)
def test_an_option_that_cannot_be_carried_out_is_named(assets, tmp_path, words, said):
    words = [word.replace("MODEL", str(assets / "model")) for word in words]
    result = CliRunner().invoke(app, ["mismatch", *words, "--output", str(tmp_path / "out")])
    assert isinstance(result.exception, ConfigError) and said in str(result.exception)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "holds no weights"),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer"),
        (
            lambda f: (f / "config.json").write_text(
                json.dumps(
                    {**json.loads((f / "config.json").read_text()), "quantization_config": {"quant_method": "fp8"}}
                )
            ),
            "is a quantized checkpoint",
        ),
    ],
    ids=["no weights", "no tokenizer", "quantized"],
)
def test_a_model_that_cannot_be_compared_is_refused_before_an_engine_starts(tmp_path, change, said):
    folder = make_assets(tmp_path / "assets") / "model"
    change(folder)
    with pytest.raises(ConfigError, match=f"--model .*{said}"):
        run(MismatchConfig(model=str(folder), output=tmp_path / "out"))


# ---- report ----

INT8_KV = "int8_per_token_head"


def test_the_report_is_plain_json_with_null_for_an_exact_weight_and_draws_its_two_panels(tmp_path):
    g = torch.Generator().manual_seed(0)
    meter = NoiseMeter(FORMATS)
    for kind in ("q_proj", "down_proj"):
        weight, x = (torch.randn(n, 64, generator=g).bfloat16() for n in (32, 8))
        meter.add(f"model.layers.0.{kind}", weight, x)
    metrics = log_prob_metrics([[-1.0, -2.0], [-0.5]], [[-1.1, -1.8], [-0.51]])
    kernels = {"bf16": "unquantized", "int8": "onednn", "fp8": "emulated"}
    results = [
        PrecisionResult(
            precision=precision,
            kv_cache=kv_cache,
            kernels={"linear": kernel, "experts": kernel},
            quantized_layers=2,
            unquantized_layers=0,
            updated_tensors=27,
            own=metrics,
            common=metrics,
            noise=meter.by_type(precision),
            seconds={},
        )
        for precision, kernel, kv_cache in [
            *((p, k, "auto") for p, k in kernels.items()),
            ("int8", "onednn", "int8_per_token_head"),
        ]
    ]
    words = dict(model="m", prompts="p", device="d", trainer="t", engine="e", date="2026-01-01")
    report = Report(**words, activation_tokens=8, versions={}, seed=0, seconds=1.0, results=results)
    data, picture = mismatch_report.write(report, tmp_path)
    bf16, int8, _, int8_kv = json.loads(data.read_text())["results"]
    assert bf16["noise"][0]["weight"]["median"] is None and int8["noise"][0]["weight"]["median"] > 30
    assert picture.stat().st_size > 10_000
    shown = mismatch_report.tables(report)
    assert [table.row_count for table in shown] == [8, 2]
    outputs = [column.header for column in shown[1].columns if column.header.endswith(" output")]
    assert outputs == ["bf16 output", "int8 output", "fp8 output"]  # as measured, whatever KV cache comes behind them
    assert int8_kv["kv_cache"] == INT8_KV and int8_kv["noise"] == int8["noise"]
    assert "fp8: no kernel on this device, emulated" in " ".join(mismatch_report.notes(report))
