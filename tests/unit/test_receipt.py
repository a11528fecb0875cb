# SPDX-License-Identifier: Apache-2.0
"""The refit receipt notices what health metrics cannot see: every tensor of every update counts."""

import pytest
import torch

from flashrl_verl.errors import RefitError
from flashrl_verl.refit.receipt import Manifest, verify_ranks, verify_receipts


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {f"layer.{i}.weight": torch.randn(7, 11, generator=g).bfloat16() for i in range(10)}


def receipt_of(tensors: dict[str, torch.Tensor], step: int = 3) -> dict:
    manifest = Manifest(step)
    assert dict(manifest.watch(tensors.items())).keys() == tensors.keys()
    return manifest.receipt()


def one_unit_more(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layer.4.weight"].view(torch.int16)[2, 5] += (
        1  # one unit in the last place: an update at a learning rate of 1e-6
    )


def swap(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layer.4.weight"], tensors["layer.5.weight"] = tensors["layer.5.weight"], tensors["layer.4.weight"]


def test_equal_updates_verify():
    verify_receipts(receipt_of(weights()), receipt_of(weights()), 3, "replica 0")


@pytest.mark.parametrize(
    "change, words",
    [
        (one_unit_more, "1 of 10 tensors: layer.4.weight"),
        (swap, "2 of 10 tensors: layer.4.weight"),
        (lambda t: t.update({"layer.4.weight": t["layer.4.weight"].flip(0)}), "layer.4.weight"),
        (
            lambda t: t.update({"layer.4.weight": t["layer.4.weight"].t()}),
            r"sent bfloat16 \[7, 11\].* arrived bfloat16 \[11, 7\]",
        ),
        (lambda t: t.update({"layer.4.weight": t["layer.4.weight"].float()}), r"arrived float32 \[7, 11\]"),
        (lambda t: t.pop("layer.4.weight"), r"layer.4.weight \(sent bfloat16 .*, arrived nothing\)"),
        (lambda t: t.update({"extra": torch.ones(1)}), r"extra \(sent nothing, arrived float32"),
    ],
    ids=["one bit", "swapped", "rows reversed", "shape", "dtype", "missing", "extra"],
)
def test_whatever_arrives_otherwise_than_it_was_sent_is_named(change, words):
    arrived = weights()
    change(arrived)
    with pytest.raises(RefitError, match=f"replica 0: at step 3 .*{words}"):
        verify_receipts(receipt_of(weights()), receipt_of(arrived), 3, "replica 0")


def test_a_dropped_update_is_named_by_both_steps():
    with pytest.raises(RefitError, match="step 2, but the trainer is at step 3"):
        verify_receipts(receipt_of(weights()), receipt_of(weights(), step=2), 3, "replica 0")
    with pytest.raises(RefitError, match="trainer sent the weights of step 2"):
        verify_receipts(receipt_of(weights(), step=2), receipt_of(weights(), step=2), 3, "replica 0")
    with pytest.raises(RefitError, match="holds the weights of step None"):
        verify_receipts(receipt_of(weights()), {}, 3, "replica 0")


def test_an_update_without_a_tensor_proves_nothing():
    with pytest.raises(RefitError, match="sent no tensor at step 3"):
        verify_receipts(receipt_of({}), receipt_of({}), 3, "replica 0")


def reports(*places: tuple[int, int]) -> list[dict]:
    """Of trainer ranks that send the same update to (replica, rank in replica)."""
    return [{"replica": replica, "rank_in_replica": rank, "sent": receipt_of(weights())} for replica, rank in places]


def test_every_rank_is_compared_with_the_worker_beside_it():
    good, stale = receipt_of(weights()), receipt_of(weights(seed=1))
    verify_ranks(reports((0, 0), (0, 1), (1, 0)), [[good, good], [good]], 3)
    with pytest.raises(RefitError, match=r"rollout replica 0, rank 1: at step 3 .* layer\.0\.weight"):
        verify_ranks(reports((0, 0), (0, 1), (1, 0)), [[good, stale], [good]], 3)


def test_an_engine_worker_that_nobody_sends_to_is_noticed():
    good = receipt_of(weights())
    with pytest.raises(
        RefitError, match="step 3: no trainer rank sends to the rollout's replica 0, rank 1; replica 1, rank 0"
    ):
        verify_ranks(reports((0, 0)), [[good, good], [good]], 3)


def test_a_name_that_passes_twice_is_noted_and_the_first_counts():
    manifest, items = Manifest(0), list(weights().items())
    for name, tensor in [*items, (items[5][0], items[5][1] + 1)]:
        manifest.add([(name, tensor)])
    assert manifest.repeated == ["layer.5.weight"]
    assert manifest.receipt()["tensors"] == receipt_of(weights())["tensors"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_tensors_that_are_not_finite_are_named(bad):
    tensors = {**weights(), "empty": torch.empty(0), "integers": torch.arange(3)}
    tensors["layer.7.weight"][6, 10] = bad
    manifest = Manifest(0)
    list(manifest.watch(tensors.items()))
    assert manifest.non_finite() == ["layer.7.weight"]
