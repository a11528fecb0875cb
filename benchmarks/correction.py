# SPDX-License-Identifier: Apache-2.0
"""What the correction of the mismatch costs, on verl's driver and on FlashRL's actors.

    python -m benchmarks.correction

verl's V1 trainer pads the whole batch on its one driver process, computes weights and metrics there, and sends two more
fields back. FlashRL leaves that to the actors, rank by rank. Synthetic log-probs; TIS; each part in a process of its
own, so that its peak memory is its own. The padding stays with both: verl computes advantages on padded rows.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import environment, in_own_process, run, show, words_of, write_json
from flashrl_verl.errors import ConfigError

NODE = {"rollout_is": "token", "rollout_is_threshold": 2.0}
PARTS = ("padding", "verl", "flashrl")
"""On the driver for both; on verl's driver; on one of FlashRL's actor ranks."""


def measure(part: str, rows: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Run one part in this process.

    Args:
        part: of ``PARTS``.
        rows: responses.
        tokens: length of the longest; lengths are uniform from 1 to it.
        repeats: how often.

    Returns:
        Its seconds, and the largest resident memory above that of its inputs.
    """
    work = prepare(part, rows, tokens)
    work()  # imports, and the allocator's first pages
    before, seconds = _reset_peak(), []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    peak = max(0, _status("VmHWM") - before)
    return {"part": part, "tokens": tokens, "rows": rows, "seconds": seconds, "peak_bytes": peak}


def prepare(part: str, rows: int, tokens: int) -> Callable[[], Any]:
    """Make the inputs of a part; what is returned carries it out once, and keeps nothing."""
    from tensordict import TensorDict
    from verl.protocol import DataProto
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
    from verl.workers.utils.padding import response_to_nested

    from flashrl_verl.correction.batch import attach_correction
    from flashrl_verl.correction.settings import CorrectionSettings

    jagged = synthetic(rows, tokens)
    if part == "padding":
        return lambda: TensorDict(jagged, batch_size=rows).to_padded_tensor()
    if part == "flashrl":
        settings = CorrectionSettings.from_config(NODE)
        return lambda: attach_correction(TensorDict(jagged, batch_size=rows), settings)
    padded, node = TensorDict(jagged, batch_size=rows).to_padded_tensor(), RolloutCorrectionConfig(**NODE)

    def correct() -> Any:
        data, metrics = compute_rollout_correction_and_add_to_batch(DataProto(batch=padded.copy()), node)
        for field in ("response_mask", "rollout_is_weights"):  # as the driver sends them to the actors
            response_to_nested(data.batch[field], jagged["response_mask"])
        return data, metrics

    return correct


def synthetic(rows: int, tokens: int) -> dict[str, Any]:
    """Fields of verl's advantage step, jagged [rows, *]: log-ratios of a healthy INT8 rollout."""
    import torch

    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, tokens + 1, (rows,), generator=random)
    lengths[0] = tokens
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(offsets[-1])
    old = torch.rand(total, generator=random).neg_().mul_(3)
    values = {
        "response_mask": torch.ones(total, dtype=torch.int64),
        "rm_scores": torch.zeros(total),
        "old_log_probs": old,
        "rollout_log_probs": torch.randn(total, generator=random).mul_(0.02).add_(old),
    }
    bounds = {"min_seqlen": int(lengths.min()), "max_seqlen": tokens}
    return {name: torch.nested.nested_tensor_from_jagged(v, offsets=offsets, **bounds) for name, v in values.items()}


def _reset_peak() -> int:
    """Forget the largest resident memory so far (Linux); returns the present one, in bytes."""
    import ctypes

    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def correction(
    responses: Annotated[int, typer.Option(min=2, help="Responses of a step: prompts x samples.")] = 8192,
    tokens: Annotated[str, typer.Option(help="Longest responses in tokens, separated by commas.")] = "2048,8192,20480",
    ranks: Annotated[int, typer.Option(min=1, help="Data-parallel ranks of the actor.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each part.")] = 3,
    output: Annotated[Path, typer.Option(help="Folder for correction.json.")] = Path("outputs/correction"),
) -> None:
    """Time the correction and its memory, on the CPU, where both compute it. The default needs 12 GiB."""
    lengths = words_of(tokens, option="--tokens")
    if not all(word.isdecimal() and int(word) for word in lengths) or ranks > responses:
        raise ConfigError("--tokens are positive numbers, such as 2048,8192, and --ranks at most --responses")
    costs = []
    for longest in map(int, lengths):
        for part in PARTS:
            rows = responses if part != "flashrl" else -(-responses // ranks)
            print(f"{part}: {rows} responses of up to {longest} tokens", flush=True)
            costs.append(in_own_process(measure, part, rows, longest, repeats, log=output / f"{part}.log"))
    device = f"CPU ({os.cpu_count()} cores)"
    record = {"responses": responses, "ranks": ranks, "versions": environment(), "device": device, "costs": costs}
    write_json(output / "correction.json", record)
    rows = [
        [
            *(f"{cost[name]}" for name in ("part", "tokens", "rows")),
            f"{statistics.median(cost['seconds']):.2f}",
            f"{cost['peak_bytes'] / 2**30:.2f}",
        ]
        for cost in costs
    ]
    show(device, ("part", "longest response", "rows", "seconds", "peak GiB"), rows)
    print(f"written: {output / 'correction.json'}")


if __name__ == "__main__":
    run(correction)
