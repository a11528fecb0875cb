# SPDX-License-Identifier: Apache-2.0
"""Whose shards are in a folder, and those that cannot be read, are told by name."""

import json

import pytest

from flashrl_verl.errors import FlashRLError
from flashrl_verl.tools.export.shards import Saved, load_all, saved_by


@pytest.mark.parametrize("content", [b"", b"PK no archive", None])
def test_a_shard_that_cannot_be_read_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "model_world_size_1_rank_0.pt").write_bytes(content)
    with pytest.raises(FlashRLError, match=r"model_world_size_1_rank_0\.pt cannot be read.*earlier one"):
        load_all(tmp_path, 1)


def test_who_saved_it_is_verls_record_or_the_names_of_the_files(tmp_path):
    assert saved_by(tmp_path) is None
    (tmp_path / "model_world_size_8_rank_3.pt").touch()
    assert saved_by(tmp_path) == Saved(8, None)
    (tmp_path / "model_world_size_4_rank_3.pt").touch()
    with pytest.raises(FlashRLError, match="shards of 4 and of 8 ranks.*earlier"):
        saved_by(tmp_path)
    record = tmp_path / "fsdp_config.json"
    record.write_text(json.dumps({"FSDP_version": 2, "world_size": 4}))
    assert saved_by(tmp_path) == Saved(4, 2)
    record.write_text('{"world_')
    with pytest.raises(FlashRLError, match="is damaged"):
        saved_by(tmp_path)
    record.unlink()
    record.mkdir()  # as good as one without rights, which root has always
    with pytest.raises(FlashRLError, match="fsdp_config.json cannot be read.*permissions"):
        saved_by(tmp_path)
