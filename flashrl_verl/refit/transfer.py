# SPDX-License-Identifier: Apache-2.0
"""verl's bucketed weight transfer, with both ends unable to wait for ever.

Upstream (``verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py``) an exception in the receiver's callback
leaves the sender in ``recv()`` for good, and a dead sender leaves the receiver there. Here the receiver drains every
bucket whatever happens to it, and each end watches the other.
"""

import logging
import time
import traceback
from collections.abc import Callable

import ray
import torch
import zmq
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import (
    BucketedWeightReceiver,
    BucketedWeightSender,
)

from flashrl_verl.errors import RefitError

logger = logging.getLogger(__name__)

_POLL_MS = 200
"""How often a waiting sender looks whether its receiver is still there, milliseconds."""


_LINGER_MS = 5000
"""How long a closed socket may still deliver what was sent on it, milliseconds."""


def socket_scope() -> str:
    """What makes a weight socket's path belong to one job on one machine: the Ray job id and the start of the Ray node
    id.

    verl uses the job id alone, which is 01000000 in every Ray cluster that a driver starts for itself: two runs on one
    machine would take each other's weights.
    """
    context = ray.get_runtime_context()
    return f"{context.get_job_id()}-{context.get_node_id()[:16]}"


class _WatchedSocket:
    """A ZMQ REQ/REP socket whose blocking calls end with an error after ``timeout_s`` or when ``peer_gone`` says so."""

    def __init__(self, socket: zmq.Socket, timeout_s: float, peer_gone: Callable[[], str | None], key: str):
        self._socket, self._timeout_s, self._peer_gone, self._key = socket, timeout_s, peer_gone, key
        # The receiver closes right after its last acknowledgement: 0 would throw that away, -1 (ZMQ's default) would
        # wait for a peer that is gone.
        socket.setsockopt(zmq.LINGER, _LINGER_MS)

    def _wait(self, event: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not self._socket.poll(_POLL_MS, event):
            reason = self._peer_gone()
            if reason:
                raise RefitError(reason)
            if time.monotonic() > deadline:
                raise RefitError(
                    f"the other side of the weight update was silent for {self._timeout_s:g} s; if it is only slow, "
                    f"raise {self._key}, else its own log says why it stopped"
                )

    def recv(self, *args, **kwargs):
        self._wait(zmq.POLLIN)
        return self._socket.recv(*args, **kwargs)

    def recv_pyobj(self, *args, **kwargs):
        self._wait(zmq.POLLIN)
        return self._socket.recv_pyobj(*args, **kwargs)

    def send(self, *args, **kwargs):
        self._wait(zmq.POLLOUT)
        return self._socket.send(*args, **kwargs)

    def send_pyobj(self, *args, **kwargs):
        self._wait(zmq.POLLOUT)
        return self._socket.send_pyobj(*args, **kwargs)

    def close(self) -> None:
        self._socket.close()


TIMEOUT_KEY = "flashrl.update_timeout_s"


class WatchedSender(BucketedWeightSender):
    """Trainer side.

    Args:
        timeout_s: longest silence of the receiver, seconds.
        receiver_ended: returns why the receiver can no longer answer, or None while it can.
        **kwargs: verl's ``BucketedWeightSender`` arguments.
    """

    def __init__(self, *, timeout_s: float, receiver_ended: Callable[[], str | None], **kwargs):
        super().__init__(**kwargs)
        self._timeout_s, self._receiver_ended = timeout_s, receiver_ended

    def _init_socket(self) -> None:
        super()._init_socket()
        self.socket = _WatchedSocket(self.socket, self._timeout_s, self._receiver_ended, TIMEOUT_KEY)

    def _cleanup(self) -> None:
        try:
            super()._cleanup()
        except FileNotFoundError:
            # A receiver that died took the shared-memory segment with it (its resource tracker unlinks what the process
            # had attached); that must not hide the error that is on its way.
            self.shm = None


class DrainingReceiver(BucketedWeightReceiver):
    """Engine side: acknowledges every bucket, even after loading one failed.

    Args:
        timeout_s: longest silence of the sender, seconds.
        **kwargs: verl's ``BucketedWeightReceiver`` arguments.
    """

    def __init__(self, *, timeout_s: float, **kwargs):
        super().__init__(**kwargs)
        self._timeout_s = timeout_s

    def _init_socket(self) -> None:
        super()._init_socket()
        self.socket = _WatchedSocket(self.socket, self._timeout_s, lambda: None, TIMEOUT_KEY)

    def drain(self, load: Callable[[list[tuple[str, torch.Tensor]]], None]) -> None:
        """Receive all buckets; raise the first exception of ``load`` only after the last bucket is acknowledged."""
        failure: list[Exception] = []

        def on_bucket(weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
            if failure:
                return
            try:
                load(weights)
            except Exception as error:  # noqa: BLE001 - reported below, once the sender is free
                # Its traceback would keep this bucket's tensors alive, in a log handler's record too, and shared memory
                # cannot be closed (nor CUDA IPC memory returned) under them: upstream's clean-up would then fail before
                # the last acknowledgement.
                logger.error("loading a bucket failed\n%s", traceback.format_exc())
                error.__traceback__ = error.__context__ = error.__cause__ = None
                failure.append(error)

        self.receive_weights(on_bucket_received=on_bucket)
        if failure:
            raise failure[0]
