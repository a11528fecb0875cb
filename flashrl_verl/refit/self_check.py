# SPDX-License-Identifier: Apache-2.0
"""Can this rollout engine be refitted at all? Asked once, when a run starts, with the weights it starts from.

An update of every later step relies on it: whatever the engine multiplies with is rewritten by an update (and on a CPU
derived from what was), nothing moves, and what vLLM's sleep mode throws away comes back. So the engines sleep as they
will between steps, the same weights are sent again, over poisoned storage as in every update: storage, addresses and
greedy output must be what they were. Before it, each linear layer and a head compute with weights of 1 and of 2, which
shows a copy that does not follow them (``rollout/worker.py``).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from flashrl_verl.errors import FlashRLError, listed

PROMPT_TOKENS, NEW_TOKENS = 16, 16
"""Length of the greedy output that is compared: enough to pass every layer in prefill and in decoding."""

LOG_PROB_TOLERANCE = 1e-3
"""Largest difference of log-probs. The same kernels on the same numbers give the same bits wherever this has been run;
a library may still add in another order, which changes BF16 logits by about this much, where stale weights change them
by far more (and poisoned ones give NaN)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineState:
    """What one replica holds and says."""

    workers: Sequence[dict[str, tuple[int, int]]]
    """Per worker: name of each parameter and buffer -> (checksum, address)."""
    token_ids: Sequence[int]
    """Greedy continuation of a fixed prompt."""
    log_probs: Sequence[float]
    """Of each of these tokens."""


def prompt(vocabulary: int) -> list[int]:
    """``PROMPT_TOKENS`` token ids spread over a vocabulary of that many."""
    return [(1 + 7919 * i) % vocabulary for i in range(PROMPT_TOKENS)]


def sleeps_between_steps(rollout: Mapping[str, Any]) -> bool:
    """Whether verl sends the engines to sleep. Args: rollout: the node actor_rollout_ref.rollout."""
    # verl's YAML does not have enable_sleep_mode; its dataclass (verl/workers/config/rollout.py) says true.
    return bool(rollout["free_cache_engine"]) and bool(rollout.get("enable_sleep_mode", True))


def differences(before: EngineState, after: EngineState) -> list[str]:
    """In words, whatever is not the same; empty when everything is."""
    found = []
    for rank, (old, new) in enumerate(zip(before.workers, after.workers, strict=True)):
        gone = sorted(old.keys() ^ new.keys())
        moved = [name for name in old if name in new and old[name][1] != new[name][1]]
        changed = [name for name in old if name in new and old[name][0] != new[name][0]]
        for text, names in (("there only once", gone), ("moved", moved), ("with other contents", changed)):
            if names:
                found.append(f"worker {rank}: {text}: {listed(names)}")
    if list(before.token_ids) != list(after.token_ids):
        found.append(f"greedy tokens {list(after.token_ids)} instead of {list(before.token_ids)}")
    elif not all(
        math.isfinite(b) and abs(a - b) <= LOG_PROB_TOLERANCE
        for a, b in zip(before.log_probs, after.log_probs, strict=True)
    ):
        pairs = zip(before.log_probs, after.log_probs, strict=True)
        found.append(f"log-probs of the same greedy tokens differ by up to {max(abs(a - b) for a, b in pairs):.3g}")
    return found


def require_same(before: Sequence[EngineState], after: Sequence[EngineState], event: str) -> None:
    """Stop the run unless every replica is what it was.

    Args:
        before: one state a replica.
        after: the same replicas'.
        event: what happened in between, for the message.

    Raises:
        FlashRLError: what differs, per replica.
    """
    problems = [
        f"replica {number}: {text}"
        for number, (old, new) in enumerate(zip(before, after, strict=True))
        for text in differences(old, new)
    ]
    if problems:
        raise FlashRLError(
            f"self-check failed: after {event}, the rollout is not what it was: {'; '.join(problems)}. Updates of this "
            "model would leave something behind: set flashrl.precision=bf16 to see whether quantization is at fault, "
            "check `flashrl version`, and report it (flashrl.self_check=false skips this)"
        )
