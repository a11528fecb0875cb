# SPDX-License-Identifier: Apache-2.0
"""`flashrl plan` against the rollouts that were measured on H200s: memory, steps, prompts, ratios to BF16."""

import json
import statistics
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from flashrl_verl.tools.engines.shapes import load_config
from flashrl_verl.tools.plan.gpus import GIB, of_device
from flashrl_verl.tools.plan.memory import Engine, memory_of
from flashrl_verl.tools.plan.planner import choices
from flashrl_verl.tools.plan.schedule import Work, simulate
from flashrl_verl.tools.plan.shape import shape_of
from flashrl_verl.tools.plan.step import HOST_S, Clock
from flashrl_verl.tools.plan.whole_step import Levers, whole_step

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
ONE_GPU = "rollout/*.jsonl", "throughput/**/*.jsonl", "rollout/inductor/custom-op.jsonl"
FOUR_GPUS = ("rollout/*-tp4/*.jsonl",)
NOISY = ("throughput/qwen2.5-7b-71gib", "throughput/again/qwen2.5-7b")
"""Two repeats of one engine, with 256 sequences, differ by 12 and 17 %."""
LITTLE = ("throughput/qwen2.5-32b-71gib-two-arms", "throughput/again/qwen2.5-32b-71gib")
"""BF16's KV cache is the smallest here, 6.3 GiB: three sequences of 8192 tokens at a time."""

BESIDE_OTHERS = ("rollout/h200-rotation-bf16",)
"""While three other GPUs of the host ran other engines: BF16's step of 256 sequences took 7.9 % longer than planned."""


@dataclass(frozen=True)
class Measured:
    """A variant and a workload: what was measured, and the plan's clock for it."""

    file: str
    work: Work
    clock: Clock
    engine: Engine
    tokens: int
    """Of the KV cache."""
    timing: dict[str, Any]

    @property
    def key(self) -> tuple[str, Work]:
        return self.file, self.work

    @property
    def decode_s(self) -> float:
        """The whole rollout less the same prompts with one token each."""
        pairs = zip(self.timing["seconds"], self.timing["prefill_seconds"], strict=True)
        return statistics.median(whole - prompts for whole, prompts in pairs)

    def prefill(self) -> float:
        return self.clock.prefill(self.work.sequences * self.work.prompt, self.work.prompt, self.work.sequences)

    def has_room(self) -> bool:
        """For all sequences at a time, and all of one length, so that a decode step has one size."""
        return not self.work.spread and self.tokens >= self.work.sequences * (self.work.prompt + self.work.response)


@cache
def measured(files: tuple[str, ...] = ONE_GPU) -> list[Measured]:
    """All of it; formats that this release does not have are left out."""
    found, known = [], {str(choice).replace(" + INT8 KV", "+int8kv"): choice for choice in choices()}
    for file in sorted(file for pattern in files for file in RESULTS.glob(pattern)):
        head, *rows = map(json.loads, file.read_text().splitlines())
        settings, environment = head["settings"], head["environment"]
        gpu = replace(of_device(environment["device"]), memory_gib=environment["memory_bytes"] / GIB)
        shape = shape_of(load_config(settings["model"]))
        names = ("tensor_parallel", "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens")
        engine = Engine(**{name: settings[name] for name in names})
        for row in rows:
            for timing in row["timings"] if row["variant"] in known else ():
                sequences, prompt, response = timing["workload"]
                tail = {"spread": settings.get("spread", 0.0), "limit": settings.get("limit")}
                work = Work(sequences=sequences, prompt=prompt, response=response, **tail)
                clock = Clock(
                    shape=shape, choice=known[row["variant"]], gpu=gpu, tensor_parallel=engine.tensor_parallel
                )
                where = str(file.relative_to(RESULTS).with_suffix(""))
                found.append(Measured(where, work, clock, engine, row["memory"]["kv_tokens"], timing))
    return found


def test_kv_caches_are_planned_within_1_percent_and_the_smallest_within_1_2():
    assert len(measured()) > 88
    for one in measured():
        planned = memory_of(one.clock.shape, one.clock.choice, one.clock.gpu, one.engine).tokens
        within = 0.012 if one.file in LITTLE else 0.01
        assert planned == pytest.approx(one.tokens, rel=within), (one.file, str(one.clock.choice))


def test_decode_steps_are_planned_within_7_percent_and_prompts_within_8():
    steps = 0
    for one in filter(Measured.has_room, measured()):
        planned = one.clock.decode(one.work.sequences, one.work.prompt + one.work.response / 2).total
        within = 0.145 if one.file in NOISY and one.work.sequences == 256 else 0.07
        within = max(within, 0.08 if one.file in BESIDE_OTHERS else 0)
        assert planned == pytest.approx(one.decode_s / (one.work.response - 1), rel=within), (one.key, one.clock.choice)
        assert one.prefill() == pytest.approx(statistics.median(one.timing["prefill_seconds"]), rel=0.08), one.key
        steps += 1
    assert steps > 50


def test_ratios_to_bf16_are_planned_within_8_percent_but_where_repeats_differ():
    """Of whole rollouts and of decoding, with the KV cache that was measured."""
    bf16 = {one.key: one for one in measured() if str(one.clock.choice) == "bf16"}
    compared = 0
    for one in measured():
        base = bf16.get(one.key)
        if base is None or base is one or one.work.spread:
            continue
        noisy = one.file in NOISY and one.work.sequences == 256
        little = one.file in LITTLE and one.work.prompt == 8192
        planned = [simulate(x.clock, x.work, x.tokens, x.engine.max_num_seqs).seconds for x in (base, one)]
        wholes = [statistics.median(x.timing["seconds"]) for x in (base, one)]
        decodes = [seconds - x.prefill() for seconds, x in zip(planned, (base, one), strict=True)]
        said = (one.file, str(one.clock.choice), one.work)
        within = 0.15 if noisy else 0.08
        assert planned[0] / planned[1] == pytest.approx(wholes[0] / wholes[1], rel=within), said
        assert decodes[0] / decodes[1] == pytest.approx(base.decode_s / one.decode_s, rel=0.12 if little else within), (
            said
        )
        compared += 1
    assert compared > 50


def test_rollouts_with_long_tails_are_planned_within_10_percent():
    tailed = [one for one in measured() if one.work.spread]
    assert len(tailed) > 8
    for one in tailed:
        planned = simulate(one.clock, one.work, one.tokens, one.engine.max_num_seqs).seconds
        assert planned == pytest.approx(statistics.median(one.timing["seconds"]), rel=0.1), str(one.clock.choice)


def test_prompts_of_four_gpus_are_planned_within_11_percent_and_what_follows_within_17():
    """With the KV cache that was measured: for CUDA graphs of up to 1,024 sequences vLLM leaves 5 to 6 % more out of it
    than is planned."""
    assert len(measured(FOUR_GPUS)) > 8
    for one in measured(FOUR_GPUS):
        said = (one.file, one.work)
        planned = memory_of(one.clock.shape, one.clock.choice, one.clock.gpu, one.engine).tokens
        assert planned == pytest.approx(1.055 * one.tokens, rel=0.01), said
        seconds = simulate(one.clock, one.work, one.tokens, one.engine.max_num_seqs).seconds
        assert one.prefill() == pytest.approx(one.timing["prefill_seconds"][0], rel=0.11), said
        assert seconds - one.prefill() == pytest.approx(one.decode_s, rel=0.17), said


def test_the_parts_of_profiled_steps_are_planned():
    """Products and attention within 6 %; quantization and the rest, a tenth of a step or less, within 17 and 15 %."""
    profiled = [one for one in measured() if one.timing.get("profile") and one.has_room()]
    assert len(profiled) > 8
    for one in profiled:
        step = one.clock.decode(one.work.sequences, one.work.prompt + one.work.response / 2)
        parts = dict(one.timing["profile"]["milliseconds"])
        for name, planned, within in (
            ("linear layers", step.linear, 0.06),
            ("attention", step.attention, 0.06),
            ("activation quantization", step.quantize, 0.17),
        ):
            assert 1e3 * planned == pytest.approx(parts.pop(name), rel=within), (one.key, one.clock.choice, name)
        assert 1e3 * (step.rest - HOST_S) == pytest.approx(sum(parts.values()), rel=0.15), (one.key, one.clock.choice)


def trainer_passes():
    """Planned over measured, of every pass that ``benchmarks.training`` timed on a GPU: 32B's width, whole models."""
    for file in sorted(RESULTS.glob("step/**/*.json")):
        record = json.loads(file.read_text())
        words = " ".join(record["settings"]["overrides"]) if "passes" in record else "sdpa"
        if "sdpa" in words:
            continue
        levers = Levers(
            flash_attention_4="flash-attn-4" in record["environment"],
            liger="use_liger=true" in words,
        )
        for one in record["passes"]:
            shape = shape_of(load_config(record["settings"]["model"]))
            gpu = of_device(record["environment"]["device"])
            step = whole_step(shape, gpu, 1, 0.0, one["tokens"], one["length"], levers)
            yield (
                one["name"],
                {"old log-probs": step.log_probs, "policy update": step.update}[one["name"]] / one["whole_s"],
            )


def test_the_trainers_passes_are_as_measured():
    found = list(trainer_passes())
    assert len(found) == 24
    for name, least, most in (("old log-probs", 0.88, 1.1), ("policy update", 0.92, 1.15)):
        ratios = [ratio for pass_, ratio in found if pass_ == name]
        assert least < min(ratios) and max(ratios) < most, (name, min(ratios), max(ratios))
        assert statistics.median(ratios) == pytest.approx(1.0, abs=0.03)
