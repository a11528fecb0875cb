# SPDX-License-Identifier: Apache-2.0
"""Seconds spent in one phase of a weight update, summed over its pieces."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

T = TypeVar("T")


class PhaseClock:
    """``with clock: ...`` adds the block's time: on CUDA by events on the current stream, so that nothing waits for anything.

    Args:
        device: where the work runs.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._pieces: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = 0.0

    def __enter__(self) -> "PhaseClock":
        self._started = self._now()
        return self

    def __exit__(self, *_) -> None:
        if self._cuda:
            self._pieces.append((self._started, self._now()))
        else:
            self._seconds += self._now() - self._started

    def time_each(self, items: Iterable[T]) -> Iterator[T]:
        """Yield ``items``; the time each takes to come is added."""
        iterator = iter(items)
        while True:
            with self:
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def seconds(self) -> float:
        """The sum; waits for the last piece to end."""
        if self._pieces:
            self._pieces[-1][1].synchronize()
        return self._seconds + sum(start.elapsed_time(stop) for start, stop in self._pieces) / 1e3

    def _now(self):
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
