# SPDX-License-Identifier: Apache-2.0
"""A policy whose keys and values are far larger and whose answers are the same: what an FP8 KV cache has to follow."""

import torch
from engines import CUDA, teacher_forced

KEYS, VALUES = 2.0**6, 2.0**11
"""What ``enlarged`` multiplies them by: powers of two, which leave a BF16 computation as it was, bit by bit."""

ROUNDING = 0.0 if CUDA else 1e-3
"""Most that the output may differ (k3) for the same policy at other scales; attention on a CPU loses some of small queries."""


def enlarged(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same policy with larger keys and values: what they are multiplied with later is as much smaller."""
    keys, queries = ("k_norm", "q_norm") if any("k_norm" in name for name in weights) else ("k_proj", "q_proj")
    factors = {keys: KEYS, queries: 1 / KEYS, "v_proj": VALUES, "o_proj": 1 / VALUES}
    return {
        name: tensor * next((factor for part, factor in factors.items() if part in name), 1.0)
        for name, tensor in weights.items()
    }


def distance(llm, sequences, expected) -> float:
    """Mean k3 of the engine's log-probs to others."""
    found = torch.tensor(teacher_forced(llm, sequences)).flatten()
    ratio = torch.tensor(expected).flatten() - found
    return float((ratio.exp() - 1 - ratio).mean())
