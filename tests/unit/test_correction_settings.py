# SPDX-License-Identifier: Apache-2.0
"""verl's ``algorithm.rollout_correction`` node is read as verl reads it, and what verl refuses is refused with the
key."""

import pytest
from verl.trainer.ppo import rollout_corr_helper as verls

from flashrl_verl.correction.settings import CorrectionSettings
from flashrl_verl.errors import ConfigError


@pytest.mark.parametrize("spec", [2.0, 2, "2.0", " 0.5_5.0 ", "1e-05_1.0", "1.0_1.0"])
def test_thresholds_are_read_as_verl_reads_them(spec):
    settings = CorrectionSettings.from_config({"rollout_is": "token", "rollout_is_threshold": spec})
    assert (settings.upper, settings.lower) == verls._parse_rollout_is_threshold(spec)
    assert (settings.upper, settings.lower) == verls._parse_rollout_is_threshold(settings.threshold), "and handed on"


@pytest.mark.parametrize("spec", [0, -1.0, True, None, "", "x", "5.0_0.5", "0_2", "0.5_", "1_2_3x"])
def test_thresholds_that_verl_refuses_are_refused(spec):
    with pytest.raises((ValueError, TypeError)):
        verls._parse_rollout_is_threshold(spec)
    with pytest.raises(ConfigError, match="algorithm.rollout_correction.rollout_is_threshold="):
        CorrectionSettings.from_config({"rollout_is": "token", "rollout_is_threshold": spec})


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
        (None, "rollout_correction=null"),
    ],
)
def test_what_would_correct_wrongly_is_refused_with_the_key(node, said):
    with pytest.raises(ConfigError, match=said):
        CorrectionSettings.from_config(node)
