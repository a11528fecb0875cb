# SPDX-License-Identifier: Apache-2.0
"""Weight transfer over verl's real ZMQ socket and shared memory: a sender that stops leaves no receiver waiting. What a
sender does without its receiver is in test_failures.py."""

import asyncio
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from flashrl_verl.errors import RefitError
from flashrl_verl.refit.transfer import WatchedReceiver, WatchedSender

G = torch.Generator().manual_seed(1)
TENSORS = [(f"t{i}", torch.randn(256, 512, generator=G).bfloat16()) for i in range(12)]
"""3 MB: four buckets."""


def test_a_receiver_gives_up_on_a_sender_that_stops():
    both = dict(zmq_handle=f"ipc:///tmp/flashrl-test-{uuid.uuid4().hex}.sock", use_shm=True)
    sender = WatchedSender(timeout_s=200.0, receiver_ended=lambda: None, bucket_size_mb=1, **both)
    receiver = WatchedReceiver(timeout_s=2.0, device=torch.device("cpu"), **both)

    def broken():
        yield from TENSORS[:6]
        raise OSError("the trainer failed")

    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(receiver.receive_weights, on_bucket_received=lambda weights, is_last: None)
        with pytest.raises(OSError, match="the trainer failed"):
            asyncio.run(sender.async_send_weights(broken()))
    with pytest.raises(RefitError, match=r"flashrl\.update_timeout_s"):
        received.result()
