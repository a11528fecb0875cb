# SPDX-License-Identifier: Apache-2.0
"""``flashrl bench correction``: what the mismatch correction costs, on verl's driver and on FlashRL's actors.

verl's V1 trainer pads the whole batch on its single driver process, computes weights, rejections and metrics there, and
sends two more fields back. FlashRL leaves that to the actors, rank by rank. Synthetic log-probs; each part in a process
of its own, so that its peak memory is its own. The padding itself stays with both: verl computes advantages on padded
rows.
"""

import dataclasses
import datetime
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch

from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.tools.software import installed_versions

NODE = {"rollout_is": "token", "rollout_is_threshold": 2.0}
"""TIS: the correction that is measured."""

PARTS = {
    "padding": "driver: padding, verl and FlashRL",
    "verl": "driver: correction, verl",
    "flashrl": "one of {ranks} actor ranks: correction, FlashRL",
}
"""What is measured; on FlashRL's driver there is no correction to measure."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """One part at one length."""

    part: str
    tokens: int
    """Longest response."""
    rows: int
    seconds: list[float]
    """By repeat."""
    peak_bytes: int
    """Largest resident memory above that before the part began, its inputs left out."""


@dataclasses.dataclass(frozen=True)
class Report:
    """All costs, and where they were measured."""

    responses: int
    ranks: int
    versions: dict[str, str]
    device: str
    date: str
    costs: list[Cost]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)


def run(
    responses: int,
    tokens: Sequence[int],
    ranks: int,
    repeats: int = 3,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Measure every part at every length.

    Args:
        responses: rows of a step's batch: prompts x samples.
        tokens: longest responses; lengths are uniform from 1 to it.
        ranks: data-parallel ranks of the actor; at most ``responses``.
        repeats: of each part.
        progress: called with a line before each part.

    Raises:
        ConfigError: there are more ranks than responses.
        FlashRLError: a part ended without an answer: out of memory, most likely.
    """
    if ranks > responses:
        raise ConfigError(f"--ranks {ranks} is more than --responses {responses}: a rank needs a row. Lower --ranks.")
    costs = []
    for longest in tokens:
        for part, words in PARTS.items():
            progress(f"{responses} responses of up to {longest} tokens: {words.format(ranks=ranks)}")
            rows = responses if part != "flashrl" else -(-responses // ranks)
            costs.append(_in_own_process(part, rows, longest, repeats))
    versions = installed_versions()
    return Report(
        responses=responses,
        ranks=ranks,
        versions={**versions, "python": platform.python_version()},
        device=f"CPU ({os.cpu_count()} cores)",
        date=datetime.date.today().isoformat(),
        costs=costs,
    )


def _in_own_process(part: str, rows: int, tokens: int, repeats: int) -> Cost:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(measure, part, rows, tokens, repeats).result()
        except (RuntimeError, MemoryError) as error:
            if not _ran_out_of_memory(error):
                raise
            need = rows * tokens * 60 / 2**30
            raise FlashRLError(
                f"measuring {part!r} on {rows} x {tokens} tokens failed ({type(error).__name__}: {error}); it needs "
                f"about {need:.0f} GiB of memory. Lower --responses or --tokens."
            ) from error


def _ran_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Whether the system ended the process, or it found no room: torch's allocator has words for that, but no type."""
    return isinstance(error, BrokenProcessPool | MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(
        error
    )


def measure(part: str, rows: int, tokens: int, repeats: int) -> Cost:
    """Run one part of ``PARTS`` in this process.

    Args:
        part: which.
        rows: responses.
        tokens: length of the longest.
        repeats: how often.
    """
    work = _prepare(part, rows, tokens)
    work()  # imports, and the allocator's first pages
    before = _reset_peak()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return Cost(part, tokens, rows, seconds, max(0, _status("VmHWM") - before))


def _prepare(part: str, rows: int, tokens: int) -> Callable[[], object]:
    """Make the inputs of a part; what is returned carries it out once and keeps nothing."""
    from tensordict import TensorDict
    from verl.protocol import DataProto
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
    from verl.workers.utils.padding import response_to_nested

    from flashrl_verl.correction.batch import attach_correction
    from flashrl_verl.correction.settings import CorrectionSettings

    jagged = _synthetic(rows, tokens)
    if part == "padding":
        return lambda: TensorDict(jagged, batch_size=rows).to_padded_tensor()
    if part == "flashrl":
        settings = CorrectionSettings.from_config(NODE)
        return lambda: attach_correction(TensorDict(jagged, batch_size=rows), settings)
    padded = TensorDict(jagged, batch_size=rows).to_padded_tensor()
    node = RolloutCorrectionConfig(**NODE)

    def correct() -> None:
        data, _ = compute_rollout_correction_and_add_to_batch(DataProto(batch=padded.copy()), node)
        for field in ("response_mask", "rollout_is_weights"):  # as the driver sends them to the actors
            response_to_nested(data.batch[field], jagged["response_mask"])

    return correct


def _synthetic(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    """Fields of verl's advantage step, jagged [rows, *]: uniform lengths, log-ratios of a healthy INT8 rollout."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, tokens + 1, (rows,), generator=random)
    lengths[0] = tokens
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(offsets[-1])
    old = torch.rand(total, generator=random).neg_().mul_(3)
    rollout = torch.randn(total, generator=random).mul_(0.02).add_(old)
    values = {
        "response_mask": torch.ones(total, dtype=torch.int64),
        "rm_scores": torch.zeros(total),
        "old_log_probs": old,
        "rollout_log_probs": rollout,
    }
    bounds = {"min_seqlen": int(lengths.min()), "max_seqlen": tokens}
    return {name: torch.nested.nested_tensor_from_jagged(v, offsets=offsets, **bounds) for name, v in values.items()}


def _reset_peak() -> int:
    """Forget the largest resident memory so far (Linux); returns the present one, in bytes."""
    import ctypes

    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free goes back to the system, and counts again when it is taken
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(key: str) -> int:
    """A size of ``/proc/self/status``, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def median_seconds(cost: Cost) -> float:
    return statistics.median(cost.seconds)
