# SPDX-License-Identifier: Apache-2.0
"""Safetensors files of bounded size and their index, written while the tensors arrive."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from benchmarks.legacy_learning.tools.export.folder import INDEX


class ShardWriter:
    """Collects tensors up to a size and writes them; holds no more than one file's.

    Args:
        folder: where the files go; it exists and has none of them.
        max_bytes: size of a file. A larger tensor has a file of its own.
    """

    def __init__(self, folder: Path, max_bytes: int):
        self._folder, self._max_bytes = folder, max_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._written: list[list[str]] = []
        self.total_bytes = 0
        """Of all tensors so far."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor; it may be a view of anything.

        Raises:
            OSError: the disk is full, ...
        """
        if self._pending and self._pending_bytes + tensor.nbytes > self._max_bytes:
            self._flush()
        if tensor.untyped_storage().nbytes() != tensor.nbytes or not tensor.is_contiguous():
            tensor = tensor.contiguous().clone()  # a view would keep the whole of what it looks at
        self._pending[name] = tensor
        self._pending_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes

    def close(self) -> list[Path]:
        """Write the rest, give the files their final names and write the index, where there are several.

        Returns:
            The files of weights, in order.
        """
        self._flush()
        count = len(self._written)
        if count == 1:
            final = [self._folder / "model.safetensors"]
        else:
            final = [self._folder / f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
            where = {name: file.name for file, names in zip(final, self._written, strict=True) for name in names}
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(where.items()))}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        for number, file in enumerate(final):
            self._part(number).rename(file)
        return final

    def _part(self, number: int) -> Path:
        return self._folder / f"{number}.part"

    def _flush(self) -> None:
        from safetensors.torch import save_file

        if not self._pending:
            return
        part = self._part(len(self._written))
        save_file(self._pending, part, metadata={"format": "pt"})
        part.chmod(0o644)  # safetensors' 0600 would hide the weights from whoever serves them
        with part.open("rb+") as stream:
            os.fsync(stream.fileno())
        self._written.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0
