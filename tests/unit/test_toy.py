# SPDX-License-Identifier: Apache-2.0
"""The quickstart's assets: what the tokenizer, the task, the reward and the warm-up promise."""

import dataclasses
import json

import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.quickstart.assets import MANIFEST, AssetsConfig, make_assets
from flashrl_verl.quickstart.model import ToyModelConfig, build_model
from flashrl_verl.quickstart.reward import compute_score
from flashrl_verl.quickstart.task import DATA_SOURCE, Problem, TaskConfig, split_problems
from flashrl_verl.quickstart.tokenizer import ROLES, build_tokenizer
from flashrl_verl.quickstart.warmup import Encoder, WarmupConfig, evaluate, warm_up

# Stops at the first probe, after one update: for what does not depend on how good the model is.
BRIEF = AssetsConfig(
    model=ToyModelConfig(hidden_size=64, intermediate_size=64, num_layers=1),
    warmup=WarmupConfig(target_accuracy=0.0, probe_every=1, batch_size=8),
)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return make_assets(tmp_path_factory.mktemp("toy") / "assets", AssetsConfig())


@pytest.mark.parametrize("text", ["27+38=", "", " a\n\tb ", "Grüße, 世界 🙂", "user asked the assistant", "\x00\x7f"])
def test_any_text_survives_a_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_token_of_the_model_is_one_that_text_can_be_encoded_to(tokenizer):
    """Or the trainer could put probability on tokens which the rollout masks."""
    model = build_model(tokenizer, ToyModelConfig(), seed=0)
    assert model.config.vocab_size == len(tokenizer) == model.lm_head.weight.shape[0]
    vocabulary = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True)
    assert sorted(vocabulary.values()) == list(range(len(tokenizer)))
    assert all(len(tokenizer.encode(part)) == 1 for part in ("\n", *ROLES)), "verl's chat builder looks for these"


@pytest.mark.parametrize("a, b, answer, slip", [(27, 38, "65", "55"), (20, 11, "31", "31"), (5, 5, "10", "0")])
def test_the_slip_forgets_the_carry_of_the_units_and_nothing_else(a, b, answer, slip):
    assert (Problem(a, b).answer, Problem(a, b).slip) == (answer, slip)


def test_no_held_out_sum_is_trained_on_in_either_order_and_half_of_them_carry():
    split = split_problems(TaskConfig(), seed=0)
    train, probe, test = ({frozenset((p.a, p.b)) for p in part} for part in (split.train, split.probe, split.test))
    assert not train & probe and not train & test and not probe & test
    assert len({*split.train, *split.probe, *split.test}) == 50 * 50
    assert len(split.test) == 128 and sum(p.has_carry for p in split.test) == 64
    assert split == split_problems(TaskConfig(), seed=0) and split.test != split_problems(TaskConfig(), seed=1).test


def test_only_the_exact_digits_are_rewarded():
    responses = ("65", "55", "650", "6", " 65", "65\n", "065", "")
    scores = [compute_score(DATA_SOURCE, response, "65")["score"] for response in responses]
    assert scores == [1.0, *[0.0] * 7]
    with pytest.raises(ConfigError, match="reward.custom_reward_function.path"):
        compute_score("gsm8k", "65", "65")


def _warm(tokenizer, seed):
    model = build_model(tokenizer, ToyModelConfig(hidden_size=64, intermediate_size=64), seed=seed)
    config = WarmupConfig(target_accuracy=0.0, probe_every=3, batch_size=16)
    warm_up(model, tokenizer, split_problems(TaskConfig(), seed=seed), slip_rate=0.6, config=config, seed=seed)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_warm_up_is_a_function_of_the_seed(tokenizer):
    first = _warm(tokenizer, seed=5)
    torch.manual_seed(99)
    assert torch.equal(first, _warm(tokenizer, seed=5)) and not torch.equal(first, _warm(tokenizer, seed=6))


def test_a_warm_up_that_misses_its_target_is_an_error(tmp_path):
    config = dataclasses.replace(BRIEF, warmup=WarmupConfig(max_steps=2, probe_every=1, batch_size=8))
    with pytest.raises(FlashRLError, match="--seed 1"):
        make_assets(tmp_path / "assets", config)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_the_warmed_up_model_leaves_room_for_reinforcement_learning(assets):
    assert all(0.2 <= assets.made["test"][how] <= 0.7 for how in ("greedy", "sampled"))
    assert assets.made["warmup_steps"] < WarmupConfig().max_steps // 2


@pytest.mark.slow
def test_the_saved_model_decodes_as_accurately_as_the_evaluation_says(assets):
    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    assert AutoModelForCausalLM.from_pretrained(assets.model).dtype == torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(assets.model, dtype=torch.float32)
    problems = split_problems(TaskConfig(), seed=0).test[::4]
    right = 0
    for problem in problems:
        ids = torch.tensor([Encoder(tokenizer).prompt_ids(problem)])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
        right += tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) == problem.answer
    assert 0 < right < len(problems)
    assert evaluate(model, Encoder(tokenizer), problems).greedy == pytest.approx(right / len(problems))


def test_the_data_are_in_verls_format(tmp_path):
    assets = make_assets(tmp_path / "assets", BRIEF)
    rows = pyarrow.parquet.read_table(assets.test).to_pylist()
    [message] = rows[0]["prompt"]
    a, b = map(int, message["content"].rstrip("=").split("+"))
    assert message["role"] == "user" and rows[0]["reward_model"]["ground_truth"] == str(a + b)
    assert len(rows) == 128 and pyarrow.parquet.read_table(assets.train).num_rows == 2500 - 128 - 192


def test_assets_are_made_once_for_the_same_recipe(tmp_path):
    root, probes = tmp_path / "assets", []
    make_assets(root, BRIEF)
    assert make_assets(root, BRIEF, on_probe=lambda *probe: probes.append(probe)).reused and not probes
    assert not make_assets(root, dataclasses.replace(BRIEF, seed=1)).reused
    assert json.loads((root / MANIFEST).read_text())["recipe"]["config"]["seed"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["assets"], "nothing half-made is left beside them"


def test_a_directory_with_other_files_is_not_overwritten(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FlashRLError, match="--output"):
        make_assets(tmp_path, BRIEF)
    assert (tmp_path / "thesis.tex").exists()
