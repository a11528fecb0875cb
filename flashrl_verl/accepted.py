# SPDX-License-Identifier: Apache-2.0
"""What a setting accepts: types, range, and the words for it in the one error a user sees."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from flashrl_verl.errors import ConfigError


class Accepted:
    """A test of a value, and the words that describe it to a user."""

    def __init__(self, kinds: tuple[type, ...], test: Callable[[Any], bool], words: str) -> None:
        self.kinds, self.range, self.words = kinds, test, words

    def test(self, value: Any) -> bool:
        # bool is an int in Python; `true` where a number is wanted is a mistake, not a 1.
        return isinstance(value, self.kinds) and not isinstance(value, bool) and self.range(value)

    def or_null(self, off: str) -> "Accepted":
        """The same, or null; `off` says what null does."""
        return Accepted((*self.kinds, type(None)), lambda v: v is None or self.range(v), f"{self.words}, or null {off}")


def require_accepted(node: str, settings: Any, accepted: Mapping[str, Accepted]) -> None:
    """Test the fields of a settings object.

    Args:
        node: the settings' place in the configuration, such as `flashrl`.
        settings: a dataclass instance.
        accepted: by the field's name.

    Raises:
        ConfigError: the first value that is not accepted.
    """
    for name, wanted in accepted.items():
        value = getattr(settings, name)
        if not wanted.test(value):
            raise ConfigError(f"{node}.{name}={value!r} is not accepted. Set {node}.{name} to {wanted.words}.")


def require_bool(node: str, settings: Any, name: str) -> None:
    """Test a field that is a switch.

    Raises:
        ConfigError: it is neither true nor false.
    """
    value = getattr(settings, name)
    if not isinstance(value, bool):
        raise ConfigError(f"{node}.{name}={value!r} is not accepted. Set {node}.{name} to true or false.")


def require_known(node: str, cls: type, keys: Mapping[str, Any], owner: str) -> None:
    """Refuse keys that are no fields of the dataclass `cls`.

    Args:
        node: the settings' place in the configuration.
        cls: the dataclass.
        keys: what was written there.
        owner: whose settings they are, in the message.

    Raises:
        ConfigError: the first unknown key.
    """
    known = [field.name for field in fields(cls)]
    for key in keys:
        if key not in known:
            raise ConfigError(f"{node}.{key} is not a setting of {owner}. Remove it, or use one of {', '.join(known)}.")
