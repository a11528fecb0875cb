# SPDX-License-Identifier: Apache-2.0
"""What a run writes into its checkpoints of its quantization, and what the command line says over it."""

import json

import pytest

from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.settings import FlashRLConfig
from flashrl_verl.tools.export.chosen import layers_of
from flashrl_verl.trainer import run_settings

RUN = FlashRLConfig(ignore=("re:.*v_proj",), keep_first_layers=1, kv_cache="int8_per_token_head")


def test_the_record_is_the_runs_and_a_damaged_one_is_refused(tmp_path):
    assert run_settings.load(tmp_path) is None
    run_settings.save(tmp_path, RUN)
    recorded = run_settings.load(tmp_path)
    assert recorded == {
        **{"precision": "int8", "fp32_lm_head": False, "kv_cache": "int8_per_token_head"},
        **{"ignore": ["re:.*v_proj"], "keep_first_layers": 1, "keep_last_layers": 0},
    }
    file = tmp_path / run_settings.FILE
    for damaged in (json.dumps(recorded | {"kv_cache": "int3"}), json.dumps(recorded)[:-9], "{}", "3"):
        file.write_text(damaged)
        with pytest.raises(FlashRLError, match="flashrl.json is damaged"):
            run_settings.load(tmp_path)


def test_ignore_none_empties_what_the_run_ignored_and_stands_alone():
    recorded = run_settings.record(RUN)
    assert layers_of(recorded, (), None, None)["ignore"] == ["re:.*v_proj"]
    chosen = layers_of(recorded, ("none",), None, 2)
    assert chosen == {"ignore": [], "keep_first_layers": 1, "keep_last_layers": 2}
    with pytest.raises(ConfigError, match="--ignore none --ignore lm_head: none stands for no layer"):
        layers_of(recorded, ("none", "lm_head"), None, None)
