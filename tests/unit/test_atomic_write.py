# SPDX-License-Identifier: Apache-2.0
"""A file that is not written to its end keeps its old content, and nothing is left beside it."""

import os

import pytest

from flashrl_verl.tools.process_tree import Stopped
from flashrl_verl.trainer.atomic_write import write_atomically


@pytest.mark.parametrize("error", [OSError("no space"), Stopped(15)], ids=["no space", "SIGTERM"])
def test_a_file_that_is_not_written_whole_leaves_the_old_one(tmp_path, monkeypatch, error):
    def stop(*_):
        raise error

    path = tmp_path / "state.json"
    write_atomically(path, b"old")
    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(type(error)):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
