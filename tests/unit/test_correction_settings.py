# SPDX-License-Identifier: Apache-2.0
"""verl's ``algorithm.rollout_correction`` node is read as verl reads it, and what verl refuses is refused with the
key."""

import pytest
import torch
from verl.trainer.ppo import rollout_corr_helper as verls

from flashrl_verl.correction.settings import DIVERGENCE_CRITERIA, RATIO_CRITERIA, CorrectionSettings
from flashrl_verl.errors import ConfigError


@pytest.mark.parametrize("spec", [2.0, 2, "2.0", " 0.5_5.0 ", "1e-05_1.0", "1.0_1.0"])
def test_thresholds_are_read_as_verl_reads_them(spec):
    settings = CorrectionSettings.from_config({"rollout_is": "token", "rollout_is_threshold": spec})
    assert (settings.upper, settings.lower) == verls._parse_rollout_is_threshold(spec)
    assert (settings.upper, settings.lower) == verls._parse_rollout_is_threshold(settings.threshold), "and handed on"


@pytest.mark.parametrize(
    "options, thresholds",
    [
        ("token_k1", "0.5_2.0"),
        ("seq_mean_k1", 1.5),
        ("token_k2,seq_max_k3", "0.1, 2"),
        ("seq_sum_k1, token_k3,seq_sum_k1", "1e-2_1e2,0.5"),
        ("seq_sum_k2,seq_mean_k2", 0.25),
    ],
)
def test_criteria_are_read_as_verl_reads_them(options, thresholds):
    assert {*RATIO_CRITERIA, *DIVERGENCE_CRITERIA} == verls.SUPPORTED_ROLLOUT_RS_OPTIONS
    settings = CorrectionSettings.from_config({"rollout_rs": options, "rollout_rs_threshold": thresholds})
    names = list(dict.fromkeys(name.strip() for name in options.split(",")))
    expected = verls._parse_rollout_rs_thresholds(names, thresholds)
    assert {r.option: {"lower": r.lower, "upper": r.upper} for r in settings.rejections} == expected
    assert settings.rejection_options == ",".join(names)
    assert verls._parse_rollout_rs_thresholds(names, settings.rejection_thresholds) == expected, "and handed on"


@pytest.mark.parametrize("spec", [0, -1.0, True, None, "", "x", "5.0_0.5", "0_2", "0.5_", "1_2_3x"])
def test_thresholds_that_verl_refuses_are_refused(spec):
    with pytest.raises((ValueError, TypeError)):
        verls._parse_rollout_is_threshold(spec)
    with pytest.raises(ConfigError, match="algorithm.rollout_correction.rollout_is_threshold="):
        CorrectionSettings.from_config({"rollout_is": "token", "rollout_is_threshold": spec})


@pytest.mark.parametrize(
    "options, thresholds",
    [
        *[("token_k1", None), ("token_k1", 0), ("token_k1", "2.0_0.5"), ("token_k1", "0.5_"), ("seq_mean_k3", -1)],
        *[("seq_mean_k3", "0.1_0.2"), ("seq_mean_k3", "x"), ("token_k2,token_k3,seq_max_k2", "1,2")],
        *[("token_k5", 1.0), ("", 1.0)],
    ],
)
def test_criteria_that_verl_refuses_are_refused(options, thresholds):
    with pytest.raises((ValueError, ZeroDivisionError)):
        verls.compute_rollout_rejection_mask(torch.zeros(1, 2), torch.ones(1, 2), options, thresholds)
    with pytest.raises(ConfigError, match="algorithm.rollout_correction.rollout_rs"):
        CorrectionSettings.from_config({"rollout_rs": options, "rollout_rs_threshold": thresholds})


@pytest.mark.parametrize(
    "node, said",
    [
        # verl takes these, and the run would train on nothing that rollout and trainer agree on.
        ({"rollout_is": "token", "rollout_is_threshold": "0.5_0.9"}, "rollout_is_threshold=0.5_0.9.*leave out 1"),
        ({"rollout_is": "sequence", "rollout_is_threshold": "1.1_5.0"}, "rollout_is_threshold=1.1_5.0.*leave out 1"),
        # As YAML reads 0.5_5.
        ({"rollout_is": "token", "rollout_is_threshold": 0.55}, "rollout_is_threshold=0.55.*IcePop"),
        ({"rollout_is": "token", "rollout_is_threshold": "nan"}, "rollout_is_threshold=nan"),
        ({"rollout_is": "tokens"}, "rollout_is=tokens"),
        ({"bypass_mode": True, "loss_type": "gspo"}, "loss_type=gspo"),
        (None, "rollout_correction=null"),
    ],
)
def test_what_would_correct_wrongly_is_refused_with_the_key(node, said):
    with pytest.raises(ConfigError, match=said):
        CorrectionSettings.from_config(node)
