# SPDX-License-Identifier: Apache-2.0
"""Figures and words of docs/results/throughput.md, and where else they are quoted, are those of the raw data."""

import re
import statistics
from dataclasses import replace

from result_pages import RESULTS, drawn, page, tables

from benchmarks import rollout as bench
from benchmarks import rollout_figure, rollout_report, rollout_steps_figure
from benchmarks.rollout_figure import Bar
from flashrl_verl.tools.engines.shapes import load_config
from flashrl_verl.tools.plan import gpus
from flashrl_verl.tools.plan.memory import Engine
from flashrl_verl.tools.plan.planner import make_plan
from flashrl_verl.tools.plan.schedule import Work
from flashrl_verl.tools.plan.shape import shape_of

WORDS = " ".join(page("throughput.md").split())


def whole_memory() -> dict[str, list[Bar]]:
    """What has four arms, by model."""
    files = {
        "32b": "rollout/qwen2.5-32b-four-arms.jsonl",
        **{size: f"throughput/qwen2.5-{size}.jsonl" for size in ("14b", "7b")},
    }
    return {size: rollout_figure.bars(RESULTS / file) for size, file in files.items()}


def the(bars: list[Bar], arm: str, sequences: int) -> Bar:
    (found,) = [bar for bar in bars if (str(bar.arm), bar.work.sequences) == (arm, sequences)]
    return found


def test_every_throughput_is_in_the_table_with_its_figures():
    whole = [RESULTS / "rollout" / f"qwen2.5-32b{part}.jsonl" for part in ("-two-arms", "-four-arms")]
    files = [*whole, *sorted((RESULTS / "throughput").glob("*.jsonl"))]
    expected = rollout_figure.rows([bar for file in files for bar in rollout_figure.bars(file)])
    (shown,) = tables("throughput.md")
    assert shown[0] == [*rollout_figure.COLUMNS]
    assert sorted(shown[1:]) == sorted(expected)


def test_the_days_of_measuring_are_on_the_page():
    days = {
        file.stem: bench.measured(file)[1].environment["date"]
        for file in sorted((RESULTS / "throughput").glob("*.jsonl"))
    }
    assert days.pop("qwen2.5-32b-71gib-two-arms") == "2026-11-23" and set(days.values()) == {"2026-11-22"}
    assert '2026-11-22, "two-arms" at 71 GiB 2026-11-23, one run of each measurement' in WORDS


def test_what_8_bit_keys_and_values_bring_where_memory_is_short_is_in_words():
    found = rollout_figure.bars(RESULTS / "throughput" / "qwen2.5-32b-71gib-three-arms.jsonl")
    short, long = ({str(bar.arm): bar for bar in found if bar.work.sequences == n} for n in (256, 28))
    ratios = [
        statistics.median(of["int8"].seconds) / statistics.median(of[kv].seconds)
        for kv, of in
        # fmt: skip
        (("int8 + int8_per_token_head KV", short), ("int8 + int8_per_token_head KV", long), ("fp8", short))
    ]
    words = " ".join(page("throughput.md").split())
    assert f"is {ratios[0]:.2f} times as fast as INT8 alone with 256 short sequences" in words
    assert (
        f"and {ratios[1]:.2f} times with long prompts. FP8 is {1 - ratios[2]:.0%} behind INT8".replace("%", " %")
        in words
    )
    held = short["int8 + int8_per_token_head KV"].fit, short["int8"].fit
    assert "the one cache holds {} and the other {}".format(*held) in words


def test_what_int8_gains_where_32b_bf16_hardly_fits_is_in_words():
    found = rollout_figure.bars(RESULTS / "throughput" / "qwen2.5-32b-71gib-two-arms.jsonl")
    (short, few), (long, fewer) = ((the(found, "int8", n), the(found, "bf16", n)) for n in (256, 28))
    gains = [rollout_figure.speed_up(bar, found) for bar in (short, long)]
    said = (
        "INT8 is {:.2f} times as fast with 256 short sequences, of which it holds {} at a time and BF16 {}, and {:.2f} "
        "times"
    )
    assert said.format(gains[0], short.fit, few.fit, gains[1]) in WORDS
    assert f"with 28 long prompts, of which it holds {long.fit} and BF16 {fewer.fit}." in WORDS
    others = rollout_figure.bars(RESULTS / "throughput" / "qwen2.5-32b-71gib-three-arms.jsonl")
    faster = [
        statistics.median(the(others, "int8", bar.work.sequences).seconds) / statistics.median(bar.seconds) - 1
        for bar in (short, long)
    ]
    assert [f"{100 * ratio:.0f}" for ratio in faster] == [
        "2",
        "2",
    ] and "INT8 itself was 2 % faster than in the run" in WORDS
    of_73 = rollout_figure.bars(RESULTS / "throughput" / "qwen2.5-32b-73gib.jsonl")
    fits = {arm: [bar.fit for bar in [*of_73, short, few] if str(bar.arm) == arm] for arm in ("bf16", "int8")}
    said = "for {} to {} short sequences at a time, or {} of 8192 tokens, INT8's for {} to {}, or {}:"
    bounds = (min(fits["bf16"]), max(fits["bf16"]), fewer.fit, min(fits["int8"]), max(fits["int8"]), long.fit)
    assert said.format(*bounds) in WORDS
    all_gains = [*gains, *(rollout_figure.speed_up(bar, of_73) for bar in of_73 if str(bar.arm) == "int8")]
    assert f"a 32B rollout {min(all_gains):.1f} to {max(all_gains):.1f} times as fast" in WORDS


def test_how_much_each_size_gains_is_in_words():
    gains = {
        (size, arm): [rollout_figure.speed_up(the(bars, arm, n), bars) for n in (256, 28)]
        for size, bars in whole_memory().items()
        for arm in ("int8", "fp8", "int8 + int8_per_token_head KV")
    }
    smaller = [gain for size in ("14b", "7b") for gain in gains[size, "int8"]]
    assert f"{min(smaller):.1f} to {max(smaller):.1f} times at 14B and at 7B" in WORDS
    both = [gain for (_, arm), pair in gains.items() if "KV" in arm for gain in pair]
    assert f"an INT8 KV cache {min(both):.1f} to {max(both):.1f} times at every size" in WORDS
    ahead = sorted(
        a / b - 1 for size in ("32b", "14b", "7b") for a, b in zip(gains[size, "int8"], gains[size, "fp8"], strict=True)
    )
    assert f"**INT8 is {100 * ahead[1]:.0f} to {100 * ahead[-1]:.0f} % faster than FP8**" in WORDS and ahead[0] < 0.02


def test_how_much_faster_prompts_are_read_is_in_words():
    ratios = []
    for file in (
        "rollout/qwen2.5-32b-two-arms.jsonl",
        "rollout/qwen2.5-32b-four-arms.jsonl",
        *(f"throughput/qwen2.5-{n}.jsonl" for n in ("14b", "7b")),
    ):
        config, report = bench.measured(RESULTS / file)
        for work in config.works:
            bf16, int8 = (statistics.median(report.timing(arm, work).prefill_seconds) for arm in config.arms[:2])
            ratios.append(bf16 / int8)
    assert f"Prompts are read {min(ratios):.1f} to {max(ratios):.1f} times as fast in INT8" in WORDS


def test_the_page_on_precisions_quotes_these_results():
    rows = next(rows for rows in tables("../precision_and_cap.md") if "INT8, INT8 KV cache" in rows[0])[1:]
    measured, shown = whole_memory(), 0
    small = rollout_figure.bars(RESULTS / "throughput" / "qwen2.5-32b-73gib.jsonl")
    size = None
    for row in rows:
        size = match[1].lower() if (match := re.match(r"Qwen2.5-(\d+B)'s", row[0])) else size
        bars = small if "73 GiB" in row[0] else measured[size]
        sequences = int(re.search(r"(\d+) x \(", row[0])[1])
        assert row[1] == f"{statistics.median(the(bars, 'bf16', sequences).tokens_per_second):.0f}"
        for cell, arm in zip(row[2:], ("int8", "fp8", "int8 + int8_per_token_head KV"), strict=True):
            if cell:
                bar = the(bars, arm, sequences)
                ratio = rollout_figure.speed_up(bar, bars)
                assert cell == f"{statistics.median(bar.tokens_per_second):.0f} ({ratio:.2f} x)"
                shown += 1
    assert shown == 13


def test_what_the_plan_makes_of_the_small_memory_is_in_words():
    config, report = bench.measured(RESULTS / "throughput" / "qwen2.5-32b-73gib.jsonl")
    rows = [row for row in rollout_report.speed_rows(config, report) if row[1] == "int8"]
    said = (
        "With the KV cache that was measured the plan has {} and {} for the whole rollouts with 73 GiB, {} and {} for "
        "decoding;"
    )
    assert said.format(*(row[column] for column in (4, 7) for row in rows)) in WORDS
    alone = []
    for work in config.works:
        engine = Engine(gpu_memory_utilization=config.gpu_memory_utilization)
        made = make_plan("qwen2.5-32b", shape_of(load_config("qwen2.5-32b")), gpus.find("h200"), 1, engine, work)
        alone += [
            re.search(r"Take int8: ([\d.]+)x of BF16's rollout", line)[1] for line in made.advice if "Take int8" in line
        ]
    assert "with a KV cache of its own planning, `flashrl plan` says {} and {}.".format(*alone) in WORDS
    noisy = rollout_report.speed_rows(*bench.measured(RESULTS / "throughput" / "qwen2.5-7b-71gib.jsonl"))
    worst = max(float(row[at + 1]) / float(row[at]) for row in noisy for at in (3, 6))
    assert f"where it has up to {100 * (worst - 1):.0f} % more than was measured" in WORDS
    long = rollout_report.speed_rows(*bench.measured(RESULTS / "throughput" / "qwen2.5-32b-71gib-two-arms.jsonl"))[-1]
    more = 100 * (float(long[7]) / float(long[6]) - 1)
    again = {
        size: rollout_report.speed_rows(*bench.measured(RESULTS / "throughput" / "again" / f"qwen2.5-{size}.jsonl"))
        for size in ("7b", "32b-71gib")
    }
    short = max(float(row[at + 1]) / float(row[at]) for row in again["7b"] if "256 x" in row[0] for at in (3, 6))
    (long,) = (float(row[7]) / float(row[6]) for row in again["32b-71gib"] if (row[0][:4], row[1]) == ("28 x", "int8"))
    said = (
        f"there, {more:.0f} % more; [again](throughput_again.md) it had up to {100 * (short - 1):.0f} % more than was "
        "measured "
        f"for 7B's short sequences with the whole memory, and {100 * (long - 1):.0f} % more for those long prompts."
    )
    assert f"and for decoding alone of 32B's long prompts {said}" in WORDS


def test_what_the_plan_says_of_gpus_that_were_not_measured_is_in_words():
    gains, shape = [], shape_of(load_config("qwen2.5-32b"))
    for name in ("a100-80gb", "h100"):
        made = make_plan(
            "qwen2.5-32b", shape, gpus.find(name), 1, Engine(), Work(sequences=256, prompt=256, response=384)
        )
        gains += [
            match[1] for line in made.advice if (match := re.search(r"Take int8: ([\d.]+)x of BF16's rollout", line))
        ]
    said = (
        "--gpu a100-80gb --gpus 1 --sequences 256 --prompt-length 256 --response-length 384` computes INT8 at {} times "
        "BF16"
    )
    assert f"{said.format(gains[0])} on an A100-80GB and {gains[1]} times on an H100 (`--gpu h100`)," in WORDS


def test_what_14b_and_7b_gain_with_little_memory_is_in_words():
    whole = whole_memory()
    little = {
        size: rollout_figure.bars(RESULTS / "throughput" / f"qwen2.5-{size}-71gib.jsonl") for size in ("14b", "7b")
    }

    def gain(of: dict[str, list[Bar]], size: str, sequences: int, arm: str = "int8") -> str:
        return f"{rollout_figure.speed_up(the(of[size], arm, sequences), of[size]):.2f}"

    short_of_room = [bar for bars in little.values() for bar in bars if bar.fit < bar.work.sequences]
    assert [(bar.model, str(bar.arm), bar.fit, bar.work.sequences) for bar in short_of_room] == [
        ("qwen2.5-14b", "bf16", 26, 28)
    ]
    both = gain(little, "14b", 28), gain(little, "14b", 28, "int8 + int8_per_token_head KV")
    assert "26 of 28 at a time: INT8 is {} times as fast there, with an INT8 KV cache {} times".format(*both) in WORDS
    pairs = [gain(of, size, n) for size, n in (("14b", 256), ("7b", 28), ("7b", 256)) for of in (little, whole)]
    pairs += [gain(of, "7b", 256, "int8 + int8_per_token_head KV") for of in (little, whole)]
    said = "{} for {} at 14B, {} for {} at 7B; with 7B's short sequences {} for {}, with an INT8 KV cache {} for {}."
    assert said.format(*pairs) in WORDS
    repeats = max(max(bar.seconds) / min(bar.seconds) - 1 for bar in little["7b"])
    config, again = bench.measured(RESULTS / "throughput" / "again" / "qwen2.5-7b.jsonl")
    later = max(max(s) / min(s) - 1 for s in (again.timing(arm, config.works[0]).seconds for arm in config.arms))
    said = "differ by up to {:.0f} % there, [again](throughput_again.md) by {:.0f} % with the whole memory"
    assert said.format(100 * repeats, 100 * later) in WORDS


def test_the_pictures_are_those_of_the_raw_data(tmp_path):
    files = ["rollout/qwen2.5-32b-two-arms", "rollout/qwen2.5-32b-four-arms"]
    files += [f"throughput/qwen2.5-{name}" for name in ("14b", "7b", "32b-73gib")]
    files += ["throughput/again/qwen2.5-32b-71gib", *(f"throughput/qwen2.5-{name}-71gib" for name in ("14b", "7b"))]
    bars = [bar for file in files for bar in rollout_figure.bars(RESULTS / f"{file}.jsonl")]
    rollout_figure.write(bars, tmp_path / "throughput.png")
    assert drawn(RESULTS / "throughput" / "throughput.png") == drawn(tmp_path / "throughput.png")
    config, report = bench.measured(RESULTS / "rollout" / "qwen2.5-32b-four-arms.jsonl")
    _, speeds = rollout_report.write(replace(config, output=tmp_path), report)
    (steps,) = rollout_steps_figure.write(replace(config, output=tmp_path), report)
    for name, picture in (("", speeds), ("-steps", steps)):
        assert drawn(RESULTS / "rollout" / f"qwen2.5-32b-four-arms{name}.png") == drawn(picture)
