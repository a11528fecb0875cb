# SPDX-License-Identifier: Apache-2.0
"""The quickstart's assets: what the tokenizer, the task and the warm-up promise."""

import pytest
import torch

from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.quickstart import warmup
from flashrl_verl.quickstart.assets import RECORD, make_assets
from flashrl_verl.quickstart.model import build_model
from flashrl_verl.quickstart.task import split_problems
from flashrl_verl.quickstart.tokenizer import ROLES, build_tokenizer


@pytest.fixture
def brief(monkeypatch):
    """The warm-up stops at its first probe, after two updates: for what does not depend on how good the model is."""
    monkeypatch.setattr(warmup, "TARGET", 0.0)
    monkeypatch.setattr(warmup, "PROBE_EVERY", 2)


def test_every_token_of_the_model_is_one_that_text_can_be_encoded_to():
    """Or the trainer could put probability on tokens which the rollout masks."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=0)
    assert model.config.vocab_size == len(tokenizer) == model.lm_head.weight.shape[0]
    vocabulary = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True)
    assert sorted(vocabulary.values()) == list(range(len(tokenizer)))
    assert all(len(tokenizer.encode(part)) == 1 for part in ("\n", *ROLES)), "verl's chat builder looks for these"


def test_no_held_out_sum_is_trained_on_in_either_order_and_half_of_them_carry():
    split = split_problems(0)
    train, probe, test = ({frozenset((p.a, p.b)) for p in part} for part in split)
    assert not train & probe and not train & test and not probe & test
    assert len({*split.train, *split.probe, *split.test}) == 50 * 50
    assert len(split.test) == 128 and sum(p.has_carry for p in split.test) == 64
    assert split.test != split_problems(1).test


def test_assets_are_a_function_of_the_seed_and_made_once(tmp_path, brief):
    def files(name, seed):
        made = make_assets(tmp_path / name, seed=seed)
        assert made["seed"] == seed and made["warmup_steps"] == 2
        return {p.name: p.read_bytes() for p in sorted((tmp_path / name).rglob("*")) if p.is_file()}

    first = files("a", 5)
    torch.manual_seed(99)
    assert first == files("b", 5)
    weights = tmp_path / "a" / "model" / "model.safetensors"
    weights.write_bytes(b"kept")
    make_assets(tmp_path / "a", seed=5)
    assert weights.read_bytes() == b"kept"
    with pytest.raises(ConfigError, match="was made with --seed 5"):
        make_assets(tmp_path / "a", seed=6)
    (tmp_path / "a" / RECORD).unlink()  # as if it had been stopped before the end
    assert files("a", 5) == first


def test_a_warm_up_that_misses_its_target_is_an_error_and_its_assets_are_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(warmup, "MAX_STEPS", 10)
    for _ in range(2):
        with pytest.raises(FlashRLError, match="--seed 1"):
            make_assets(tmp_path, seed=0)
