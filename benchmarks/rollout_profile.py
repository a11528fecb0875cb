# SPDX-License-Identifier: Apache-2.0
"""Which kernels a decode step of a vLLM worker spends its time in, by class."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.rollout_kernels import CLASSES, OTHER, class_of

_KERNELS_KEPT = 40
"""Of a step, those that take longest: with their names, so that classes can be drawn otherwise later."""

_NAME_KEPT = 160
"""Characters of a name that are kept, behind the choice of its class: templates' arguments make names of thousands."""


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """Means over the recorded decode steps."""

    steps: int
    sequences: int
    context: float
    """Tokens of a sequence, mean."""
    milliseconds: dict[str, float]
    """Class to the time of its kernels in a step."""
    launches: dict[str, float]
    """Class to how many kernels of it ran in a step."""
    kernels: list[tuple[str, str, float, float]]
    """Class, name (its first 160 characters), milliseconds and launches a step of those that take longest."""


class StepRecorder:
    """Records the kernels of some steps of a worker in which every sequence gets one token.

    It takes the place of ``worker.execute_model`` and gives it back when it is done. Kernels of sampling, which vLLM
    calls afterwards, are within the recorded time too.

    Args:
        worker: vLLM's.
        sequences: that a step must decode to be recorded; a rollout has its first such step when the last prompt is
            read.
        skip: such steps before the recorded ones.
        steps: to record.
    """

    def __init__(self, worker: Any, sequences: int, skip: int, steps: int):
        self._worker, self._execute = worker, worker.execute_model
        self._sequences, self._first, self._steps = sequences, skip + 1, steps
        self._seen, self._contexts = 0, []
        self._profile: profile | None = None
        self.result: StepProfile | None = None
        worker.execute_model = self._step

    def stop(self) -> None:
        """Give the worker its method back, whatever was recorded."""
        self._worker.__dict__.pop("execute_model", None)
        recorded, self._profile = self._profile, None
        if recorded is not None:
            self._finish(recorded)

    @property
    def reason(self) -> str | None:
        """Why nothing was recorded; None where something was."""
        if self.result is not None:
            return None
        if not self._contexts:
            return (
                f"all {self._sequences} sequences were decoded together in {self._seen} steps, and {self._first} are "
                "needed: a longer response, a larger --max-num-seqs or a larger KV cache"
            )
        return (
            "the profiler saw no kernel: another one may be attached to the GPU (Nsight, DCGM), or CUPTI may not be "
            "allowed"
        )

    def _step(self, scheduled: Any, *arguments: Any, **named: Any) -> Any:
        # A new request with one token is the end of a prompt, though it looks like a decode step.
        decoding = len(scheduled.scheduled_cached_reqs.num_computed_tokens)
        full = decoding == self._sequences == scheduled.total_num_scheduled_tokens
        self._seen += full
        if self._profile is not None and (not full or len(self._contexts) == self._steps):
            self.stop()
        elif full and self._seen >= self._first:
            if self._profile is None:
                self._begin()
            lengths = scheduled.scheduled_cached_reqs.num_computed_tokens
            self._contexts.append(sum(lengths) / len(lengths))
        return self._execute(scheduled, *arguments, **named)

    def _begin(self) -> None:
        self._settle()
        self._profile = profile(activities=[ProfilerActivity.CUDA if self._on_gpu() else ProfilerActivity.CPU])
        self._profile.start()

    def _finish(self, recorded: profile) -> None:
        self._settle()
        recorded.stop()
        steps, total = len(self._contexts), "self_device_time_total" if self._on_gpu() else "self_cpu_time_total"
        milliseconds, launches = dict.fromkeys([*CLASSES, OTHER], 0.0), dict.fromkeys([*CLASSES, OTHER], 0.0)
        kernels = [
            (class_of(event.key), event.key, getattr(event, total) / 1e3 / steps, event.count / steps)
            for event in recorded.key_averages()
            if getattr(event, total) > 0
        ]
        for name, _, time, count in kernels:
            milliseconds[name] += time
            launches[name] += count
        if not kernels:
            return
        self.result = StepProfile(
            steps=steps,
            sequences=self._sequences,
            context=sum(self._contexts) / steps,
            milliseconds=milliseconds,
            launches=launches,
            kernels=[
                (kind, name[:_NAME_KEPT], time, count)
                for kind, name, time, count in sorted(kernels, key=lambda kernel: -kernel[2])[:_KERNELS_KEPT]
            ],
        )

    def _on_gpu(self) -> bool:
        return next(self._worker.model_runner.model.parameters()).is_cuda

    def _settle(self) -> None:
        if self._on_gpu():
            torch.cuda.synchronize()
