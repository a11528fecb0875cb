# SPDX-License-Identifier: Apache-2.0
"""`flashrl plan`: sizes against tensors that exist, memory, schedule and step by hand, advice, and the command. Speeds
against what was measured are in `test_plan_measured.py`."""

import math
from pathlib import Path

import pytest
import torch
from transformers import Gemma3TextConfig, GPT2Config, MistralConfig, Starcoder2Config
from typer.testing import CliRunner

import flashrl_verl
from flashrl_verl.cli import app
from flashrl_verl.errors import ConfigError
from flashrl_verl.settings import KVCache, Precision
from flashrl_verl.tools.engines.shapes import SHAPES, load_config, tensor_shapes
from flashrl_verl.tools.plan.command import DEFAULTS, of_run, plan_of
from flashrl_verl.tools.plan.gpus import find
from flashrl_verl.tools.plan.memory import Choice, Engine, memory_of, weight_bytes
from flashrl_verl.tools.plan.planner import make_plan
from flashrl_verl.tools.plan.schedule import Work, response_lengths, simulate
from flashrl_verl.tools.plan.shape import shape_of
from flashrl_verl.tools.plan.step import Clock, StepTime
from flashrl_verl.tools.plan.whole_step import (
    ATTENTION,
    LIGER,
    PRODUCTS,
    Levers,
    forward_operations,
    whole_step,
)

BF16, INT8 = (Choice(precision=precision) for precision in (Precision.BF16, Precision.INT8))
H200 = find("h200")
EXPERIMENTS = Path(flashrl_verl.__file__).parent / "configs" / "experiment"


@pytest.fixture(scope="module")
def qwen32b():
    return shape_of(load_config("qwen2.5-32b"))


def plan(model="qwen2.5-32b", gpu="h200", count=1, engine=None, samples=1, **work):
    work = Work(**{"sequences": 128, "prompt": 256, "response": 512, **work})
    shape = shape_of(load_config(model))
    return make_plan(model, shape, find(gpu), count, engine or Engine(), work, samples=samples)


# ---- sizes ----


@pytest.mark.parametrize(
    "name, parameters",  # of their model cards
    [
        ("qwen2.5-0.5b", 0.49e9),
        ("qwen2.5-7b", 7.61e9),
        ("qwen2.5-14b", 14.7e9),
        ("qwen2.5-32b", 32.5e9),
        ("qwen3-1.7b", 1.72e9),
        ("qwen3-8b", 8.2e9),
        ("qwen3-14b", 14.8e9),
        ("qwen3-32b", 32.8e9),
        ("qwen3-30b-a3b", 30.5e9),
    ],
)
def test_parameters_are_those_of_the_model_cards(name, parameters):
    assert shape_of(load_config(name)).parameters == pytest.approx(parameters, rel=0.01)


def test_bytes_are_those_of_tensors_that_exist():
    config = load_config("tiny")
    shape = shape_of(config)
    weights = dict(tensor_shapes(config))
    assert weight_bytes(shape, BF16) == sum(t.nbytes for t in weights.values())
    projections = [t for name, t in weights.items() if name.endswith("_proj.weight")]
    rest = sum(t.nbytes for name, t in weights.items() if not name.endswith("_proj.weight"))
    assert weight_bytes(shape, INT8) == rest + sum(t.numel() + 4 * t.shape[0] for t in projections)


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "tiny"])
def test_a_weight_update_sends_what_verls_engine_sends_a_tied_head_too(name):
    config = load_config(name)
    assert shape_of(config).sent == sum(t.numel() for _, t in tensor_shapes(config))


def test_a_token_passes_its_experts_and_a_batch_touches_as_many_as_sampling_does():
    shape = shape_of(load_config("qwen3-30b-a3b"))
    assert shape.parameters - shape.expert * (1 - 8 / 128) == pytest.approx(3.3e9, rel=0.02)  # its model card
    assert forward_operations(shape, 10, 0) == pytest.approx(20 * (shape.linear + shape.expert * 8 / 128 + shape.head))
    generator = torch.Generator().manual_seed(5)
    for tokens in (1, 7, 40):
        picked = torch.rand(400, tokens, shape.experts, generator=generator).topk(shape.experts_per_token).indices
        distinct = sum(len(draw.unique()) for draw in picked.flatten(1)) / 400 / shape.experts
        assert shape.experts_touched(tokens) == pytest.approx(distinct, rel=0.02)


SMALL = dict(num_hidden_layers=2, hidden_size=64, intermediate_size=256, num_attention_heads=4, vocab_size=99)


@pytest.mark.parametrize(
    "config, part",
    [
        (Starcoder2Config(**SMALL), "c_fc"),
        (Gemma3TextConfig(**SMALL), "sliding_attention"),
        (MistralConfig(sliding_window=4096, num_hidden_layers=2), "a sliding window"),
        (GPT2Config(n_layer=2), "intermediate_size"),
    ],
)
def test_a_model_whose_time_or_cache_is_not_known_is_refused(config, part):
    with pytest.raises(ConfigError, match=part):
        shape_of(config)


# ---- memory and time, by hand ----


def test_memory_is_divided_as_vllm_does(qwen32b):
    """H200: 139.8 GiB x 0.9; 32.76 billion weights; activations; 0.43 GiB fixed; 64 layers' graphs; 256 KiB a token."""
    layer = 8192 * (2 * 5120 * 2 + 2 * 27648 * 2 + 27648 * 2)  # residual, its norm, gate and up, their product
    sampling = 1024 * 152064 * (2 + 4 * 4)  # logits in BF16, then in FP32; log-probs, probabilities, random numbers
    for sequences, activations in ((1024, sampling), (256, layer)):
        left = 139.8 * 2**30 * 0.9 - 2 * qwen32b.parameters - activations - 0.43 * 2**30 - 64 * 16 * 2**20
        assert memory_of(qwen32b, BF16, H200, Engine(max_num_seqs=sequences)).tokens == int(left // (256 * 1024))
    int8_kv = Choice(precision=Precision.INT8, kv_cache=KVCache.INT8_PER_TOKEN_HEAD)
    assert memory_of(qwen32b, int8_kv, H200, Engine()).kv_per_token == 128 * 1024 * (1 + 4 / 128)
    assert qwen32b.kv_bytes_per_token(2, 8) == qwen32b.kv_bytes_per_token(2, 16) == 64 * 2 * 128 * 2  # heads are copied


def test_a_prompt_passes_the_head_once():
    """0.5B: 358 million weights of layers, 136 of the head, a quarter of the operations; 100 sequences of 1000."""
    clock = Clock(shape=shape_of(load_config("qwen2.5-0.5b")), choice=BF16, gpu=H200)
    tokens, sequences = 100_000, 100
    operations = 2 * (357_826_560 * tokens + 896 * 151936 * sequences)
    attention = 24 * 4 * 896 * (1000 / 2) * tokens
    planned = clock.prefill(tokens, 1000, sequences)
    assert planned == pytest.approx((operations + attention) / (0.65 * 989e12), rel=0.01)
    assert clock.prefill(tokens, 1000, tokens) > 1.2 * planned


def test_a_whole_step(qwen32b):
    """64 H200s, 8192 sequences of 4096 tokens; 31.2 billion weights of projections and 0.78 of the head pass a
    token."""
    tokens = 8192 * 4096
    products = 2 * tokens * (64 * (5120 * 5120 * 2 + 2 * 5120 * 1024 + 3 * 5120 * 27648) + 5120 * 152064)
    attention = 64 * 4 * 5120 * (4096 / 2) * tokens  # two products, each over the half that lies behind the token
    peak = 64 * 989e12

    def planned(**levers):
        return whole_step(qwen32b, H200, 64, rollout=100.0, tokens=tokens, length=4096, levers=Levers(**levers))

    def expected(attention_shares, faster=(1.0, 1.0)):
        return [
            products / peak / PRODUCTS / f + attention / peak / a for f, a in zip(faster, attention_shares, strict=True)
        ]

    step = planned()
    log_probs, update = expected(ATTENTION[False])
    assert step.log_probs == pytest.approx(log_probs, rel=1e-3)
    assert step.update == pytest.approx(4 * update, rel=1e-3)
    assert step.refit == pytest.approx(2 * qwen32b.parameters / 6e9)
    assert step.seconds == 100.0 + step.log_probs + step.update + step.refit
    assert planned(even_mini_batches=False).update == pytest.approx(1.05 * step.update)
    for levers, (log_probs, update) in (
        ({"flash_attention_4": True}, expected(ATTENTION[True])),
        ({"liger": True}, expected(ATTENTION[False], (LIGER, LIGER))),
    ):
        assert planned(**levers).log_probs == pytest.approx(log_probs, rel=1e-3)
        assert planned(**levers).update == pytest.approx(4 * update, rel=1e-3)


def test_groups_that_are_generated_for_one_that_is_used():
    assert Levers().started(512) == 1
    # 1.79 standard deviations: 512 / 0.6 started, each informative with a probability of 0.6
    deviation = math.sqrt(512 / 0.6 * 0.6 * 0.4)
    assert Levers(constant=0.4).started(512) == pytest.approx((512 + 1.79 * deviation) / 0.6 / 512)
    assert Levers(constant=0.4, refill=False).started(512) == pytest.approx(1.4 / 0.6)
    assert Levers(constant=0.4, asynchronous=True).started(512) == pytest.approx(1 / 0.6)


# ---- the schedule ----


class SteadyClock:
    """Every decode step takes a second, prefills nothing: times can be counted by hand."""

    def __init__(self):
        self.read, self.contexts = [], []

    def decode(self, sequences, context):
        self.contexts.append(context)
        return StepTime(linear=1.0, attention=0, quantize=0, reduce=0, rest=0)

    def prefill(self, tokens, length, sequences):
        self.read.append((tokens, length, sequences))
        return 0.0


@pytest.mark.parametrize("seed", range(20))
def test_the_schedule_is_that_of_a_loop_over_single_steps(seed):
    generator = torch.Generator().manual_seed(seed)
    sequences, prompt, response, limit = (
        int(torch.randint(1, high, (), generator=generator)) for high in (40, 30, 50, 30)
    )
    work = Work(sequences=sequences, prompt=prompt, response=response, spread=0.8 * (seed % 2))
    longest = prompt + max(response_lengths(work))
    tokens = longest + int(torch.randint(0, sequences * longest, (), generator=generator))
    line = simulate(SteadyClock(), work, tokens, limit)
    assert (line.steps, line.preemptions) == step_by_step(work, tokens, limit)


def step_by_step(work: Work, tokens: int, limit: int) -> tuple[int, int]:
    """Steps and preemptions, one token at a time."""
    waiting, running, steps, preemptions = [(0, wanted) for wanted in response_lengths(work)], [], 0, 0
    while waiting or running:
        while waiting and len(running) < limit:
            held = sum(work.prompt + done for done, _ in running)
            if held + work.prompt + waiting[0][0] + len(running) + 1 > tokens:
                break
            running.append(waiting.pop(0))
        while sum(work.prompt + done + 1 for done, _ in running) > tokens:
            waiting.insert(0, running.pop())
            preemptions += 1
        running = [(done + 1, wanted) for done, wanted in running]
        running = [(done, wanted) for done, wanted in running if done < wanted]
        steps += 1
    return steps, preemptions


def test_lengths_are_lognormal_up_to_a_limit():
    lengths = response_lengths(Work(sequences=4000, prompt=1, response=5000, spread=0.7))
    logarithms = torch.tensor(lengths).log()
    assert torch.tensor(lengths).double().mean() == pytest.approx(5000, rel=1e-3)
    assert logarithms.std() == pytest.approx(0.7, rel=0.01)
    assert logarithms.mean().exp() == pytest.approx(5000 / math.exp(0.7**2 / 2), rel=0.01)
    cut = response_lengths(Work(sequences=4000, prompt=1, response=5000, spread=0.7, limit=8000))
    assert max(cut) == 8000 and torch.tensor(cut).double().mean() == pytest.approx(5000, rel=1e-3)


def test_responses_that_share_a_prompt_read_and_keep_it_once():
    """Two to a prompt of 8, responses of 4: 16 tokens for two where 24 would be, and steps that see whole prompts."""
    work, apart, together = Work(sequences=4, prompt=8, response=4), SteadyClock(), SteadyClock()
    one, two = simulate(apart, work, 24, max_num_seqs=4), simulate(together, work, 32, max_num_seqs=4, sharing=2)
    assert one.steps == 2 * two.steps
    assert apart.read == [(16, 8, 2), (16, 8, 2)] and together.read == [(16, 8, 4)]
    assert apart.contexts == [10, 10] and together.contexts == [10]


def test_responses_are_spread_over_the_engines():
    work = dict(model="qwen2.5-7b", sequences=64, prompt=2048)
    shared, alone = (plan(count=count, samples=8, **work).outcomes[0] for count in (2, 8))
    one = plan(count=8, samples=1, **work).outcomes[0]
    assert shared.fit > 1.5 * one.fit and alone.fit == one.fit and alone.timeline == one.timeline


# ---- the advice ----


def test_the_advice_follows_what_the_variants_gain():
    assert plan("qwen2.5-0.5b").advice.startswith("Stay with BF16 weights")
    assert plan(gpu="a100-80gb").advice.startswith("Take int8 (TP 1)")  # BF16 leaves little memory for the KV cache
    some = plan()  # a rollout that is faster, and a step that is within the plan's error
    int8 = next(x for x in some.layouts if x.choice == INT8)
    bf16 = next(x for x in some.layouts if x.choice == BF16)
    assert bf16.rollout_s > 1.15 * int8.rollout_s and bf16.step_s < 1.1 * int8.step_s
    assert some.advice.startswith("Stay with BF16 weights")
    long = plan("qwen2.5-7b", sequences=64, prompt=1024, response=15000)
    fastest = max(long.outcomes, key=lambda outcome: outcome.speedup)
    assert fastest.choice.eight_bit_kv and long.advice.startswith("Stay with BF16 weights")
    assert f"with {fastest.choice} (TP 1) the rollout is {fastest.speedup:.2f}x" in long.advice


def test_a_bf16_that_hardly_fits_is_not_the_measure():
    """On one H100 BF16 weights of 32B leave room for few sequences; on two it is another matter."""
    made = plan(gpu="h100", count=8, sequences=512, prompt=512, response=2048)
    int8 = next(outcome for outcome in made.outcomes if outcome.choice == INT8)
    best = {
        choice: min(x.rollout_s for x in made.layouts if x.choice == choice and 8 % x.tensor_parallel == 0)
        for choice in (BF16, INT8)
    }
    assert int8.speedup > 3 and 1.1 < best[BF16] / best[INT8] < 1.6
    assert f"the rollout is {best[BF16] / best[INT8]:.2f}x" in made.advice


def test_what_does_not_fit_or_has_no_tensor_cores_is_refused_by_variant():
    made = plan(gpu="a100-80gb", engine=Engine(gpu_memory_utilization=0.75))
    said = {str(outcome.choice): outcome.refused for outcome in made.outcomes}
    assert said["fp8"] == "no FP8 tensor cores" and "of weights leave 0.0" in said["bf16"] and said["int8"] is None
    assert made.outcomes[0].whole is None and all(outcome.speedup is None for outcome in made.outcomes)
    assert made.advice.startswith("Take int8") and "BF16 fits in no layout" in made.advice


@pytest.mark.parametrize(
    "words, part",
    [
        (dict(gpu="a6000", engine=Engine(gpu_memory_utilization=0.5)), "Take more GPUs for an engine"),
        (dict(gpu="a6000", count=4, engine=Engine(gpu_memory_utilization=0.5)), "With --tensor-parallel 2, 4 it does"),
        (dict(count=3, engine=Engine(tensor_parallel=2)), "--gpus 3"),
        (dict(count=5, engine=Engine(tensor_parallel=5)), "8 KV heads .*these do: 1, 2, 4, 8"),
        (dict(model="qwen2.5-7b", count=7, engine=Engine(tensor_parallel=7)), "4 KV heads"),
        (dict(gpu="b300"), "h200"),
    ],
)
def test_what_cannot_be_is_refused_with_its_option(words, part):
    with pytest.raises(ConfigError, match=part):
        plan(**words)


# ---- the command ----


@pytest.mark.parametrize("name", sorted(path.stem for path in EXPERIMENTS.glob("*_*.yaml")))
def test_every_shipped_experiment_can_be_planned(name):
    run = of_run([f"experiment={name}"])
    assert run["model"] in SHAPES and run["samples"] > 1
    made = plan_of({**DEFAULTS, **run}, H200)
    assert all(outcome.refused is None and outcome.whole.seconds > 0 for outcome in made.outcomes)
    engines = made.gpus // made.engine.tensor_parallel
    assert made.sequences == engines * -(-run["sequences"] // engines)


def test_the_command_plans_a_run_by_its_overrides():
    """DAPO-32B on 32 H100s, whose figures are quoted in many places: seconds of the rollout and of a step."""
    words = ["experiment=dapo_qwen2.5_32b_int8"]
    made = plan_of({**DEFAULTS, **of_run(words)}, find("h100"))
    rows = {str(outcome.choice): outcome.whole for outcome in made.outcomes}
    quoted = {"bf16": (6013, 8188), "int8": (5321, 7496), "int8 + INT8 KV": (3584, 5759)}
    assert {key: (round(rows[key].rollout), round(rows[key].seconds)) for key in quoted} == quoted
    assert (made.gpus, made.engine.tensor_parallel, made.work.sequences) == (32, 4, 1024)
    assert (made.work.prompt, made.work.response, made.work.limit) == (1024, 10240, 20480)
    by_lever = [whole.seconds for _, whole in made.by_lever]
    assert len(by_lever) == 8 and by_lever == sorted(by_lever, reverse=True)
    result = CliRunner().invoke(app, ["plan", *words, "--gpu", "h100"])
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert ["int8", "5321", "421", "1743", "11", "7496", "0.98"] in lines


def test_nothing_is_compared_with_a_stock_verl_that_does_not_fit():
    words = ["plan", "--model", "qwen2.5-32b", "--gpu", "h100", "--gpus", "8", "--gpu-memory-gib", "60"]
    said = CliRunner().invoke(app, [*words, "--constant-groups", "0.4", "--sequences", "512", "--explain"]).output
    rows = [line.split() for line in said.splitlines() if line.strip().startswith("+ ")]
    assert len(rows) > 3 and {row[-1] for row in rows} == {"-"}


def test_explain_tells_layouts_memory_and_what_is_left_out():
    words = ["plan", "experiment=dapo_qwen2.5_32b_int8", "flashrl.keep_first_layers=3", "--gpus", "2"]
    words += ["--tensor-parallel", "2", "--gpu", "l40", "--gpu-memory-gib", "60", "--sequences", "64"]
    short, long = (CliRunner().invoke(app, [*words, *more]).output for more in ([], ["--explain"]))
    assert long.startswith(short) and len(short.splitlines()) < 16
    said = " ".join(long.split())
    assert "flashrl.keep_first_layers=3" in said and "40% of groups constant" in said
    # 16 bytes for each of 32.76 billion parameters: 488.2 GiB, over two GPUs of 60
    assert "are 244.1 GiB of each GPU, more than its 60, unless" in said
    assert all(len(line) <= 80 for line in long.splitlines())


def test_responses_share_their_prompt_where_the_run_caches_prefixes():
    words = ["experiment=dapo_qwen2.5_7b_int8", "actor_rollout_ref.rollout.n=8"]
    assert of_run(words)["samples"] == 8
    assert of_run([*words, "actor_rollout_ref.rollout.enable_prefix_caching=false"])["samples"] == 1


@pytest.mark.parametrize(
    "words, part",
    [
        (["experiment=dapo_qwen2.5_32b_int8", "flashrl.precision=int4"], "flashrl.precision"),
        (["experiment=dapo_qwen2.5_32b_int8", "actor_rollout_ref.model.path=a/b"], "--model"),
    ],
)
def test_the_command_refuses_with_the_option_or_key(words, part):
    result = CliRunner().invoke(app, ["plan", *words])
    assert result.exit_code == 1 and isinstance(result.exception, ConfigError) and part in str(result.exception)
