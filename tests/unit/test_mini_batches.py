# SPDX-License-Identifier: Apache-2.0
"""The order of a batch: every row once, mini-batches of like lengths, ranks of like work, padding spread."""

import heapq
import random

import pytest
import torch
from verl.utils.seqlen_balancing import calculate_workload

from flashrl_verl.trainer.mini_batches import by_mini_batch, even_order, length_variation

ROWS = 8192


def finished(seed: int) -> list[int]:
    """Lengths of 512 groups of 16, of a median of 5000 tokens, in the order in which 128 groups at a time finish."""
    draw = random.Random(seed)
    lengths = []
    for _ in range(ROWS // 16):
        group = draw.gauss(0, 0.5)
        lengths += [min(20480, int(5000 * 2.718 ** (group + draw.gauss(0, 0.5)))) for _ in range(16)]
    slots, ends = [0] * 2048, []
    for length in lengths:
        ends.append(heapq.heappop(slots) + length)
        heapq.heappush(slots, ends[-1])
    return [lengths[row] for row in sorted(range(ROWS), key=ends.__getitem__)]


@pytest.mark.parametrize(("ranks", "mini_batches"), [(4, 16), (8, 16), (1, 16), (4, 1)])
def test_mini_batches_of_512_samples_are_alike_and_ranks_work_alike(ranks, mini_batches):
    lengths = finished(0)
    order = even_order(lengths, [False] * ROWS, mini_batches, ranks, "7 1")
    assert sorted(order) == list(range(ROWS))
    ordered = [lengths[row] for row in order]
    if mini_batches == 16:
        assert length_variation(lengths, mini_batches, 1) > 0.3  # as they finished
        assert length_variation(ordered, mini_batches, ranks) < 0.1
    work = calculate_workload(torch.tensor(ordered)).view(ranks, mini_batches, -1).sum(-1).double()
    assert (work.max(0).values / work.mean(0) < 1.01).all()


def test_the_draw_is_of_its_seed():
    lengths = finished(0)[:64]
    orders = [even_order(lengths, [False] * 64, 4, 2, seed) for seed in ("7 1", "7 1", "7 2")]
    assert orders[0] == orders[1] != orders[2]


def test_padding_rows_are_spread():
    padding = [False] * 54 + [True] * 10
    order = even_order([1000] * 54 + [2] * 10, padding, 4, 2, "7 1")
    counts = [sum(part) for part in by_mini_batch([padding[row] for row in order], 4, 2)]
    assert sorted(counts) == [2, 2, 3, 3]


def test_a_mini_batch_is_the_same_part_of_every_ranks_block():
    """verl gives each rank a block of consecutive rows, and cuts it into mini-batches (`make_iterator`)."""
    assert by_mini_batch(list(range(8)), mini_batches=2, ranks=2) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert length_variation([1, 1, 3, 3, 1, 1, 3, 3], 2, 2) == 0.5
