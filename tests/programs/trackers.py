# SPDX-License-Identifier: Apache-2.0
"""Reads back what verl's trackers wrote: TensorBoard's event files and the file of an offline W&B run."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path


def tensorboard_scalars(folder: Path) -> dict[int, dict[str, float]]:
    """Step to name to value (float32)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    steps: dict[int, dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            steps.setdefault(event.step, {})[name] = event.value
    return steps


def wandb_history(file: Path) -> dict[int, dict[str, float]]:
    """Step to name to value, without W&B's own names."""
    from wandb.proto.wandb_internal_pb2 import Record

    steps: dict[int, dict[str, float]] = {}
    for data in _wandb_records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {
                (item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item
            }
            steps[record.history.step.num] = {name: value for name, value in items.items() if not name.startswith("_")}
    return steps


def _wandb_records(data: bytes) -> Iterator[bytes]:
    """LevelDB's log format (https://github.com/google/leveldb/blob/main/doc/log_format.md) behind a header of 7
    bytes."""
    block, header = 32768, struct.Struct("<IHB")
    at, whole = 7, b""
    while at + header.size <= len(data):
        if block - at % block < header.size:
            at += block - at % block  # too little room for a header: zeros
            continue
        _, length, kind = header.unpack_from(data, at)
        at += header.size
        whole += data[at : at + length]
        at += length
        if kind in (1, 4):  # a full record, or the last part of one
            yield whole
            whole = b""
