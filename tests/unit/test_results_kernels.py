# SPDX-License-Identifier: Apache-2.0
"""What docs/results/rollout.md says of single kernels, of what lies over the floor and of the experiment with
Inductor."""

import statistics

import pytest
from result_pages import RESULTS, page, tables

from benchmarks import rollout as bench
from benchmarks import rollout_steps
from benchmarks.rollout import Report, RolloutConfig
from benchmarks.rollout_report import words
from flashrl_verl.tools.plan import gpus
from flashrl_verl.tools.plan.step import STREAM

WORDS = " ".join(page("rollout.md").split())
QUANTIZING, BETWEEN = "activation quantization", "norms, rope, activation"
BOTH = "int8 + int8_per_token_head KV"


def measured(name: str) -> tuple[RolloutConfig, Report]:
    return bench.measured(RESULTS / "rollout" / f"{name}.jsonl")


def recorded(name: str) -> dict[tuple[str, int], rollout_steps.Step]:
    """By arm and sequences."""
    return {(str(step.arm), step.work.sequences): step for step in rollout_steps.steps(*measured(name))}


def test_fp8s_kernels_are_in_words_what_the_profile_has():
    of = {key: step.kernels for key, step in recorded("qwen2.5-32b-four-arms").items()}
    products = [f"{of[arm, n]['linear layers']:.1f}" for n in (28, 256) for arm in ("fp8", "int8")]
    said = "{} and {} ms at 28 sequences, {} and {} ms at 256".format(*products)
    quantizing = [f"{of[arm, 28][QUANTIZING]:.1f}" for arm in ("fp8", "int8")]
    assert said + ", and so does quantizing for them, {} and {} ms at 28".format(*quantizing) in WORDS


def test_a_step_of_256_sequences_is_in_words_what_the_profile_has():
    of = recorded("qwen2.5-32b-four-arms")
    config, report = measured("qwen2.5-32b-four-arms")
    int8, bf16 = of["int8", 256], of["bf16", 256]
    shape = report.settings["config.json"]
    head = shape["vocab_size"] * shape["hidden_size"]
    projections = report.of(config.arms[1])[0].layers["quantized_bytes_as_bf16"] / 2
    h200 = gpus.find("h200")
    read = (projections + 2 * head) / (STREAM * h200.bandwidth) * 1e3
    compute = 2 * 256 * (projections / 1979e12 + head / 989e12) * 1e3  # dense INT8 and BF16 of the data sheet
    said = f"take {int8.kernels['linear layers']:.1f} ms, where reading at a copy's speed would take {read:.1f} ms"
    assert said + f" and the data sheet's operations {compute:.1f} ms" in WORDS
    cached = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * 128 * 2 * 256 * int8.context
    attention = int8.kernels["attention"]
    assert (
        f"reads {int8.context:.0f} tokens a sequence at {cached / attention / 1e9:.1f} TB/s ({attention:.1f} ms)"
        in WORDS
    )
    assert f"where ours takes {of[BOTH, 256].kernels['attention']:.1f} ms" in WORDS
    kernels = sum(bf16.kernels.values()) / sum(int8.kernels.values())
    said = (
        f"{bf16.between:.2f} ms in no kernel, INT8's {int8.between:.2f} ms: by kernels alone INT8 is {kernels:.2f} "
        "times"
    )
    assert said + f" as fast there, not {bf16.whole / int8.whole:.2f} times" in WORDS


def test_what_lies_over_the_floor_is_the_profiles():
    shown = {row[0]: row[1] for row in tables("rollout.md")[3][1:]}
    config, report = measured("qwen2.5-32b-int8-kv")
    step = recorded("qwen2.5-32b-int8-kv")[BOTH, 28]
    arm = next(arm for arm in config.arms if str(arm) == BOTH)
    profile = report.timing(arm, config.works[0]).profile
    shape, layers = report.settings["config.json"], report.of(arm)[0].layers
    head = 2 * shape["vocab_size"] * shape["hidden_size"]
    weights = layers["quantized_bytes_as_bf16"] / 2 + head
    cached = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * (128 + 4) * 28 * profile["context"]
    speed = STREAM * gpus.find("h200").bandwidth / 1e3
    kernel = max(time for kind, _, time, _ in profile["kernels"] if kind == "attention")
    over = {
        "attention": kernel - cached / speed,
        "products": step.kernels["linear layers"] - weights / speed,
        "quantizing activations": step.kernels[QUANTIZING],
    }
    assert shown == {name: f"{milliseconds:.1f}" for name, milliseconds in over.items()}
    assert f"over the floor: {over['attention']:.1f} of {step.whole - step.floor:.1f} ms" in WORDS


def test_how_much_machines_differ_is_in_words():
    decoding, prompts = {}, {}
    for name in (
        "qwen2.5-32b-two-arms",
        "qwen2.5-32b-four-arms",
        "qwen2.5-32b-kv",
        "qwen2.5-32b-int8-kv",
        "inductor/custom-op",
    ):
        config, report = measured(name)
        for arm in config.arms:
            for work in config.works:
                timing = report.timing(arm, work)
                decoding.setdefault((arm, work), []).append(statistics.median(bench.decode_seconds(timing)))
                prompts.setdefault((arm, work), []).append(statistics.median(timing.prefill_seconds))
    most = [100 * max(max(seconds) / min(seconds) - 1 for seconds in of.values()) for of in (decoding, prompts)]
    assert "differs by up to {:.1f} % in decoding and {:.1f} % in prompts".format(*most) in WORDS


def test_the_experiment_with_inductor_is_in_the_table_with_its_figures():
    expected = []
    for name, called in (("custom-op", "vLLM"), ("inductor", "Inductor")):
        config, report = measured(f"inductor/{name}")
        for work in config.works:
            timing = report.timing(config.arms[0], work)
            speeds = bench.tokens_per_second(timing)
            step = 1e3 * statistics.median(bench.decode_seconds(timing)) / (work.response - 1)
            speed = f"{statistics.median(speeds):.0f} ({min(speeds):.0f}-{max(speeds):.0f})"
            taken, launches = (
                timing.profile[of][QUANTIZING] + timing.profile[of][BETWEEN] for of in ("milliseconds", "launches")
            )
            expected.append([words(work), called, speed, f"{step:.2f}", f"{taken:.2f}", f"{launches:.0f}"])
    assert sorted(tables("rollout.md")[4][1:]) == sorted(expected)
    fewer = float(expected[0][-1]) - float(expected[2][-1])
    assert fewer == pytest.approx(192) and "192 launches fewer a step" in WORDS
