# SPDX-License-Identifier: Apache-2.0
"""``flashrl bench learning-pack`` and ``learning-unpack``: a folder of runs as a few small files, and back elsewhere.

In it is what the same command needs to go on, and what cannot be made again: settings, the model that all runs start
from and its data, every run's metrics, record and the end of its log; of an unfinished run the last checkpoint, of a
finished one the weights.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import tarfile
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from flashrl_verl.errors import ConfigError, FlashRLError
from benchmarks.legacy_learning.tools.console import new_console

_LOG_BYTES = 64 << 10
"""Kept of a log: its end. Most of a log is Ray's."""


class _Parts(io.RawIOBase):
    """Bytes in files of a limited size: ``<archive>.00``, ``<archive>.01``, ..."""

    def __init__(self, archive: Path, limit: int):
        self._archive, self._limit, self._room = archive, limit, 0
        self.files: list[Path] = []

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:
        view = memoryview(data).cast("B")
        for at in self._pieces(len(view)):
            with self.files[-1].open("ab") as stream:
                stream.write(view[at])
        return len(view)

    def sync(self) -> None:
        """Wait until all that was written is on the disk."""
        for file in self.files:
            with file.open("rb") as stream:
                os.fsync(stream.fileno())

    def _pieces(self, total: int) -> Iterator[slice]:
        start = 0
        while start < total:
            if not self._room:
                self.files.append(part_of(self._archive, len(self.files)))
                self._room = self._limit
            end = min(total, start + self._room)
            self._room -= end - start
            yield slice(start, end)
            start = end


def part_of(archive: Path, number: int) -> Path:
    """Name of a part, from 0 on."""
    return archive.with_name(f"{archive.name}.{number:02d}")


def parts_of(archive: Path) -> list[Path]:
    """The parts that are there, without a gap."""
    found = []
    while (part := part_of(archive, len(found))).is_file():
        found.append(part)
    return found


def _surplus(archive: Path, kept: int) -> list[Path]:
    """Parts of an older, larger archive of this name: from number ``kept`` on, behind a gap too (there are at most
    1000)."""
    numbers = (path.name.removeprefix(f"{archive.name}.") for path in archive.parent.glob("*.[0-9][0-9]*"))
    parts = {part_of(archive, int(number)) for number in numbers if number.isdecimal() and kept <= int(number) < 1000}
    return sorted(part for part in parts if part.is_file())


def pack(output: Path, archive: Path, part_bytes: int) -> list[Path]:
    """Write the archive's parts; an older one of the same name is replaced once the new one is whole.

    Args:
        output: of ``flashrl bench learning``.
        archive: the parts are named after it.
        part_bytes: most of a part.

    Raises:
        ConfigError: the folder is none of this bench's, one of its runs is going on, or something is gone without which
            runs could not go on from the archive.
        OSError: no space, no rights, ...; the older archive is unchanged unless the parts were being renamed.
    """
    from benchmarks.legacy_learning.learning import RUNS
    from benchmarks.legacy_learning.learning_run import process_of
    from benchmarks.legacy_learning.tools.run_directory import LOG_FILE
    from flashrl_verl.trainer.atomic_write import move

    kept = _shared(output)
    runs = sorted(path for path in (output / RUNS).glob("*") if path.is_dir())
    for run in runs:
        if (pid := process_of(run)) is not None:
            raise ConfigError(
                f"{run.name} is going on as process {pid}: its checkpoint may change meanwhile. End it first"
            )
        kept += _kept(run)
    archive.parent.mkdir(parents=True, exist_ok=True)
    parts = _Parts(archive.with_name(f".{archive.name}.{uuid.uuid4().hex}"), part_bytes)
    try:
        with gzip.GzipFile(fileobj=parts, mode="wb", mtime=0) as stream, tarfile.open(fileobj=stream, mode="w|") as tar:
            for path in kept:
                tar.add(path, path.relative_to(output))
            for run in runs:
                _add_log(tar, run / LOG_FILE, output)
        parts.sync()
        done = [part_of(archive, number) for number in range(len(parts.files))]
        for scratch, part in zip(parts.files, done, strict=True):
            move(scratch, part)
    finally:  # Ctrl-C too
        for scratch in parts.files:
            scratch.unlink(missing_ok=True)
    for old in _surplus(archive, len(done)):  # they would be taken for the new archive's end
        old.unlink()
    return done


def _shared(output: Path) -> list[Path]:
    """What all runs have in common."""
    from benchmarks.legacy_learning.learning import ASSETS, SETTINGS
    from benchmarks.legacy_learning.learning_bf16 import FILE
    from benchmarks.legacy_learning.quickstart.assets import whole_manifest

    if not (output / SETTINGS).is_file():
        raise ConfigError(
            f"{output} has no {SETTINGS}: it is no --output of flashrl bench learning, or its model was never made"
        )
    if whole_manifest(output / ASSETS) is None:
        raise ConfigError(
            f"{output / ASSETS} is gone or not whole, and no run goes on without the model and the data that it "
            "started from. Put it back before packing"
        )
    return [output / SETTINGS, output / ASSETS, *_there(output, FILE)]


def _kept(run: Path) -> list[Path]:
    """Of one run, besides its log: what it measured, and the weights or the checkpoint."""
    from benchmarks.legacy_learning.learning_bf16 import FILE, MODEL
    from benchmarks.legacy_learning.learning_run import checkpoint_of
    from benchmarks.legacy_learning.tools.report.run import METRICS_FILE, RUN_FILE
    from benchmarks.legacy_learning.tools.run_directory import CONFIG_FILE, LATEST

    files = _there(run, METRICS_FILE, RUN_FILE, CONFIG_FILE, FILE)
    if (run / MODEL).is_dir():
        return [*files, run / MODEL]
    if not (step := checkpoint_of(run)):
        return files
    latest = run / "checkpoints" / LATEST
    checkpoint = latest.with_name(f"global_step_{step}")
    if not checkpoint.is_dir():
        raise ConfigError(
            f"{latest} names step {step}, and {checkpoint} is gone: the run could not go on from an archive. Put it "
            f"back, or remove {run} to train it anew"
        )
    return [*files, latest, checkpoint]


def _there(folder: Path, *names: str) -> list[Path]:
    """Those of a folder's files that have been written: a run that was stopped early has not all of them."""
    return [folder / name for name in names if (folder / name).is_file()]


def _add_log(tar: tarfile.TarFile, log: Path, output: Path) -> None:
    if log.is_file():
        end = log.read_bytes()[-_LOG_BYTES:]
        entry = tarfile.TarInfo(str(log.relative_to(output)))
        entry.size = len(end)
        tar.addfile(entry, io.BytesIO(end))


def unpack(archive: Path, output: Path) -> None:
    """Make the folder anew; it appears whole or not at all.

    Raises:
        ConfigError: there is no such archive, or the folder is not empty.
        FlashRLError: a part is missing or damaged.
    """
    parts = parts_of(archive)
    if not parts:
        raise ConfigError(f"{part_of(archive, 0)} is not there: name the archive without the number of its parts")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} is there already and is not overwritten. Remove it, or name another folder")
    scratch = output.with_name(f".{output.name}.{uuid.uuid4().hex}.part")
    try:
        scratch.mkdir(parents=True)
        whole = io.BytesIO(b"".join(part.read_bytes() for part in parts))  # small: meant for tens of MB
        with gzip.GzipFile(fileobj=whole) as stream:
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                tar.extractall(scratch, filter="data")
            while stream.read(1 << 20):  # to the checksum behind the last byte
                pass
        if output.exists():
            output.rmdir()
        scratch.replace(output)
    except (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        names = ", ".join(part.name for part in parts)
        raise FlashRLError(
            f"{archive}: a part is missing or damaged ({error}); there are {names}. Nothing was unpacked"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


# ---- commands ----


def learning_pack(
    output: Annotated[Path, typer.Argument(help="The --output of flashrl bench learning; no run of it is going on.")],
    archive: Annotated[Path, typer.Argument(help="Name of the archive; its parts are NAME.00, NAME.01, ...")],
    part_mb: Annotated[float, typer.Option(min=0.001, help="Most of a part, MB (a million bytes).")] = 15.0,
) -> None:
    """Pack a folder of learning curves into small files, to go on with on another machine."""
    files = pack(output.expanduser().resolve(), archive.expanduser().resolve(), round(part_mb * 1e6))
    size = sum(file.stat().st_size for file in files)
    new_console().print(
        f"packed: {size / 1e6:.1f} MB in {len(files)} files from {files[0]} on", highlight=False, soft_wrap=True
    )


def learning_unpack(
    archive: Annotated[Path, typer.Argument(help="As it was named to learning-pack, without the parts' numbers.")],
    output: Annotated[
        Path, typer.Argument(help="Folder to be made: the --output of flashrl bench learning that goes on.")
    ],
) -> None:
    """Unpack what learning-pack made; the same bench learning command with this --output goes on."""
    unpack(archive.expanduser().resolve(), output.expanduser().resolve())
