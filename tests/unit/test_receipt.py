# SPDX-License-Identifier: Apache-2.0
"""The refit receipt notices what health metrics cannot see."""

import copy

import pytest
import torch

from flashrl_verl.errors import RefitError
from flashrl_verl.rollout.receipt import Manifest, Passed, checksum, is_sampled, stride_for, verify_ranks, verify_receipts


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {f"layer.{i}.weight": torch.randn(7, 11, generator=g).bfloat16() for i in range(10)}


def receipt_of(tensors: dict[str, torch.Tensor], step: int = 3, stride: int = 1) -> dict:
    manifest = Manifest(step=step, stride=stride)
    assert dict(manifest.watch(tensors.items())).keys() == tensors.keys()
    return manifest.receipt()


def test_equal_updates_verify():
    verify_receipts(receipt_of(weights()), receipt_of(weights()), 3, "replica 0")


def test_a_dropped_update_is_named_by_both_steps():
    with pytest.raises(RefitError, match="step 2, but the trainer is at step 3"):
        verify_receipts(receipt_of(weights()), receipt_of(weights(), step=2), 3, "replica 0")
    with pytest.raises(RefitError, match="trainer sent the weights of step 2"):
        verify_receipts(receipt_of(weights(), step=2), receipt_of(weights(), step=2), 3, "replica 0")


def reports(*places: tuple[int, int], **changes: dict) -> list[dict]:
    """Of trainer ranks that send the same update to (replica, rank in replica)."""
    return [{"replica": replica, "rank_in_replica": rank, "sent": receipt_of(weights()), **changes} for replica, rank in places]


def test_every_rank_is_compared_with_the_worker_beside_it():
    good, stale = receipt_of(weights()), receipt_of(weights(seed=1))
    verify_ranks(reports((0, 0), (0, 1), (1, 0)), [[good, good], [good]], 3)
    with pytest.raises(RefitError, match=r"rollout replica 0, rank 1: at step 3 .* layer\.0\.weight"):
        verify_ranks(reports((0, 0), (0, 1), (1, 0)), [[good, stale], [good]], 3)


def test_an_engine_worker_that_nobody_sends_to_is_noticed():
    good = receipt_of(weights())
    with pytest.raises(RefitError, match="step 3: no trainer rank sends to the rollout's replica 0, rank 1; replica 1, rank 0"):
        verify_ranks(reports((0, 0)), [[good, good], [good]], 3)


def test_names_that_pass_twice_are_noted_within_a_bucket_and_between_buckets():
    manifest, items = Manifest(step=0, stride=1), list(weights().items())
    manifest.add_passed(Passed.of(items[:5]))
    assert manifest.repeated == []
    manifest.add_passed(Passed.of([*items[5:], items[5]]))
    manifest.add(*items[0])
    manifest.add_passed(Passed.of(items[1:2]))
    assert manifest.repeated == ["layer.5.weight", "layer.0.weight", "layer.1.weight"]


@pytest.mark.parametrize("step, stride", [(0, 1), (5, 3), (10**9, 7)])
def test_a_bucket_samples_the_tensors_that_are_sampled_one_by_one(step, stride):
    items = list(weights().items())
    assert Passed.of(items).sampled(step, stride) == [i for i, (name, _) in enumerate(items) if is_sampled(name, step, stride)]


def test_one_changed_bfloat16_value_is_noticed_and_named():
    stale = copy.deepcopy(weights())
    stale["layer.4.weight"].view(torch.int16)[2, 5] += 1  # one unit in the last place
    with pytest.raises(RefitError, match=r"step 3.*layer\.4\.weight"):
        verify_receipts(receipt_of(stale), receipt_of(weights()), 3, "replica 0")


def test_a_missing_tensor_and_a_changed_shape_are_noticed_although_not_sampled():
    stride = 3
    skipped = [n for n in weights() if not is_sampled(n, 3, stride)]
    assert 0 < len(skipped) < 10
    fewer = {n: t for n, t in weights().items() if n != skipped[0]}
    with pytest.raises(RefitError, match="10 tensors .* took 9"):
        verify_receipts(receipt_of(weights(), stride=stride), receipt_of(fewer, stride=stride), 3, "replica 0")
    reshaped = {n: t.t() if n == skipped[0] else t for n, t in weights().items()}
    with pytest.raises(RefitError, match="shapes or dtypes differ"):
        verify_receipts(receipt_of(weights(), stride=stride), receipt_of(reshaped, stride=stride), 3, "replica 0")


def test_a_changed_dtype_is_noticed():
    wide = {n: t.float() for n, t in weights().items()}
    stride = 1000
    assert not any(is_sampled(n, 3, stride) for n in list(wide)[:3])
    first = next(iter(wide))
    mixed = {n: wide[n] if n == first else t for n, t in weights().items()}
    fill = {"sampled": torch.zeros(3)}
    name = next(f"s{i}" for i in range(100000) if is_sampled(f"s{i}", 3, stride))
    mixed[name] = fill["sampled"]
    with pytest.raises(RefitError, match="dtypes differ"):
        verify_receipts(
            receipt_of(mixed, stride=stride), receipt_of({**weights(), name: fill["sampled"]}, stride=stride), 3, "replica 0"
        )


def test_a_receipt_without_a_checksum_proves_nothing():
    skipped = {n: t for n, t in weights().items() if not is_sampled(n, 3, 1000)}
    empty = receipt_of(skipped, stride=1000)
    assert empty["checksums"] == {}
    with pytest.raises(RefitError, match="nothing is proved"):
        verify_receipts(empty, empty, 3, "replica 0")


def test_an_engine_without_a_receipt_fails():
    with pytest.raises(RefitError, match="holds the weights of step None"):
        verify_receipts(receipt_of(weights()), {}, 3, "replica 0")


def test_every_tensor_is_sampled_within_one_round_of_steps():
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(200)]
    stride = stride_for(len(names), 64)
    assert stride == 3
    for name in names:
        assert sum(is_sampled(name, step, stride) for step in range(stride)) == 1


def test_sampling_bounds():
    assert stride_for(10, -1) == stride_for(0, 64) == stride_for(5, 64) == 1
    assert stride_for(771, 64) == 12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_checksum_equals_a_sum_of_sixteen_bit_words_weighted_by_position(dtype):
    g = torch.Generator().manual_seed(9)
    for shape in ((33, 65), (130, 201), (), (1,)):
        tensor = torch.randn(shape, generator=g).to(dtype)
        words = tensor.reshape(-1).view(torch.int16).numpy().astype("int64")
        assert int(checksum(tensor)) == sum(int(w) * (1 + i % 8191) for i, w in enumerate(words))


def test_rows_that_changed_places_and_bytes_of_odd_length_are_seen():
    tensor = torch.randn(50, 512, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert checksum(tensor) != checksum(tensor.flip(0))
    flags = torch.tensor([True, False, True])
    assert checksum(flags) != checksum(flags.roll(1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_tensors_are_named(bad):
    tensors = weights()
    tensors["layer.7.weight"][0, 0] = bad
    manifest = Manifest(step=0, stride=5)
    assert all(tensor.numel() <= 65536 for tensor in tensors.values())
    large = torch.ones(300, 300)
    manifest.check_finite([*tensors.items(), ("large", large)])
    assert manifest.non_finite() == ["layer.7.weight"]
    large[299, 299] = bad
    manifest.check_finite([("large", large)])
    assert manifest.non_finite() == ["layer.7.weight", "large"]
