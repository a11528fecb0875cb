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
from flashrl_verl.quickstart.tokenizer import ROLES, TURN_END, build_tokenizer
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


# ---- tokenizer ----


@pytest.mark.parametrize("text", ["27+38=", "", " a\n\tb ", "Grüße, 世界 🙂", "user asked the assistant", "\x00\x7f"])
def test_any_text_survives_a_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_token_of_the_model_is_one_that_text_can_be_encoded_to(tokenizer):
    model = build_model(tokenizer, ToyModelConfig(), seed=0)
    assert model.config.vocab_size == len(tokenizer) == model.lm_head.weight.shape[0]
    backend = tokenizer.backend_tokenizer
    assert sorted(backend.get_vocab(with_added_tokens=True).values()) == list(range(len(tokenizer)))


def test_a_turn_has_one_token_for_each_part_that_verl_looks_for(tokenizer):
    assert len(tokenizer.encode("\n")) == 1
    assert all(len(tokenizer.encode(role)) == 1 for role in ROLES)
    assert tokenizer.eos_token == TURN_END and tokenizer.pad_token_id != tokenizer.eos_token_id


def test_special_tokens_vanish_from_the_decoded_answer(tokenizer):
    ids = [*tokenizer.encode("65"), tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "65"


# ---- task ----


@pytest.mark.parametrize(
    ("a", "b", "answer", "slip"),
    [(27, 38, "65", "55"), (20, 11, "31", "31"), (5, 5, "10", "0"), (49, 49, "98", "88")],
)
def test_the_slip_forgets_the_carry_of_the_units_and_nothing_else(a, b, answer, slip):
    assert (Problem(a, b).answer, Problem(a, b).slip) == (answer, slip)


def test_no_held_out_sum_is_trained_on_in_either_order():
    split = split_problems(TaskConfig(), seed=0)
    train, probe, test = ({frozenset((p.a, p.b)) for p in part} for part in (split.train, split.probe, split.test))
    assert not train & probe and not train & test and not probe & test
    every = {(p.a, p.b) for part in (split.train, split.probe, split.test) for p in part}
    assert len(every) == 50 * 50 == len(split.train) + len(split.probe) + len(split.test)


def test_half_of_the_held_out_problems_carry():
    split = split_problems(TaskConfig(), seed=1)
    assert len(split.test) == 128
    assert sum(p.has_carry for p in split.test) == 64


def test_the_split_is_a_function_of_the_seed():
    assert split_problems(TaskConfig(), seed=3) == split_problems(TaskConfig(), seed=3)
    assert split_problems(TaskConfig(), seed=3).test != split_problems(TaskConfig(), seed=4).test


@pytest.mark.parametrize("bad", [{"test_pairs": 3}, {"probe_pairs": 0}, {"max_operand": 9}, {"slip_rate": 1.5}])
def test_an_impossible_task_is_refused(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        TaskConfig(**bad)


# ---- reward ----


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("65", 1.0),
        ("55", 0.0),
        ("650", 0.0),
        ("6", 0.0),
        (" 65", 0.0),
        ("65\n", 0.0),
        ("065", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_exact_digits_are_rewarded(response, score):
    expected = {"score": score, "acc": score}
    assert compute_score(DATA_SOURCE, response, "65", extra_info={"index": 0}) == expected


def test_the_reward_refuses_data_of_another_task():
    with pytest.raises(ConfigError, match="reward.custom_reward_function.path"):
        compute_score("gsm8k", "65", "65")


# ---- warm-up ----


def _warm(tokenizer, seed, steps=3):
    model = build_model(tokenizer, ToyModelConfig(hidden_size=64, intermediate_size=64), seed=seed)
    config = WarmupConfig(target_accuracy=0.0, probe_every=steps, batch_size=16)
    result = warm_up(model, tokenizer, split_problems(TaskConfig(), seed=seed), slip_rate=0.6, config=config, seed=seed)
    assert result.steps == steps
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_warm_up_is_a_function_of_the_seed(tokenizer):
    state = torch.get_rng_state()
    first = _warm(tokenizer, seed=5)
    torch.manual_seed(99)
    assert torch.equal(first, _warm(tokenizer, seed=5))
    assert not torch.equal(first, _warm(tokenizer, seed=6))
    torch.set_rng_state(state)
    _warm(tokenizer, seed=5)
    assert torch.equal(torch.get_rng_state(), state)  # the caller's random state is left alone


def test_a_warm_up_that_misses_its_target_is_an_error(tokenizer):
    model = build_model(tokenizer, ToyModelConfig(hidden_size=64, intermediate_size=64), seed=0)
    config = WarmupConfig(max_steps=2, probe_every=1, batch_size=8)
    with pytest.raises(FlashRLError, match="--seed 1"):
        warm_up(model, tokenizer, split_problems(TaskConfig(), seed=0), slip_rate=0.6, config=config, seed=0)


def test_labels_are_the_answer_and_the_end_of_the_turn(tokenizer):
    tokens, labels = Encoder(tokenizer).batch([Problem(27, 38), Problem(1, 2)], ["65", "3"])
    trained = [[int(t) for t in row if t >= 0] for row in labels]
    assert trained == [[*tokenizer.encode(answer), tokenizer.eos_token_id] for answer in ("65", "3")]
    where = labels[0] >= 0
    assert torch.equal(tokens[0, 1:][where[:-1]], labels[0][where])  # each label is the token after its position


# ---- assets ----


def test_the_warmed_up_model_leaves_room_for_reinforcement_learning(assets):
    assert 0.2 <= assets.made["test"]["greedy"] <= 0.7
    assert 0.2 <= assets.made["test"]["sampled"] <= 0.7
    assert assets.made["warmup_steps"] < WarmupConfig().max_steps // 2


def test_the_saved_model_decodes_as_accurately_as_the_evaluation_says(assets):
    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    model = AutoModelForCausalLM.from_pretrained(assets.model, dtype=torch.float32)
    problems = split_problems(TaskConfig(), seed=0).test[::4]
    right = 0
    for problem in problems:
        ids = torch.tensor([Encoder(tokenizer).prompt_ids(problem)])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
        right += tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) == problem.answer
    assert 0 < right < len(problems)
    assert evaluate(model, Encoder(tokenizer), problems).greedy == pytest.approx(right / len(problems))


def test_the_checkpoint_is_bfloat16_and_its_tokenizer_the_same(assets, tokenizer):
    assert AutoModelForCausalLM.from_pretrained(assets.model).dtype == torch.bfloat16
    saved, message = AutoTokenizer.from_pretrained(assets.model), [{"role": "user", "content": "27+38="}]
    assert saved.get_vocab() == tokenizer.get_vocab()
    text = saved.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    assert saved.encode(text) == Encoder(tokenizer).prompt_ids(Problem(27, 38))


def test_the_data_are_in_verls_format(assets):
    rows = pyarrow.parquet.read_table(assets.test).to_pylist()
    assert len(rows) == 128
    assert rows[0]["data_source"] == DATA_SOURCE
    [message] = rows[0]["prompt"]
    a, b = map(int, message["content"].rstrip("=").split("+"))
    assert message["role"] == "user" and rows[0]["reward_model"]["ground_truth"] == str(a + b)
    assert pyarrow.parquet.read_table(assets.train).num_rows == 2500 - 128 - 192


def test_assets_are_made_once_for_the_same_recipe(tmp_path):
    root, probes = tmp_path / "assets", []
    make_assets(root, BRIEF)
    again = make_assets(root, BRIEF, on_probe=lambda *probe: probes.append(probe))
    assert again.reused and not probes
    other = make_assets(root, dataclasses.replace(BRIEF, seed=1))
    assert not other.reused and json.loads((root / MANIFEST).read_text())["recipe"]["config"]["seed"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["assets"]  # nothing half-made is left beside them


def test_damaged_assets_are_made_again(tmp_path):
    assets = make_assets(tmp_path / "assets", BRIEF)
    assets.train.write_bytes(b"")
    assert not make_assets(assets.root, BRIEF).reused
    assert assets.train.stat().st_size > 0


def test_a_directory_with_other_files_is_not_overwritten(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FlashRLError, match="--output"):
        make_assets(tmp_path, BRIEF)
    assert (tmp_path / "thesis.tex").exists()
