# SPDX-License-Identifier: Apache-2.0
"""`flashrl check`'s look at our attention, with planted faults; Triton is imported with it."""

from collections.abc import Callable
from unittest import mock

import torch

from flashrl_verl.attention import kernels
from flashrl_verl.tools.check import attention

SHAPE = 8, 2, 32, (1, 17, 64, 100)

write, decode = kernels.write, kernels.decode


def stores(change: Callable) -> tuple[str, Callable]:
    """``change`` gets the pages after what was written."""

    def written(key, value, pages, slots):
        write(key, value, pages, slots)
        change(pages)

    return "write", written


def reads(change: Callable) -> tuple[str, Callable]:
    """``change`` gets and returns page table and lengths."""
    return "decode", lambda query, pages, table, lengths, *rest: decode(query, pages, *change(table, lengths), *rest)


FAULTS = {
    "value scales of one head off by 2 %": stores(lambda pages: pages.value_scales[:, 1].mul_(1.02)),
    "key scales of one head off by a tenth": stores(lambda pages: pages.key_scales[:, 0].mul_(1.1)),
    "keys of the neighbour": stores(lambda pages: pages.keys.copy_(pages.keys.roll(1, 2).clone())),
    "pages of another sequence": reads(lambda table, lengths: (table.roll(1, 0).contiguous(), lengths)),
    "the last token is left out": reads(lambda table, lengths: (table, (lengths - 1).clamp(min=1))),
    "nothing is written": ("write", lambda *arguments: None),
}


def check() -> None:
    """A sound kernel is within the limit, and none with a fault."""
    place = torch.device("cuda")
    sound = attention.largest_error(*SHAPE, place)
    assert sound < attention._LIMIT, sound
    for name, (function, fault) in FAULTS.items():
        with mock.patch.object(kernels, function, fault):
            error = attention.largest_error(*SHAPE, place)
        assert not error < attention._LIMIT, (name, error)
