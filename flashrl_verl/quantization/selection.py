# SPDX-License-Identifier: Apache-2.0
"""Which layers a user keeps out of quantization: ``flashrl.ignore``.

The words of compressed-tensors: an entry of ``ignore`` is an exact name or ``re:`` and a regular expression that has to
match from the start of a name. Names are those of the Hugging Face checkpoint; where vLLM fuses several of its layers
into one (``q_proj``, ``k_proj`` and ``v_proj`` into ``qkv_proj``), either the fused name or all of its parts.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flashrl_verl.errors import ConfigError, listed


@dataclass
class LayerSelection:
    """Decides for every layer of one model, and remembers which entries were of use."""

    ignore: Sequence[str] = ()
    """``flashrl.ignore``."""
    _used: set[str] = field(default_factory=set)
    _kept: list[str] = field(default_factory=list)

    def keeps(self, name: str, parts: Sequence[str]) -> bool:
        """Whether a layer stays in high precision.

        Args:
            name: vLLM's name of the layer, such as ``model.layers.0.self_attn.qkv_proj``.
            parts: names of the checkpoint's layers that it fuses; empty when it fuses none.

        Raises:
            ConfigError: ``ignore`` names some of the fused parts only, which share one weight.
        """
        if self._names_all(name, parts):
            self._kept.append(name)
            return True
        return False

    @property
    def kept(self) -> list[str]:
        """Layers that stay in high precision because the user said so."""
        return list(self._kept)

    def unused(self, never_quantized: Iterable[str] = ()) -> list[str]:
        """Entries of ``ignore`` that matched no layer.

        Args:
            never_quantized: further names; who ignores one of them gets what it asks for.
        """
        rest = [entry for entry in self.ignore if entry not in self._used]
        return [entry for entry in rest if not any(_matches(entry, name) for name in never_quantized)]

    def _names_all(self, name: str, parts: Sequence[str]) -> bool:
        named: set[str] = set()
        for entry in self.ignore:
            of_parts = {part for part in parts if _matches(entry, part)}
            # A pattern for v_proj matches the end of qkv_proj too: what it says of the parts counts.
            whole = _matches(entry, name) and not of_parts
            if whole or of_parts:
                self._used.add(entry)
                named |= of_parts or set(parts or [name])
        missing = [part for part in parts if part not in named]
        if named and missing:
            raise ConfigError(
                f"flashrl.ignore names {listed([p for p in parts if p in named])}, but not "
                f"{listed(missing)}; vLLM keeps them in one weight, {name}. Name all of them, or {name}, or none"
            )
        return bool(named)


def _matches(entry: str, name: str) -> bool:
    return bool(re.match(entry.removeprefix("re:"), name)) if entry.startswith("re:") else entry == name


def fused_parts(name: str, packed: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the checkpoint's names of the layers that vLLM fuses into ``name``.

    Args:
        name: vLLM's name of a layer.
        packed: vLLM's ``packed_modules_mapping``: last part of a fused name to the last parts of its components.
    """
    prefix, _, last = name.rpartition(".")
    parts = [part for part in packed.get(last, ()) if part != last]
    return [f"{prefix}.{part}" if prefix else part for part in parts]


def expert_parts(name: str, experts: int) -> list[str]:
    """Return the checkpoint's names of the projections of ``experts`` fused experts called ``name``."""
    return [f"{name}.{i}.{projection}" for i in range(experts) for projection in ("gate_proj", "up_proj", "down_proj")]
