# SPDX-License-Identifier: Apache-2.0
"""The measured mass is the probability of the columns past the tokenizer, and measuring leaves the logits as they
are."""

from types import SimpleNamespace

import pytest
import torch

from flashrl_verl.rollout.padded_vocab import PaddedVocabularyMeter


def test_the_measured_mass_is_that_of_the_columns_past_the_tokenizer():
    probabilities = torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.25, 0.25, 0.1, 0.4]])
    model = SimpleNamespace(compute_logits=lambda hidden: hidden)
    assert PaddedVocabularyMeter.attach(model, 4, 4) is None, "nothing is padded"
    meter = PaddedVocabularyMeter.attach(model, 4, 2)
    for scale in (1, 3):  # soft-max does not see what logits have in common
        logits = (scale * probabilities).log()
        assert model.compute_logits(logits) is logits
        assert meter.mass() == pytest.approx((0.3 + 0.5) / 2)
    meter.reset()
    assert meter.mass() == 0.0
