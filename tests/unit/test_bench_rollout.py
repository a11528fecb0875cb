# SPDX-License-Identifier: Apache-2.0
"""`flashrl bench rollout`: figures by hand from measured seconds, what is gone on with after a stop, words that are refused."""

import json
from dataclasses import asdict, replace

import pytest
from typer.testing import CliRunner

from flashrl_verl.bench import rollout, rollout_report
from flashrl_verl.bench.rollout import Arm, Report, Result, RolloutConfig, decode_seconds, tokens_per_second
from flashrl_verl.bench.rollout_engine import Answer, Timing
from flashrl_verl.cli import app
from flashrl_verl.config import Precision
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.plan import gpus
from flashrl_verl.plan.schedule import Work

BF16, INT8 = (Arm(precision=precision, kv_cache="auto") for precision in (Precision.BF16, Precision.INT8))
WORK = Work(sequences=10, prompt=100, response=51)


def answer(precision: Precision, seconds: list[float], prefill: list[float], kv_dtype="bfloat16") -> Answer:
    dtypes = {"int8": {"int8": 8}, "bf16": {}}[precision.value]
    return Answer(
        layers={"precision": precision.value, "quantized": dtypes},
        memory={"kv_tokens": 1000, "kv_bytes": 512000, "kv_dtype": kv_dtype, "weight_bytes": 2e9},
        backend="X",
        timings=[Timing(work=[10, 100, 51], seconds=seconds, prefill_seconds=prefill)],
        start_seconds=1.0,
    )


def config(tmp_path, **more) -> RolloutConfig:
    settings = dict(
        model="tiny", arms=(BF16, INT8), works=(WORK,), rounds=2, repeats=2, gpu_memory_utilization=0.9, tensor_parallel=1,
        max_num_seqs=64, max_num_batched_tokens=512, layers=None, seed=0, output=tmp_path,
    )  # fmt: skip
    return RolloutConfig(**{**settings, **more})


@pytest.fixture
def measured(monkeypatch):
    """Engines that answer at once, and the order in which they were asked."""
    asked = []

    def measure(cfg, arm, model):
        asked.append(str(arm))
        if len(asked) > measured_limit[0]:
            raise KeyboardInterrupt
        return answer(arm.precision, [6.0, 6.2] if arm == BF16 else [3.5, 3.7], [1.0, 1.2])

    measured_limit = [99]
    monkeypatch.setattr(rollout, "_measure", measure)
    return asked, measured_limit


def test_speeds_by_hand():
    timing = Timing(work=[10, 100, 51], seconds=[5.1, 10.2], prefill_seconds=[0.1, 0.3, 5.0])
    assert tokens_per_second(timing) == [pytest.approx(100.0), pytest.approx(50.0)]  # 510 tokens
    assert decode_seconds(timing) == [pytest.approx(4.8), pytest.approx(9.9)]  # the median prefill takes 0.3 s


def test_arms_take_turns_and_the_table_has_ratios_by_hand(tmp_path, measured):
    cfg = config(tmp_path)
    report = rollout.run(cfg)
    assert measured[0] == ["bf16", "int8", "bf16", "int8"]
    assert report.timing(INT8, WORK).seconds == [3.5, 3.7, 3.5, 3.7]
    row = rollout_report._row(report, rollout_report.Prediction(cfg, report), INT8, BF16, WORK)
    # medians 6.1 and 3.6 s, prefill 1.1 s; 10 x 51 tokens, of which 10 x 50 are decoded in 2.5 s
    assert row == ["142 (138-146)", "1.69", "-", "200", "2.00", "-", "50.00", "4"]


def test_after_a_stop_the_same_command_measures_the_rest(tmp_path, measured):
    asked, limit = measured
    limit[0] = 2
    with pytest.raises(KeyboardInterrupt):
        rollout.run(config(tmp_path))
    with (tmp_path / rollout.RESULTS).open("a") as file:
        file.write('{"round": 1, "arm": "bf')  # torn by the stop
    limit[0] = 99
    report = rollout.run(config(tmp_path))
    assert asked == ["bf16", "int8", "bf16", "bf16", "int8"]
    assert [(r.round, r.arm) for r in report.results] == [(0, "bf16"), (0, "int8"), (1, "bf16"), (1, "int8")]


def test_more_arms_and_rounds_are_added_and_other_settings_refused(tmp_path, measured):
    rollout.run(config(tmp_path, rounds=1, arms=(BF16,)))
    rollout.run(config(tmp_path))
    assert measured[0] == ["bf16", "int8", "bf16", "int8"]
    with pytest.raises(ConfigError, match="another max_num_seqs, .*seed.*--output"):
        rollout.run(config(tmp_path, seed=1, max_num_seqs=2))


@pytest.mark.parametrize(
    "given, part",
    [
        (answer(Precision.BF16, [1.0], [0.1]), "quantization is 'bf16'"),
        (answer(Precision.INT8, [1.0], [0.1], kv_dtype="uint8"), "--kv-cache auto: the engine's KV cache is uint8"),
    ],
)
def test_an_engine_that_is_not_what_its_arm_says_is_refused(tmp_path, monkeypatch, given, part):
    monkeypatch.setattr(rollout.engine_process, "ask", lambda *words, **more: asdict(given))
    with pytest.raises(FlashRLError, match=part):
        rollout.run(config(tmp_path, arms=(INT8,)))
    assert not (tmp_path / rollout.RESULTS).exists()


def test_on_a_known_gpu_the_plan_stands_beside_it(tmp_path, measured):
    cfg = config(tmp_path, model="qwen2.5-32b")
    report = rollout.run(cfg)
    report = replace(report, environment={**report.environment, "device": "NVIDIA H200"})
    prediction = rollout_report.Prediction(cfg, report)
    assert prediction.kv_tokens(INT8) > prediction.kv_tokens(BF16) > 200_000
    row = rollout_report._row(report, prediction, INT8, BF16, replace(WORK))
    assert 1.2 < float(row[2]) < 2.1 and 1.2 < float(row[5]) < 2.1


@pytest.mark.parametrize(
    "device, name",
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", None),  # less compute than the H200
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA RTX 6000 Ada Generation", None),
        ("CPU (x86_64, 2 threads)", None),
    ],
)
def test_a_gpu_is_known_by_its_whole_name(device, name, tmp_path, measured):
    found = gpus.of_device(device)
    assert (None if found is None else found.name) == name
    cfg = config(tmp_path)
    report = replace(rollout.run(cfg), environment={"device": device, "memory_bytes": None})
    assert (rollout_report.Prediction(cfg, report).kv_tokens(INT8) is None) == (name is None)
    assert (device in (rollout_report.note(report) or "")) == (name is None)


def test_every_gpu_has_a_device_name_and_no_two_share_one():
    names = [device for gpu in gpus.GPUS.values() for device in gpu.devices]
    assert all(gpu.devices for gpu in gpus.GPUS.values()) and len(names) == len(set(names))


def test_the_memory_that_was_found_is_planned_with_and_not_the_data_sheets(tmp_path, measured):
    cfg = config(tmp_path, model="qwen2.5-32b")
    found = rollout.run(cfg)
    tokens = [
        rollout_report.Prediction(cfg, replace(found, environment={"device": "NVIDIA H200", "memory_bytes": memory})).kv_tokens(
            INT8
        )
        for memory in (None, 130 * 2**30, 120 * 2**30)
    ]
    # 64 layers, K and V, 8 heads of 128 in BF16 take 256 KiB a token; 0.9 of 10 GiB
    assert tokens[1] - tokens[2] == pytest.approx(0.9 * 10 * 2**30 / (64 * 2 * 8 * 128 * 2), abs=2)
    assert tokens[0] > tokens[1]


def test_files_are_written_and_the_json_is_the_report(tmp_path, measured):
    cfg = config(tmp_path)
    report = rollout.run(cfg)
    data, picture = rollout_report.write(cfg, report)
    assert json.loads(data.read_text())["results"][1]["answer"]["timings"][0]["seconds"] == [3.5, 3.7]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert isinstance(report, Report) and isinstance(report.results[0], Result)


@pytest.mark.parametrize(
    "words, part",
    [
        (["--arm", "int4"], "--arm 'int4'"),
        (["--work", "12x3"], "--work '12x3'"),
        (["--work", "0x3+4"], "--work '0x3+4'"),
        (["--work", "1x3+1"], "--work '1x3+1'"),
        (["--model", "no-such"], "--model 'no-such'"),
    ],
)
def test_words_that_cannot_be_are_refused_by_name(tmp_path, words, part):
    result = CliRunner().invoke(app, ["bench", "rollout", *words, "--output", str(tmp_path / "out")])
    assert result.exit_code == 1 and isinstance(result.exception, ConfigError) and part in str(result.exception)
