# SPDX-License-Identifier: Apache-2.0
"""A checkpoint loaded by another number of ranks holds the same weights and moments, bit by bit, and trains on alike."""

import json
import shutil

import checkpoint_ranks
import engines  # noqa: F401 - chooses verl's platform, which verl reads once
import pytest
import torch
from omegaconf import OmegaConf

from flashrl_verl.checkpoint import Saved, Shards, require_same_ranks, saved_by
from flashrl_verl.errors import FlashRLError
from flashrl_verl.reshard import own_rows


def spawn(ranks: int, task: str, folder, checkpoint, hybrid=False, family="qwen2.5", device="cpu") -> list[dict]:
    """The whole state at the checkpoint, and one step later."""
    words = (ranks, task, str(folder), str(checkpoint), hybrid, family, 6, device)
    torch.multiprocessing.spawn(checkpoint_ranks.run, args=words, nprocs=ranks)
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
    assert (found["groups"], found["scheduler"]) == (expected["groups"], expected["scheduler"])


@pytest.mark.parametrize("ranks", [1, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 3, 5))])
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


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("before, after", [(2, 1), (1, 2), (2, 2)])
def test_on_gpus_a_checkpoint_is_the_same_on_another_number_of_them(tmp_path, before, after):
    saved, later = spawn(before, "save", tmp_path, tmp_path / "checkpoint", device="cuda")
    loaded, trained = spawn(after, "load", tmp_path, tmp_path / "checkpoint", device="cuda")
    assert_equal(loaded, saved, rtol=0, atol=0)
    # The gradients are sums of equal terms; only rounding differs.
    assert_equal(trained, later, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_checkpoint_of_ranks_that_hold_no_rows_is_the_same_on_two(tmp_path):
    saved, _ = spawn(5, "save", tmp_path, tmp_path / "checkpoint")
    assert saved["empty"] > 0, "the last of the five"
    loaded, _ = spawn(2, "load", tmp_path, tmp_path / "checkpoint")
    assert loaded["empty"] == 0
    assert_equal(loaded, saved, rtol=0, atol=0)


@pytest.mark.slow
def test_a_tensor_that_is_embedding_and_head_stays_one(tmp_path):
    saved, later = spawn(2, "save", tmp_path, tmp_path / "checkpoint", family="llama3")
    assert not any("lm_head" in name for name in saved["weights"]), "tied"
    loaded, trained = spawn(1, "load", tmp_path, tmp_path / "checkpoint", family="llama3")
    assert_equal(loaded, saved, rtol=0, atol=0)
    assert_equal(trained, later, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_as_many_ranks_with_the_shards_in_two_replicas_are_given_theirs(tmp_path):
    saved, _ = spawn(4, "save", tmp_path, tmp_path / "checkpoint")
    loaded, _ = spawn(4, "load", tmp_path, tmp_path / "checkpoint", hybrid=True)
    assert_equal(loaded, saved, rtol=0, atol=0)


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


def refused(folder, checkpoint) -> list[str]:
    """What each of two ranks raised."""
    torch.multiprocessing.spawn(checkpoint_ranks.refused, args=(2, str(folder), str(checkpoint)), nprocs=2)
    return [(folder / f"refused-{rank}").read_text() for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "optim", "extra_state"])
def test_a_shard_that_was_cut_off_is_the_same_error_on_all_ranks(of_two, tmp_path, kind):
    """verl reads it on one rank, which would leave the others waiting for it."""
    copy = shutil.copytree(of_two[0], tmp_path / "checkpoint")
    file = copy / f"{kind}_world_size_2_rank_1.pt"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    first, second = refused(tmp_path, copy)
    assert first == second and first.startswith(f"FlashRLError: {file} cannot be read") and "resume_from_path" in first


def test_whatever_one_rank_raises_all_ranks_raise(tmp_path):
    first, second = refused(tmp_path, "")
    assert first == second == "FlashRLError: rank 1 could not go on: KeyError: 'weights'"


@pytest.mark.parametrize("content", [b"", b"PK no archive", None])
def test_a_shard_that_cannot_be_read_is_named_with_the_remedy(tmp_path, content):
    shards = Shards(tmp_path, "optim", 1)
    if content is not None:
        shards.files[0].write_bytes(content)
    with pytest.raises(FlashRLError, match=r"optim_world_size_1_rank_0\.pt cannot be read.*resume_from_path"):
        shards.load(0)


@pytest.mark.slow
def test_without_verls_record_the_names_of_the_shards_tell(of_two, tmp_path):
    checkpoint, (saved, _) = of_two
    copy = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    (copy / "fsdp_config.json").unlink()
    loaded, _ = spawn(1, "load", tmp_path, copy)
    assert_equal(loaded, saved, rtol=0, atol=0)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_checkpoint_of_fsdp_1_is_an_error_that_names_the_strategy(of_two, tmp_path, ranks):
    copy = shutil.copytree(of_two[0], tmp_path / "checkpoint")
    (copy / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 1, "world_size": 2}))
    with pytest.raises(Exception, match=r"FlashRLError: .* saved by FSDP 1 and .* has FSDP 2.*actor\.strategy"):
        spawn(ranks, "load", tmp_path, copy)


@pytest.mark.slow
def test_adapters_alone_are_an_error_that_says_what_they_are(of_two, tmp_path):
    copy = shutil.copytree(of_two[0], tmp_path / "checkpoint")
    for rank in range(2):
        torch.save({"layers.0.lora_A.weight": torch.ones(2, 2)}, copy / f"model_world_size_2_rank_{rank}.pt")
    with pytest.raises(Exception, match="FlashRLError: .*1 tensors of LoRA adapters alone"):
        spawn(1, "load", tmp_path, copy)


@pytest.mark.parametrize("rows, ranks", [(7, 3), (8, 4), (5, 4), (3, 5), (1, 2), (130, 7)])
def test_rows_are_those_of_torch_chunk(rows, ranks):
    pieces = list(torch.arange(rows).chunk(ranks))
    for rank in range(ranks):
        start, length = own_rows(rows, ranks, rank)
        expected = pieces[rank].tolist() if rank < len(pieces) else []
        assert list(range(start, start + length)) == expected


def test_who_saved_it_is_verls_record_or_the_names_of_the_files(tmp_path):
    assert saved_by(tmp_path) is None
    (tmp_path / "model_world_size_8_rank_3.pt").touch()
    assert saved_by(tmp_path) == Saved(8, None)
    (tmp_path / "model_world_size_4_rank_3.pt").touch()
    with pytest.raises(FlashRLError, match="shards of 4 and of 8 ranks.*resume_from_path"):
        saved_by(tmp_path)
    record = tmp_path / "fsdp_config.json"
    record.write_text(json.dumps({"FSDP_version": 2, "world_size": 4}))
    assert saved_by(tmp_path) == Saved(4, 2)
    record.write_text('{"world_')
    with pytest.raises(FlashRLError, match="resume_from_path"):
        saved_by(tmp_path)
    record.unlink()
    record.mkdir()  # as good as one without rights, which root has always
    with pytest.raises(FlashRLError, match="fsdp_config.json cannot be read.*rights"):
        saved_by(tmp_path)


def test_a_critics_checkpoint_of_another_number_of_ranks_is_refused(tmp_path):
    require_same_ranks(tmp_path, 4)  # nothing there: verl says so
    (tmp_path / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 4}))
    require_same_ranks(tmp_path, 4)
    with pytest.raises(FlashRLError, match="saved by 4 ranks and this run has 2.*critic.*trainer.nnodes"):
        require_same_ranks(tmp_path, 2)


@pytest.mark.parametrize("mode", ["auto", "resume_path"])
def test_a_critic_is_looked_at_before_verl_loads_the_actor(tmp_path, mode):
    from verl.single_controller.base.worker_group import WorkerGroup

    from flashrl_verl.trainer import FlashRLTrainer

    critic = tmp_path / "global_step_3" / "critic"
    critic.mkdir(parents=True)
    (critic / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 4}))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    trainer = FlashRLTrainer.__new__(FlashRLTrainer)  # without an actor: that verl asked for it would be another error
    resume = {"resume_mode": mode, "resume_from_path": str(critic.parent), "default_local_dir": str(tmp_path)}
    trainer.config, trainer.use_critic = OmegaConf.create({"trainer": resume}), True
    trainer.critic_wg = WorkerGroup(resource_pool=None)
    with pytest.raises(FlashRLError, match="saved by 4 ranks and this run has 0"):
        trainer._load_checkpoint()
