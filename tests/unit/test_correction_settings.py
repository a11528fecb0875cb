# SPDX-License-Identifier: Apache-2.0
"""verl's ``algorithm.rollout_correction`` node is read as verl reads it, and what verl refuses is refused with the
key."""

from __future__ import annotations

import pytest
import torch

from flashrl_verl.correction.settings import DIVERGENCE_CRITERIA, RATIO_CRITERIA, CorrectionSettings, Level
from flashrl_verl.errors import ConfigError


@pytest.mark.parametrize("spec", [2.0, 2, "2.0", " 0.5_5.0 ", "1e-05_1.0", "1.0_1.0"])
def test_thresholds_are_read_as_verl_reads_them(spec: float | str) -> None:
    from verl.trainer.ppo.rollout_corr_helper import _parse_rollout_is_threshold

    settings = CorrectionSettings.from_config({"rollout_is": "token", "rollout_is_threshold": spec})
    expected = _parse_rollout_is_threshold(spec)
    assert (settings.upper, settings.lower) == expected
    assert _parse_rollout_is_threshold(settings.threshold) == expected


REJECTIONS = [
    ("token_k1", "0.5_2.0"),
    ("seq_mean_k1", 1.5),
    ("token_k2,seq_max_k3", "0.1, 2"),
    ("seq_sum_k1, token_k3,seq_sum_k1", "1e-2_1e2,0.5"),
    ("seq_sum_k2,seq_mean_k2", 0.25),
]


@pytest.mark.parametrize("spec", ["0.5_0.9", "1.1_5.0"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_bounds_that_drop_tokens_on_which_both_sides_agree_are_refused(spec: str, level: str) -> None:
    with pytest.raises(ConfigError, match=f"rollout_is_threshold={spec}.*leave out 1"):
        CorrectionSettings.from_config({"rollout_is": level, "rollout_is_threshold": spec})


@pytest.mark.parametrize(("options", "thresholds"), REJECTIONS)
def test_criteria_are_read_as_verl_reads_them(options: str, thresholds: float | str) -> None:
    from verl.trainer.ppo.rollout_corr_helper import SUPPORTED_ROLLOUT_RS_OPTIONS, _parse_rollout_rs_thresholds

    assert {*RATIO_CRITERIA, *DIVERGENCE_CRITERIA} == SUPPORTED_ROLLOUT_RS_OPTIONS
    settings = CorrectionSettings.from_config(
        {"rollout_is": None, "rollout_rs": options, "rollout_rs_threshold": thresholds}
    )
    names = list(dict.fromkeys(name.strip() for name in options.split(",")))
    expected = _parse_rollout_rs_thresholds(names, thresholds)
    assert {r.option: {"lower": r.lower, "upper": r.upper} for r in settings.rejections} == expected
    assert settings.rejection_options == ",".join(names)
    assert _parse_rollout_rs_thresholds(names, settings.rejection_thresholds) == expected


@pytest.mark.parametrize(
    ("options", "thresholds"),
    [
        ("token_k1", None),
        ("token_k1", 0),
        ("token_k1", "2.0_0.5"),
        ("token_k1", "0.5_"),
        ("seq_mean_k3", "0.1_0.2"),
        ("seq_mean_k3", -1),
        ("seq_mean_k3", "x"),
        ("token_k2,token_k3,seq_max_k2", "1,2"),
        ("token_k5", 1.0),
        ("", 1.0),
    ],
)
def test_criteria_that_verl_refuses_are_refused(options: str, thresholds: object) -> None:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    with pytest.raises((ValueError, ZeroDivisionError)):
        compute_rollout_rejection_mask(torch.zeros(1, 2), torch.ones(1, 2), options, thresholds)
    with pytest.raises(ConfigError, match="algorithm.rollout_correction.rollout_rs"):
        CorrectionSettings.from_config({"rollout_is": None, "rollout_rs": options, "rollout_rs_threshold": thresholds})


@pytest.mark.parametrize("spec", [0, -1.0, True, None, "", "x", "nan", "5.0_0.5", "0_2", "0.5_", "1_2_3x"])
def test_thresholds_that_verl_refuses_are_refused(spec: object) -> None:
    from verl.trainer.ppo.rollout_corr_helper import _parse_rollout_is_threshold

    if spec != "nan":  # verl lets NaN pass
        with pytest.raises((ValueError, TypeError)):
            _parse_rollout_is_threshold(spec)
    with pytest.raises(ConfigError, match="algorithm.rollout_correction.rollout_is_threshold="):
        CorrectionSettings.from_config({"rollout_is": "token", "rollout_is_threshold": spec})


@pytest.mark.parametrize(
    ("node", "key"),
    [
        (None, "algorithm.rollout_correction"),
        ({"rollout_is": "tokens"}, "rollout_is=tokens"),
        ({"rollout_rs": "token_k4"}, "rollout_rs=token_k4"),
        ({"bypass_mode": True, "loss_type": "gspo"}, "loss_type=gspo"),
    ],
)
def test_what_there_is_not_is_refused_with_the_key_to_change(node: dict | None, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        CorrectionSettings.from_config(node)


def test_settings_are_read_from_verls_own_nodes() -> None:
    from omegaconf import OmegaConf
    from verl.trainer.config.algorithm import RolloutCorrectionConfig

    tis = CorrectionSettings(level=Level.TOKEN, upper=2.0)
    assert CorrectionSettings.from_config(RolloutCorrectionConfig.decoupled_token_is(2.0)) == tis
    icepop = CorrectionSettings(level=Level.TOKEN, lower=0.5, upper=5.0)
    assert CorrectionSettings.from_config(RolloutCorrectionConfig.decoupled_token_icepop()) == icepop
    node = {"rollout_is": None, "rollout_is_threshold": None, "rollout_rs": None, "bypass_mode": False}
    assert CorrectionSettings.from_config(OmegaConf.create(node)) == CorrectionSettings(level=None)
