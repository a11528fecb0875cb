# SPDX-License-Identifier: Apache-2.0
"""Ground truths as verl's rewards compare them: character by character, so one number must have one spelling.

Each function gives that spelling, or None for what is no answer of its kind.
"""

from __future__ import annotations

import re

_INTEGER = re.compile(r"[+-]?[0-9]{1,1000}")  # Python converts no more than 4300 digits
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")

# The expression of verl's examples/data_preprocess/gsm8k.py (63b2ae3), which takes the first match.
_GSM8K_FINAL = re.compile(r"#### (-?[0-9.,]+)")


def integer(text: str) -> str | None:
    """An integer without leading zeros: `math_dapo` finds "33" wrong where the truth is "033" (verl pull request
    2446)."""
    text = text.strip()
    return str(int(text)) if _INTEGER.fullmatch(text) else None


def aime(text: str) -> str | None:
    """An answer of the AIME: 0 to 999."""
    answer = integer(text)
    return answer if answer is not None and 0 <= int(answer) <= 999 else None


def number(text: str) -> str | None:
    """A number as verl's `gsm8k` reward extracts it from a response: no commas, no dollar sign."""
    text = text.replace(",", "")
    return text if _NUMBER.fullmatch(text) else None


def gsm8k_final(solution: str) -> str | None:
    """The number after "#### " in a solution of GSM8K."""
    match = _GSM8K_FINAL.search(solution)
    return number(match.group(1)) if match else None
