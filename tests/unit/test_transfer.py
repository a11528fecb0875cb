# SPDX-License-Identifier: Apache-2.0
"""Weight transfer over verl's real ZMQ socket and shared memory: whatever one side does, the other ends."""

import asyncio
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import engines  # noqa: F401 - chooses verl's platform, which verl reads once
import pytest
import torch

from flashrl_verl.errors import RefitError
from flashrl_verl.refit.transfer import WatchedReceiver, WatchedSender

G = torch.Generator().manual_seed(1)
TENSORS = [(f"t{i}", torch.randn(256, 512, generator=G).bfloat16()) for i in range(12)]
"""3 MB: four buckets."""


@pytest.fixture
def handle():
    return f"ipc:///tmp/flashrl-test-{uuid.uuid4().hex}.sock"


def send(handle: str, weights, timeout_s: float = 200.0, receiver_ended=lambda: None) -> None:
    sender = WatchedSender(
        timeout_s=timeout_s, receiver_ended=receiver_ended, zmq_handle=handle, bucket_size_mb=1, use_shm=True
    )
    asyncio.run(sender.async_send_weights(iter(weights)))


def receive(handle: str, load, timeout_s: float = 200.0) -> None:
    device = torch.device("cpu")
    receiver = WatchedReceiver(zmq_handle=handle, device=device, use_shm=True, timeout_s=timeout_s)
    receiver.receive_weights(on_bucket_received=lambda weights, is_last: load(weights))


def test_a_receiver_gives_up_on_a_sender_that_stops(handle):
    def broken():
        yield from TENSORS[:6]
        raise OSError("the trainer failed")

    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(receive, handle, lambda weights: None, timeout_s=2.0)
        with pytest.raises(OSError, match="the trainer failed"):
            send(handle, broken())
    with pytest.raises(RefitError, match=r"flashrl\.update_timeout_s"):
        received.result()


DIES = """
import os, sys, torch
from flashrl_verl.refit.transfer import WatchedReceiver

receiver = WatchedReceiver(zmq_handle=sys.argv[1], device=torch.device("cpu"), use_shm=True, timeout_s=200.0)
receiver.receive_weights(on_bucket_received=lambda weights, is_last: os._exit(9))
"""


def test_a_sender_notices_that_its_receiver_died(handle):
    """The dead process takes the shared memory with it, which must not hide the reason."""
    process = subprocess.Popen([sys.executable, "-c", DIES, handle], stderr=subprocess.DEVNULL)

    def ended() -> str | None:
        if process.poll() is None:
            return None
        time.sleep(1)  # until its resource tracker has unlinked the memory
        return "the engine process ended"

    try:
        with pytest.raises(RefitError, match="the engine process ended"):
            send(handle, TENSORS, receiver_ended=ended)
        assert process.returncode == 9
    finally:
        process.kill()
        process.wait()
