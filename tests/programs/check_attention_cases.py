# SPDX-License-Identifier: Apache-2.0
"""`flashrl check`'s look at our attention, with planted faults: on a CPU in Triton's interpreter, as a program."""

import contextlib
import sys
from collections.abc import Callable, Iterator

import torch

from flashrl_verl.attention import kernels
from flashrl_verl.tools.check import attention

SHAPE = 8, 2, 32, (1, 17, 64, 100)

write, decode = kernels.write, kernels.decode


def after_writing(change: Callable) -> Callable:
    """A fault in what is stored."""

    def written(key, value, pages, slots):
        write(key, value, pages, slots)
        change(pages)

    return written


def of_decoding(change: Callable) -> Callable:
    """A fault in what is read: ``change`` gets and returns page table and lengths."""
    return lambda query, pages, table, lengths, *rest: decode(query, pages, *change(table, lengths), *rest)


def shorter(table: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return table, (lengths - 1).clamp(min=1)


FAULTS = {
    "value scales of one head off by 2 %": ("write", after_writing(lambda pages: pages.value_scales[:, 1].mul_(1.02))),
    "key scales of one head off by a tenth": ("write", after_writing(lambda pages: pages.key_scales[:, 0].mul_(1.1))),
    "value scales of the other head": (
        "write",
        after_writing(lambda p: p.value_scales.copy_(p.value_scales.flip(1).clone())),
    ),
    "keys of the neighbour": ("write", after_writing(lambda p: p.keys.copy_(p.keys.roll(1, 2).clone()))),
    "pages of another sequence": (
        "decode",
        of_decoding(lambda table, lengths: (table.roll(1, 0).contiguous(), lengths)),
    ),
    "the last token is left out": ("decode", of_decoding(shorter)),
    "nothing is written": ("write", lambda *arguments: None),
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    function, fault = FAULTS[name]
    before = getattr(kernels, function)
    setattr(kernels, function, fault)
    try:
        yield
    finally:
        setattr(kernels, function, before)


def check(device: str) -> None:
    """A sound kernel is within the limit, and none with a fault."""
    place = torch.device(device)
    sound = attention.largest_error(*SHAPE, place)
    assert sound < attention._LIMIT, sound
    for name in FAULTS:
        with planted(name):
            error = attention.largest_error(*SHAPE, place)
        assert not error < attention._LIMIT, (name, error)
        sys.stdout.write(f"{name}: {error:.1e}, sound {sound:.1e}\n")


if __name__ == "__main__":
    check("cpu")
    sys.stdout.write("FOUND\n")
