# SPDX-License-Identifier: Apache-2.0
"""verl's bucketed weight transfer, with both ends unable to wait for ever.

Upstream (``verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py``) an exception in the receiver's callback
leaves the sender in ``recv()`` for good, and a dead sender leaves the receiver there. Here each end watches the other,
and the callback (``load.py``) raises nothing.
"""

import time
from collections.abc import Callable

import ray
import zmq
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import (
    BucketedWeightReceiver,
    BucketedWeightSender,
)

from flashrl_verl.errors import RefitError

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


TIMEOUT_KEY = "flashrl.update_timeout_s"


class _WatchedSocket:
    """A ZMQ REQ/REP socket whose blocking calls end with an error after ``timeout_s`` or when ``peer_gone`` says so."""

    def __init__(self, socket: zmq.Socket, timeout_s: float, peer_gone: Callable[[], str | None]):
        self._socket, self._timeout_s, self._peer_gone = socket, timeout_s, peer_gone
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
                    f"raise {TIMEOUT_KEY}, else its own log says why it stopped"
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
        self.socket = _WatchedSocket(self.socket, self._timeout_s, self._receiver_ended)

    def _cleanup(self) -> None:
        try:
            super()._cleanup()
        except FileNotFoundError:
            # A receiver that died took the shared-memory segment with it (its resource tracker unlinks what the process
            # had attached); that must not hide the error that is on its way.
            self.shm = None


class WatchedReceiver(BucketedWeightReceiver):
    """Engine side.

    Args:
        timeout_s: longest silence of the sender, seconds.
        **kwargs: verl's ``BucketedWeightReceiver`` arguments.
    """

    def __init__(self, *, timeout_s: float, **kwargs):
        super().__init__(**kwargs)
        self._timeout_s = timeout_s

    def _init_socket(self) -> None:
        super()._init_socket()
        self.socket = _WatchedSocket(self.socket, self._timeout_s, lambda: None)
