# SPDX-License-Identifier: Apache-2.0
"""`flashrl plan`: sizes against tensors that exist, memory and schedule by hand, speeds against what was measured."""

import re

import pytest
import torch
from transformers import Gemma3TextConfig, GPT2Config, MistralConfig, Starcoder2Config

from flashrl_verl.errors import ConfigError
from flashrl_verl.settings import KVCache, Precision
from flashrl_verl.tools.engines.shapes import load_config, random_weights, tensor_shapes
from flashrl_verl.tools.plan import gpus
from flashrl_verl.tools.plan.advice import WORTH, advise
from flashrl_verl.tools.plan.memory import Choice, Engine, memory_of, weight_bytes
from flashrl_verl.tools.plan.planner import choices, make_plan
from flashrl_verl.tools.plan.schedule import Work
from flashrl_verl.tools.plan.shape import shape_of
from flashrl_verl.tools.plan.step import Clock

BF16, INT8, FP8 = (Choice(precision=precision) for precision in (Precision.BF16, Precision.INT8, Precision.FP8))
H200 = gpus.find("h200")


@pytest.fixture(scope="module")
def qwen32b():
    return shape_of(load_config("qwen2.5-32b"))


@pytest.mark.parametrize(
    "name, parameters",
    # Model cards of Qwen/Qwen2.5-0.5B (0.49B), -7B (7.61B), -14B (14.7B), -32B (32.5B), Qwen/Qwen3-30B-A3B (30.5B)
    [
        ("qwen2.5-0.5b", 0.49e9),
        ("qwen2.5-7b", 7.61e9),
        ("qwen2.5-14b", 14.7e9),
        ("qwen2.5-32b", 32.5e9),
        ("qwen3-30b-a3b", 30.5e9),
    ],
)
def test_parameters_are_those_of_the_model_cards(name, parameters):
    assert shape_of(load_config(name)).parameters == pytest.approx(parameters, rel=0.01)


def test_bytes_are_those_of_tensors_that_exist():
    config = load_config("tiny")
    shape = shape_of(config)
    weights = random_weights(config, torch.bfloat16, torch.device("cpu"), 2**20)
    assert weight_bytes(shape, BF16) == sum(t.nbytes for t in weights.values())
    projections = [t for name, t in weights.items() if name.endswith("_proj.weight")]
    rest = sum(t.nbytes for name, t in weights.items() if not name.endswith("_proj.weight"))
    assert weight_bytes(shape, INT8) == rest + sum(t.numel() + 4 * t.shape[0] for t in projections)


def test_active_parameters_of_a_mixture_are_those_of_its_name():
    shape = shape_of(load_config("qwen3-30b-a3b"))
    active = shape.parameters - shape.expert * (1 - shape.experts_per_token / shape.experts)
    assert active == pytest.approx(3.3e9, rel=0.02)  # "30.5B in total and 3.3B activated": its model card


def test_experts_that_a_batch_touches_agree_with_sampling():
    shape = shape_of(load_config("qwen3-30b-a3b"))
    generator = torch.Generator().manual_seed(5)
    for tokens in (1, 7, 40):
        picked = torch.rand(400, tokens, shape.experts, generator=generator).topk(shape.experts_per_token).indices
        distinct = sum(len(draw.unique()) for draw in picked.flatten(1)) / 400 / shape.experts
        assert shape.experts_touched(tokens) == pytest.approx(distinct, rel=0.02)


def test_kv_heads_are_copied_when_there_are_more_gpus(qwen32b):
    assert qwen32b.kv_bytes_per_token(2, 1) == 64 * 2 * 8 * 128 * 2  # layers, K and V, heads, channels, bytes
    assert qwen32b.kv_bytes_per_token(2, 8) == qwen32b.kv_bytes_per_token(2, 16) == 64 * 2 * 128 * 2


def test_memory_is_divided_as_vllm_does_by_hand(qwen32b):
    """H200: 139.8 GiB x 0.9; 32.76 billion weights; activations; 0.43 GiB fixed; 64 layers' graphs; 256 KiB a token."""
    layer = 8192 * (2 * 5120 * 2 + 2 * 27648 * 2 + 27648 * 2)  # residual, its norm, gate and up, their product
    sampling = 1024 * 152064 * (2 + 4 * 4)  # logits in BF16, then in FP32; log-probs, probabilities, random numbers
    for sequences, activations in ((1024, sampling), (256, layer)):
        left = 139.8 * 2**30 * 0.9 - 2 * qwen32b.parameters - activations - 0.43 * 2**30 - 64 * 16 * 2**20
        assert memory_of(qwen32b, BF16, H200, Engine(max_num_seqs=sequences)).tokens == int(left // (256 * 1024))


def test_a_prompt_passes_the_head_once_by_hand():
    """0.5B: 358 million weights of layers, 136 of the head, a quarter of the operations; 100 sequences of 1000."""
    shape = shape_of(load_config("qwen2.5-0.5b"))
    clock = Clock(shape=shape, choice=BF16, gpu=H200)
    tokens, sequences = 100_000, 100
    speed = 0.65 * 989e12
    operations = 2 * (357_826_560 * tokens + 896 * 151936 * sequences)
    attention = 24 * 4 * 896 * (1000 / 2) * tokens
    assert clock.prefill(tokens, 1000, sequences) == pytest.approx((operations + attention) / speed, rel=0.01)
    assert clock.prefill(tokens, 1000, tokens) > 1.2 * clock.prefill(tokens, 1000, sequences)


def plan(model="qwen2.5-32b", gpu="h200", count=1, engine=None, **work):
    work = Work(**{"sequences": 128, "prompt": 256, "response": 512, **work})
    return make_plan(model, shape_of(load_config(model)), gpus.find(gpu), count, engine or Engine(), work)


def test_small_models_are_advised_to_stay_in_bf16():
    assert plan("qwen2.5-0.5b").advice[0].startswith("Stay with BF16 weights")


def test_long_responses_are_told_of_the_8_bit_kv_cache_by_the_row_that_is_fastest():
    made = plan("qwen2.5-7b", sequences=64, prompt=1024, response=15000)
    first, second = made.advice[:2]
    fastest = max(made.outcomes, key=lambda outcome: outcome.speedup)
    assert first.startswith("Stay with BF16 weights") and fastest.choice.eight_bit_kv
    assert (
        f"With {fastest.choice} it would be {fastest.speedup:.2f}x" in second
        and "no long run has been trained" in second
    )


def test_a_weight_update_sends_what_verls_engine_sends_a_tied_head_too():
    for name in ("qwen2.5-0.5b", "tiny"):
        config = load_config(name)
        assert shape_of(config).sent == sum(t.numel() for _, t in tensor_shapes(config))


@pytest.mark.parametrize(
    "config, part",
    [
        (
            Starcoder2Config(
                num_hidden_layers=2, hidden_size=64, intermediate_size=256, num_attention_heads=4, vocab_size=99
            ),
            "c_fc",
        ),
        (
            Gemma3TextConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=128, vocab_size=99),
            "sliding_attention",
        ),
        (MistralConfig(sliding_window=4096, num_hidden_layers=2), "a sliding window"),
        (GPT2Config(n_layer=2), "intermediate_size"),
    ],
)
def test_a_model_whose_time_or_cache_is_not_known_is_refused(config, part):
    with pytest.raises(ConfigError, match=part):
        shape_of(config)


def test_responses_are_spread_over_the_engines():
    shared, alone = (make_plan_of_7b(samples=8, count=count).outcomes[0] for count in (2, 8))
    one = make_plan_of_7b(samples=1, count=8).outcomes[0]
    assert shared.fit > 1.5 * one.fit and alone.fit == one.fit and alone.timeline == one.timeline


def make_plan_of_7b(samples: int, count: int):
    shape, work = shape_of(load_config("qwen2.5-7b")), Work(sequences=64, prompt=2048, response=512)
    return make_plan("qwen2.5-7b", shape, H200, count, Engine(), work, samples=samples)


def test_a_large_model_is_advised_to_take_int8_for_its_smaller_mismatch():
    assert plan().advice[0].startswith("Take int8: 1.")


def test_fp8_is_refused_without_its_tensor_cores_and_bf16_where_it_does_not_fit():
    made = plan(gpu="a100-80gb", engine=Engine(gpu_memory_utilization=0.75))
    said = {str(outcome.choice): outcome.refused for outcome in made.outcomes}
    assert said["fp8"] == "no FP8 tensor cores" and "of weights leave 0.0" in said["bf16"] and said["int8"] is None
    assert "BF16 does not fit" in made.advice[0]


@pytest.mark.parametrize(
    "words, part",
    [
        (dict(gpu="a6000", engine=Engine(gpu_memory_utilization=0.5)), "--tensor-parallel"),
        (dict(count=3, engine=Engine(tensor_parallel=2)), "--gpus 3"),
        (dict(count=3, engine=Engine(tensor_parallel=3)), "40 attention heads"),
        (dict(count=5, engine=Engine(tensor_parallel=5)), "8 KV heads .*these do: 1, 2, 4, 8"),
        (dict(model="qwen2.5-7b", count=7, engine=Engine(tensor_parallel=7)), "4 KV heads"),
        (dict(gpu="b300"), "h200"),
    ],
)
def test_what_cannot_be_is_refused_with_its_option(words, part):
    with pytest.raises(ConfigError, match=part):
        plan(**words)


def test_a_bf16_that_hardly_fits_is_not_the_measure():
    """On one H100 BF16 weights of 32B leave room for few sequences; on two it is another matter."""
    made = plan(gpu="h100", count=8, sequences=1024, prompt=512, response=2048)
    gain = next(outcome.speedup for outcome in made.outcomes if str(outcome.choice) == "int8")
    found = re.search(r"in BF16 \((\d) in an engine\) and \d+ in INT8 \((\d)\): ([\d.]+)x", made.advice[0])
    assert gain > 3 and int(found[1]) > 1 and 1.1 < float(found[3]) < 1.6
    assert float(found[3]) > WORTH
    # The memory that makes the difference is told of where it is made, not behind the other ratio.
    assert made.advice[1].startswith("Take int8: ") and made.advice[1].endswith("find room in the KV cache at a time.")


def test_eight_bits_that_gain_little_with_the_best_layout_are_not_advised_outright():
    made, shape = plan(), shape_of(load_config("qwen2.5-32b"))
    much, little = (advise(list(made.outcomes), shape, made.engine, gain)[0] for gain in (WORTH, WORTH - 0.01))
    assert much == made.advice[0] and much.startswith("Take int8: 1.")
    assert little.startswith("Stay with BF16 weights where you can have that layout; with this one take int8: 1.")


def test_eight_bits_of_keys_and_values_are_int8_with_a_scale_for_each_token_and_head(qwen32b):
    assert {choice.kv_cache for choice in choices()} == {KVCache.AUTO, KVCache.INT8_PER_TOKEN_HEAD}
    choice = Choice(precision=Precision.INT8, kv_cache=KVCache.INT8_PER_TOKEN_HEAD)
    assert str(choice) == "int8 + INT8 KV"
    assert memory_of(qwen32b, choice, H200, Engine()).kv_per_token == 128 * 1024 * (1 + 4 / 128)
    for gpu in ("a100-80gb", "h200"):
        assert "flashrl.kv_cache=int8_per_token_head" in " ".join(plan(gpu=gpu, response=16384).advice)
