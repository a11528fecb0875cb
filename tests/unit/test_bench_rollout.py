# SPDX-License-Identifier: Apache-2.0
"""`flashrl bench rollout`: figures by hand from measured seconds, what is gone on with after a stop, words that are
refused."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from rollout_results import BF16, INT8, INT8_KV8, WORK, answer, config
from typer.testing import CliRunner
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from benchmarks import rollout, rollout_report
from benchmarks.__main__ import app
from benchmarks.rollout import Report, Result, decode_seconds, tokens_per_second
from benchmarks.rollout_engine import Timing
from benchmarks.rollout_worker import kv_tokens
from flashrl_verl.errors import ConfigError
from flashrl_verl.tools.engines.shapes import load_config, save_config
from flashrl_verl.tools.plan import gpus


@pytest.fixture
def measured(monkeypatch):
    """Engines that answer at once, the order in which they were asked, and the device beside whose results they would
    stand."""
    asked, devices = [], []

    def answers(module, questions, folder, places):
        assert places == (None,)
        for question in questions:
            turn, arm = question.key
            asked.append(str(arm))
            devices.append(question.job["device"])
            if len(asked) > measured_limit[0]:
                raise KeyboardInterrupt
            seconds = [6.0, 6.2] if arm == BF16 else [3.5, 3.7]
            yield question.key, asdict(answer(arm.precision, seconds, [1.0, 1.2]))

    measured_limit = [99]
    monkeypatch.setattr(rollout.engine_process, "answers", answers)
    monkeypatch.setattr(rollout, "require_host_memory", lambda shape, model: None)  # nothing is loaded
    return asked, measured_limit, devices


def test_speeds_by_hand():
    timing = Timing(work=[10, 100, 51], seconds=[5.1, 10.2], prefill_seconds=[0.1, 0.3, 5.0])
    assert tokens_per_second(timing) == [pytest.approx(100.0), pytest.approx(50.0)]  # 510 tokens
    assert decode_seconds(timing) == [pytest.approx(4.8), pytest.approx(9.9)]  # the median prefill takes 0.3 s


def test_arms_take_turns_and_the_table_has_ratios_by_hand(tmp_path, measured):
    cfg = config(tmp_path)
    report = rollout.run(cfg)
    assert measured[0] == ["bf16", "int8", "bf16", "int8"]
    assert report.timing(INT8, WORK).seconds == [3.5, 3.7, 3.5, 3.7]
    report = replace(report, environment=report.environment | {"device": "CPU"})
    row = rollout_report._row(report, rollout_report.Prediction(cfg, report), INT8, BF16, WORK)
    # medians 6.1 and 3.6 s, prefill 1.1 s; 10 x 51 tokens, of which 10 x 50 are decoded in 2.5 s
    assert row == ["142 (138-146)", "1.69", "-", "200", "2.00", "-", "50.00", "4"]


def test_after_a_stop_the_same_command_measures_the_rest(tmp_path, measured):
    asked, limit, devices = measured
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


def test_later_engines_are_told_the_device_of_the_first(tmp_path, measured):
    rollout.run(config(tmp_path, rounds=1))
    report = rollout.run(config(tmp_path))
    assert measured[2] == [None] + ["NVIDIA H100 80GB HBM3"] * 3
    assert report.environment["device"] == "NVIDIA H100 80GB HBM3" and report.environment["memory_bytes"] is None


def test_results_of_another_version_are_refused(tmp_path, measured, monkeypatch):
    rollout.run(config(tmp_path, rounds=1))
    software = rollout.software()
    assert {"torch", "vllm", "verl", "flashrl_verl", "python"} <= set(software)
    monkeypatch.setattr(rollout, "software", lambda: software | {"vllm": "9.9"})
    with pytest.raises(ConfigError, match=r"another vllm \(.*, now 9\.9\).*--output"):
        rollout.run(config(tmp_path))
    assert len(measured[0]) == 2


def test_results_of_other_code_of_the_same_version_are_refused(tmp_path, measured, monkeypatch):
    report = rollout.run(config(tmp_path, rounds=1))
    assert len(report.environment["package"]) == 12
    monkeypatch.setattr(rollout, "package_digest", lambda: "another")
    with pytest.raises(
        ConfigError, match=rf"other code .*digest {report.environment['package']}, now another.*--output"
    ):
        rollout.run(config(tmp_path))
    assert len(rollout.run(config(tmp_path, rounds=1)).results) == 2  # what is there can be shown again


def test_what_is_measured_can_be_shown_where_it_could_not_be_measured(tmp_path, measured, monkeypatch):
    rollout.run(config(tmp_path, rounds=1))

    def no_memory(shape, model):
        raise ConfigError("no memory")

    monkeypatch.setattr(rollout, "require_host_memory", no_memory)
    monkeypatch.setattr(rollout, "visible_gpus", lambda: ())
    assert len(rollout.run(config(tmp_path, rounds=1)).results) == 2
    with pytest.raises(ConfigError, match="no memory"):
        rollout.run(config(tmp_path))


def test_what_makes_arms_hard_to_compare_is_said(tmp_path, measured):
    report = rollout.run(config(tmp_path, rounds=1))
    assert rollout_report.comparability(report) == []
    bf16, int8 = report.results
    elsewhere = replace(int8, parallel=2, answer=replace(int8.answer, device={**int8.answer.device, "machine": "abc"}))
    machines, cores = rollout_report.comparability(replace(report, results=[bf16, elsewhere, elsewhere]))
    assert machines.startswith("arms were measured on several machines")
    assert machines.endswith(": not recorded (bf16); abc (int8)")
    assert cores.endswith(": 1 at a time (bf16); 2 at a time (int8)")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("bench", ["rollout", "refit", "training"])
def test_weights_that_the_host_cannot_hold_are_refused_before_anything_is_made(tmp_path, monkeypatch, bench):
    """32.8 billion parameters in BF16 are 61 GiB; the training's model of six layers 8, and its gradients as many."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5 * 2**30))
    words = [bench, "--model", "qwen2.5-32b", "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(app, words + (["--layers", "2,6"] if bench == "training" else []))
    assert isinstance(result.exception, ConfigError) and not (tmp_path / "out").exists()
    size = "17 GiB of BF16 weights and gradients" if bench == "training" else "61 GiB of BF16 weights"
    assert f"{size} do not fit into the 5 GiB" in str(result.exception)


def test_results_of_another_shape_under_the_same_name_are_refused(tmp_path, measured):
    shape = tmp_path / "shape"
    cfg = config(tmp_path / "out", model=str(shape), rounds=1)
    for layers in (2, 1):
        save_config(load_config("tiny", layers), shape)
        if layers == 2:
            rollout.run(cfg)
    with pytest.raises(ConfigError, match=r"another config\.json\. .*--output"):
        rollout.run(cfg)


@pytest.mark.parametrize("left", ["", '{"settings": {"mod', "\n".join(["{}", ""]), "[1]\n", '"x"\n', "no JSON\n"])
def test_a_header_that_was_torn_is_no_traceback(left, tmp_path, measured):
    (tmp_path / rollout.RESULTS).write_text(left)
    if "\n" in left:  # whole, but not ours: not to be written over
        with pytest.raises(ConfigError, match="no results of this release .*--output"):
            rollout.run(config(tmp_path))
        assert (tmp_path / rollout.RESULTS).read_text() == left and not measured[0]
    else:
        rollout.run(config(tmp_path))
        assert [r.round for r in rollout.run(config(tmp_path)).results] == [0, 0, 1, 1] and len(measured[0]) == 4


def test_a_disk_that_is_full_leaves_the_results_that_were_there(tmp_path, measured, monkeypatch):
    rollout.run(config(tmp_path, rounds=1))
    before = (tmp_path / rollout.RESULTS).read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        rollout.run(config(tmp_path))
    assert (tmp_path / rollout.RESULTS).read_bytes() == before


def test_groups_of_layers_share_the_kv_caches_blocks():
    def group(*names):
        spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
        return KVCacheGroupSpec(layer_names=list(names), kv_cache_spec=spec)

    alike, hybrid = [group("a", "b")], [group("a"), group("b")]
    assert kv_tokens(KVCacheConfig(num_blocks=101, kv_cache_tensors=[], kv_cache_groups=alike)) == 1616
    assert kv_tokens(KVCacheConfig(num_blocks=101, kv_cache_tensors=[], kv_cache_groups=hybrid)) == 800


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
    assert (device in " ".join(rollout_report.notes(cfg, report))) == (name is None)


def test_every_gpu_has_a_device_name_and_no_two_share_one():
    names = [device for gpu in gpus.GPUS.values() for device in gpu.devices]
    assert all(gpu.devices for gpu in gpus.GPUS.values()) and len(names) == len(set(names))


def test_the_memory_that_was_found_is_planned_with_and_not_the_data_sheets(tmp_path, measured):
    cfg = config(tmp_path, model="qwen2.5-32b")
    found = rollout.run(cfg)
    tokens = [
        rollout_report.Prediction(
            cfg, replace(found, environment={"device": "NVIDIA H200", "memory_bytes": memory})
        ).kv_tokens(INT8)
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
        (["--arm", "int8:bfloat16"], "--arm 'int8:bfloat16': 'bfloat16' is not one of auto, int8_per_token_head"),
        (["--arm", "int8:fp9"], "--arm 'int8:fp9'"),
        (["--arm", ","], "--arm ',' names no precision"),
        (["--arm", "int8,bf16,int8:auto"], "--arm names one twice"),
        (["--work", ", "], "--work names none"),
        (["--work", "1x3+4,1x3+4"], "--work names one twice"),
        (["--work", "12x3"], "--work '12x3'"),
        (["--work", "0x3+4"], "--work '0x3+4'"),
        (["--work", "1x3+1"], "--work '1x3+1'"),
        (["--model", "no-such"], "--model 'no-such'"),
    ],
)
def test_words_that_cannot_be_are_refused_by_name(tmp_path, words, part, measured):
    result = CliRunner().invoke(app, ["rollout", *words, "--output", str(tmp_path / "out")])
    assert result.exit_code == 1 and isinstance(result.exception, ConfigError) and part in str(result.exception)
    assert not measured[0]


def test_words_become_arms_and_works(tmp_path, measured):
    words = ["--arm", "int8:int8_per_token_head, bf16", "--work", "1x3+4,2x5+6", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, ["rollout", *words])
    assert result.exit_code == 0, result.output
    assert measured[0] == [str(INT8_KV8), "bf16"] and str(INT8_KV8) == "int8 + int8_per_token_head KV"
    settings = json.loads((tmp_path / rollout.RESULTS).read_text().splitlines()[0])["settings"]
    assert [(work["sequences"], work["prompt"], work["response"]) for work in settings["works"]] == [
        (1, 3, 4),
        (2, 5, 6),
    ]


def test_the_default_shape_has_heads_that_vllms_cpu_attention_takes():
    shape = load_config("tiny")
    assert shape.hidden_size // shape.num_attention_heads in CPUAttentionBackend.get_supported_head_sizes()
