# SPDX-License-Identifier: Apache-2.0
"""PPO mini-batches that are alike: each a random draw of the batch, shared evenly among ranks.

verl leaves rows in the order in which they finished, balances ranks over the whole batch and cuts each rank's rows into
mini-batches. So the updates of a step run from short to long responses, and ranks wait for each other in each of them.
With ``loss_agg_mode=token-mean`` the mean is over a mini-batch: in verl's order a token of a short response weighs more
than one of a long one, in this order all weigh nearly the same.
"""

import random
from collections.abc import Sequence
from statistics import fmean, pstdev

import torch
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions


def even_order(lengths: Sequence[int], padding: Sequence[bool], mini_batches: int, ranks: int, seed: str) -> list[int]:
    """An order of rows in which consecutive blocks of equal size are the ranks', and parts of these the mini-batches.

    Args:
        lengths: tokens of each row, prompt and response.
        padding: whether a row is one of verl's synthetic rows. Each mini-batch gets as many of them, one more or less.
        mini_batches: of equal size; rows are divisible by `mini_batches * ranks`.
        ranks: data-parallel ranks of the actor.
        seed: of the draw.

    Returns:
        Indices of rows, each once.
    """
    rows = [row for row, empty in enumerate(padding) if not empty]
    random.Random(seed).shuffle(rows)
    rows += [row for row, empty in enumerate(padding) if empty]
    drawn = [rows[number::mini_batches] for number in range(mini_batches)]
    shared = []
    for part in drawn:
        work = calculate_workload(torch.tensor([lengths[row] for row in part])).tolist()  # tensors compare slowly
        shared.append(
            [[part[i] for i in share] for share in get_seqlen_balanced_partitions(work, ranks, equal_size=True)]
        )
    return [row for rank in range(ranks) for shares in shared for row in shares[rank]]


def by_mini_batch(values: Sequence, mini_batches: int, ranks: int) -> list[list]:
    """Values of rows in the order of `even_order`, as the updates will see them: a list a mini-batch."""
    size = len(values) // (mini_batches * ranks)
    starts = [[(rank * mini_batches + number) * size for rank in range(ranks)] for number in range(mini_batches)]
    return [[value for start in of_ranks for value in values[start : start + size]] for of_ranks in starts]


def length_variation(lengths: Sequence[int], mini_batches: int, ranks: int) -> float:
    """Coefficient of variation of the mini-batches' mean lengths, of rows in the order of `even_order`."""
    means = [fmean(part) for part in by_mini_batch(lengths, mini_batches, ranks)]
    return pstdev(means) / fmean(means)
