# SPDX-License-Identifier: Apache-2.0
"""Whether a live engine quantized all that its name promises: plain data, compared wherever it arrives."""

from typing import Any

_LEFT_ALONE = "ReplicatedLinear"
"""vLLM's class of a router: in high precision by design, and no part of a layer that was to be quantized."""


def unknown_layers(found: dict[str, Any]) -> dict[str, str]:
    """Layers in high precision that nobody named: with them an 8-bit engine's name is half true.

    Args:
        found: ``FlashRLWorkerExtension.flashrl_layers`` of one worker.

    Returns:
        Name to class.
    """
    return {
        name: kind
        for name, kind in found["unquantized_layers"].items()
        if kind != _LEFT_ALONE and name not in found["kept_layers"]
    }


def keeps_fewer(first: int, last: int, found: dict[str, Any]) -> str | None:
    """Whether the model has fewer of the decoder layers that were to stay in high precision than were asked for.

    Args:
        first: ``keep_first_layers``.
        last: ``keep_last_layers``.
        found: as in ``unknown_layers``.

    Returns:
        None, or what an error says after the settings' names.
    """
    kept = len(found["kept_numbers"])
    if kept >= first + last:
        return None
    asked = first + last
    return f"keep {kept} layers of this model instead of {asked}: they count names with '.layers.<number>.', and need as many"
