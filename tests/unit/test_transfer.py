# SPDX-License-Identifier: Apache-2.0
"""Weight transfer between two processes, over verl's real ZMQ socket and shared memory: nobody waits for ever."""

import asyncio
import json
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch

from flashrl_verl.errors import RefitError

MEGABYTE_BUCKETS = 1
RECEIVER = Path(__file__).parents[1] / "programs" / "receive_weights.py"


def tensors() -> list[tuple[str, torch.Tensor]]:
    """About 3 MB, so that several buckets are needed."""
    g = torch.Generator().manual_seed(1)
    return [(f"t{i}", torch.randn(256, 512, generator=g).bfloat16()) for i in range(12)]


@pytest.fixture
def channel(monkeypatch):
    """Yields a function that starts a receiver of some behaviour and returns (process, handle)."""
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    started = []

    def start(behaviour: str, timeout_s: float = 200.0) -> tuple[subprocess.Popen, str]:
        handle = f"ipc:///tmp/flashrl-test-{uuid.uuid4().hex}.sock"
        command = [sys.executable, str(RECEIVER), handle, behaviour, str(timeout_s)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        started.append(process)
        return process, handle

    yield start
    for process in started:
        process.kill()
        process.wait()


def result(process: subprocess.Popen) -> list:
    """What the receiver printed."""
    lines = process.communicate(timeout=400)[0].splitlines()
    return json.loads(next(line for line in lines if line.startswith("RESULT ")).removeprefix("RESULT "))


def send(handle: str, weights, timeout_s: float = 200.0, receiver_ended=lambda: None) -> None:
    from flashrl_verl.refit.transfer import WatchedSender

    sender = WatchedSender(
        timeout_s=timeout_s,
        receiver_ended=receiver_ended,
        zmq_handle=handle,
        bucket_size_mb=MEGABYTE_BUCKETS,
        use_shm=True,
    )
    asyncio.run(sender.async_send_weights(iter(weights)))


def test_all_tensors_arrive_whole(channel):
    process, handle = channel("load")
    send(handle, tensors())
    status, got = result(process)
    assert status == "ok"
    assert got == {name: float(t.double().sum()) for name, t in tensors()}


def test_a_receiver_that_raises_lets_the_sender_finish_and_then_reports(channel):
    process, handle = channel("raise")
    send(handle, tensors())
    assert result(process) == ["ValueError", "the second bucket does not load"]


def test_a_sender_notices_that_its_receiver_died(channel):
    process, handle = channel("die")
    gone: list[float] = []

    def ended() -> str | None:
        if process.poll() is None:
            return None
        gone.append(time.monotonic())
        return "the engine process ended"

    with pytest.raises(RefitError, match="the engine process ended"):
        send(handle, tensors(), receiver_ended=ended)
    assert time.monotonic() - gone[0] < 5


def test_a_sender_gives_up_on_a_silent_receiver_and_names_the_key(monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    with pytest.raises(RefitError, match=r"silent for 1 s.*flashrl\.update_timeout_s"):
        send(f"ipc:///tmp/flashrl-test-{uuid.uuid4().hex}.sock", tensors(), timeout_s=1)


def test_a_receiver_gives_up_on_a_sender_that_stops(channel):
    process, handle = channel("load", timeout_s=10.0)

    def broken():
        yield from tensors()[:6]
        raise KeyboardInterrupt("the trainer was interrupted")

    with pytest.raises(KeyboardInterrupt):
        send(handle, broken())
    kind, message = result(process)
    assert kind == "RefitError" and "flashrl.update_timeout_s" in message
