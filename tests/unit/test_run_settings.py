# SPDX-License-Identifier: Apache-2.0
"""What a run writes into its checkpoints of its quantization."""

import json

import pytest

from flashrl_verl.errors import FlashRLError
from flashrl_verl.settings import FlashRLConfig
from flashrl_verl.trainer import run_settings

RUN = FlashRLConfig(ignore=("re:.*v_proj",), keep_first_layers=1, kv_cache="int8_per_token_head")


def test_the_record_is_the_runs_and_a_damaged_one_is_refused(tmp_path):
    assert run_settings.load(tmp_path) is None
    run_settings.save(tmp_path, RUN)
    recorded = run_settings.load(tmp_path)
    assert recorded == {
        **{"precision": "int8", "rotation": None, "fp32_lm_head": False, "kv_cache": "int8_per_token_head"},
        **{"ignore": ["re:.*v_proj"], "keep_first_layers": 1, "keep_last_layers": 0},
    }
    file = tmp_path / run_settings.FILE
    for damaged in (json.dumps(recorded | {"kv_cache": "int3"}), json.dumps(recorded)[:-9], "{}", "3"):
        file.write_text(damaged)
        with pytest.raises(FlashRLError, match="flashrl.json is damaged"):
            run_settings.load(tmp_path)
