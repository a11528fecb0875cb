# SPDX-License-Identifier: Apache-2.0
"""A checkpoint loaded by another number of ranks holds the same weights and moments, bit by bit, and trains on alike."""

import json
import shutil

import checkpoint_ranks
import engines  # noqa: F401 - chooses verl's platform, which verl reads once
import pytest
import torch

from flashrl_verl.checkpoint import own_rows, saved_ranks
from flashrl_verl.errors import FlashRLError


def spawn(ranks: int, task: str, folder, checkpoint, hybrid: bool = False) -> list[dict]:
    """The whole state at the checkpoint, and one step later."""
    torch.multiprocessing.spawn(checkpoint_ranks.run, args=(ranks, task, str(folder), str(checkpoint), hybrid), nprocs=ranks)
    return torch.load(folder / f"{task}-{ranks}.pt")


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return folder / "checkpoint", spawn(2, "save", folder, folder / "checkpoint")


def assert_equal(found: dict, expected: dict, **tolerance: float) -> None:
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, **tolerance)
        for key, value in expected["moments"][name].items():
            torch.testing.assert_close(found["moments"][name][key], value, **tolerance)
    assert (found["lr"], found["scheduler"]) == (expected["lr"], expected["scheduler"])


@pytest.mark.parametrize("ranks", [1, 3, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 5))])
def test_two_ranks_checkpoint_is_the_same_on_any_number_of_ranks(of_two, tmp_path, ranks):
    checkpoint, (saved, later) = of_two
    loaded, trained = spawn(ranks, "load", tmp_path, checkpoint)
    assert_equal(loaded, saved, rtol=0, atol=0)
    # The gradients are sums of equal terms; only rounding of the mean differs.
    assert_equal(trained, later, rtol=1e-4, atol=1e-6)
    assert any((trained["weights"][n] != saved["weights"][n]).any() for n in saved["weights"])


@pytest.mark.slow
def test_a_checkpoint_of_one_rank_is_the_same_on_two(tmp_path):
    saved, later = spawn(1, "save", tmp_path, tmp_path / "checkpoint")
    loaded, trained = spawn(2, "load", tmp_path, tmp_path / "checkpoint")
    assert_equal(loaded, saved, rtol=0, atol=0)
    assert_equal(trained, later, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_checkpoint_of_two_replicas_is_the_same_where_all_ranks_hold_shards(tmp_path):
    saved, _ = spawn(4, "save", tmp_path, tmp_path / "checkpoint", hybrid=True)
    loaded, _ = spawn(2, "load", tmp_path, tmp_path / "checkpoint")
    assert_equal(loaded, saved, rtol=0, atol=0)


@pytest.mark.slow
def test_a_sharded_checkpoint_is_the_same_where_two_replicas_hold_the_shards(of_two, tmp_path):
    checkpoint, (saved, _) = of_two
    loaded, _ = spawn(4, "load", tmp_path, checkpoint, hybrid=True)
    assert_equal(loaded, saved, rtol=0, atol=0)


def test_a_missing_shard_is_an_error_that_names_it_and_the_remedy(of_two, tmp_path):
    copy = shutil.copytree(of_two[0], tmp_path / "checkpoint")
    (copy / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(Exception, match=r"model_world_size_2_rank_1\.pt.*[\s\S]*trainer\.default_local_dir"):
        spawn(1, "load", tmp_path, copy)


@pytest.mark.parametrize("rows, ranks", [(7, 3), (8, 4), (5, 4), (3, 5), (1, 2), (130, 7)])
def test_rows_are_those_of_torch_chunk(rows, ranks):
    pieces = list(torch.arange(rows).chunk(ranks))
    for rank in range(ranks):
        start, length = own_rows(rows, ranks, rank)
        expected = pieces[rank].tolist() if rank < len(pieces) else []
        assert list(range(start, start + length)) == expected


def test_the_number_of_ranks_is_verls_own_record(tmp_path):
    assert saved_ranks(tmp_path) is None
    record = tmp_path / "fsdp_config.json"
    record.write_text(json.dumps({"FSDP_version": 2, "world_size": 4}))
    assert saved_ranks(tmp_path) == 4
    record.write_text('{"world_')
    with pytest.raises(FlashRLError, match="resume_from_path"):
        saved_ranks(tmp_path)
