# SPDX-License-Identifier: Apache-2.0
"""Arms of a comparison: number formats of one engine, and how a command line names them."""

from dataclasses import dataclass

from flashrl_verl.errors import ConfigError
from flashrl_verl.settings import KVCache, Precision


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Number formats of one engine."""

    precision: Precision
    kv_cache: KVCache = KVCache.AUTO

    def __str__(self) -> str:
        return self.precision.value + ("" if self.kv_cache is KVCache.AUTO else f" + {self.kv_cache.value} KV")


def arm_of(word: str, option: str) -> Arm:
    """Read ``int8``, or ``int8:int8_per_token_head`` with a format of the KV cache.

    Args:
        word: of the command line.
        option: that it was given to.

    Raises:
        ConfigError: it names no such format.
    """
    precision, _, kv_cache = word.partition(":")
    found = {}
    for kind, given in ((Precision, precision), (KVCache, kv_cache or KVCache.AUTO.value)):
        try:
            found[kind] = kind(given)
        except ValueError:
            names = ", ".join(member.value for member in kind)
            raise ConfigError(f"{option} {word!r}: {given!r} is not one of {names}") from None
    return Arm(precision=found[Precision], kv_cache=found[KVCache])


def arms_of(words: str, option: str) -> tuple[Arm, ...]:
    """Read several, separated by commas; raises like ``arm_of``, and where there is none."""
    arms = tuple(arm_of(word, option) for word in filter(None, map(str.strip, words.split(","))))
    if not arms:
        raise ConfigError(f"{option} {words!r} names no precision")
    return arms


def precisions_of(words: str) -> tuple[Precision, ...]:
    """Read ``--precision``: names separated by commas."""
    chosen = []
    for word in filter(None, map(str.strip, words.split(","))):
        try:
            chosen.append(Precision(word))
        except ValueError:
            names = ", ".join(p.value for p in Precision)
            raise ConfigError(f"--precision {words}: {word!r} is not one of {names}") from None
    if not chosen:
        raise ConfigError(f"--precision {words!r} names no precision")
    return tuple(chosen)
