# SPDX-License-Identifier: Apache-2.0
"""The refit receipt notices what health metrics cannot see: every tensor of every update counts."""

import pickle
import re
from collections.abc import Callable

import pytest
import torch

from flashrl_verl.errors import RefitError
from flashrl_verl.refit.receipt import Manifest, brief, verify_ranks

NAME = "layer.4.weight"


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {f"layer.{i}.weight": torch.randn(7, 11, generator=g).bfloat16() for i in range(10)}


def receipt_of(tensors: dict[str, torch.Tensor], step: int = 3) -> dict:
    manifest = Manifest(step)
    assert dict(manifest.watch(tensors.items())).keys() == tensors.keys()
    return manifest.receipt()


def verify(sent: dict, *held: list[dict], places: tuple = ((0, 0), (0, 1), (1, 0))) -> None:
    """At step 3, of trainer ranks that send to these (replica, rank in it), and of what every replica holds."""

    def ask(form: Callable[[dict], dict]) -> tuple[list[dict], list[list[dict]]]:
        ranks = [{"replica": replica, "rank_in_replica": rank, "sent": form(sent)} for replica, rank in places]
        return ranks, [[form(receipt) for receipt in replica] for replica in held]

    verify_ranks(*ask(brief), 3, lambda: ask(dict))


CHANGES = {
    "one bit": (lambda t: t[NAME].view(torch.int16)[2, 5].add_(1), f"1 of 10 tensors: {NAME}"),
    "swapped": (lambda t: t.update({NAME: t["layer.5.weight"], "layer.5.weight": t[NAME]}), f"2 of 10 tensors: {NAME}"),
    "rows reversed": (lambda t: t.update({NAME: t[NAME].flip(0)}), f"1 of 10 tensors: {NAME}"),
    "shape": (lambda t: t.update({NAME: t[NAME].view(11, 7)}), r"sent bfloat16 \[7, 11\].* arrived bfloat16 \[11, 7\]"),
    "dtype": (lambda t: t.update({NAME: t[NAME].float()}), r"arrived float32 \[7, 11\]"),
    "missing": (lambda t: t.pop(NAME), rf"{NAME} \(sent bfloat16 .*, arrived nothing\)"),
    "extra": (lambda t: t.update(extra=torch.ones(1)), r"extra \(sent nothing, arrived float32"),
}


@pytest.mark.parametrize("change, words", CHANGES.values(), ids=CHANGES)
def test_whatever_arrives_otherwise_on_one_rank_is_named(change, words):
    good, arrived = receipt_of(weights()), weights()
    verify(good, [good, receipt_of(arrived)], [good])
    change(arrived)
    with pytest.raises(RefitError, match=f"rollout replica 0, rank 1: at step 3 .*{words}"):
        verify(good, [good, receipt_of(arrived)], [good])


@pytest.mark.parametrize(
    "sent, held, message",
    [
        (receipt_of(weights()), receipt_of(weights(), step=2), "step 2, but the trainer is at step 3"),
        (receipt_of(weights(), step=2), receipt_of(weights(), step=2), "trainer sent the weights of step 2"),
        (receipt_of(weights()), {}, "engine has the weights of step None"),
        (receipt_of({}), receipt_of({}), "sent no tensor at step 3"),
    ],
)
def test_a_dropped_or_empty_update_is_named_by_its_steps(sent, held, message):
    with pytest.raises(RefitError, match=message):
        verify(sent, [held], places=[(0, 0)])


def test_an_engine_worker_that_nobody_sends_to_is_noticed():
    good = receipt_of(weights())
    message = "step 3: no trainer rank sends to the rollout's replica 0, rank 1; replica 1, rank 0"
    with pytest.raises(RefitError, match=re.escape(message)):
        verify(good, [good, good], [good], places=[(0, 0)])


def test_what_the_driver_compares_of_a_step_does_not_grow_with_the_model():
    """Qwen3-30B-A3B has 18,900 tensors; 32 trainer ranks, 32 engine workers."""
    receipt = receipt_of({f"model.layers.{n}.mlp.experts.up_proj.weight": torch.tensor([n]) for n in range(18_900)})
    ranks = [{"replica": n // 4, "rank_in_replica": n % 4, "sent": brief(receipt)} for n in range(32)]
    held = [[brief(receipt)] * 4 for _ in range(8)]
    bytes_moved = sum(len(pickle.dumps(one)) for one in [*ranks, *sum(held, [])])
    verify_ranks(ranks, held, 3, pytest.fail)
    assert bytes_moved < 20_000


def test_the_order_in_which_tensors_pass_does_not_matter_and_small_ones_are_looked_at_together(monkeypatch):
    manifest, together = Manifest(3), []
    monkeypatch.setattr("flashrl_verl.refit.receipt._TOGETHER", 3 * 7 * 11 * 2)
    add = manifest.add
    monkeypatch.setattr(manifest, "add", lambda weights: (together.append(len(weights)), add(weights)))
    assert list(manifest.watch(list(weights().items())[::-1])) and together == [3, 3, 3, 1]
    assert manifest.receipt() == receipt_of(weights())
