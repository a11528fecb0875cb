# SPDX-License-Identifier: Apache-2.0
"""Who may ask a rollout's HTTP server: whoever knows its key and, by default, is on its machine.

verl starts vLLM's HTTP server with every engine, on the node's address and without a key, although the trainer speaks
to its engines through Ray alone: whoever reaches the port could sample from the policy, or make the training wait.
vLLM's own ``--api-key`` guards the routes below /v1 and a few other prefixes, and leaves the rest open (/invocations,
which samples too, /tokenize, /metrics, /scale_elastic_ep, and /collective_rpc in its developer mode). Here a key that
exists in no file and on no command line guards all of them.
"""

import argparse
import functools
import http.client
import ipaddress
import secrets

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from flashrl_verl.errors import FlashRLError

_ROUTE = "/health"
"""What a server that has started is asked for: vLLM's own key leaves it open, and ours is around all routes."""

_PROBE_TIMEOUT_S = 60
"""How long a server may take to answer such a question, seconds; the engine has just started, and its host may be
busy."""


@functools.cache
def server_key() -> str:
    """The key of this process's server: random, made at the first call, and known to nobody until it is asked for."""
    return secrets.token_urlsafe(32)  # 256 bits cannot be guessed


class RequireKey:
    """ASGI middleware that answers 401 to whatever does not bring ``Authorization: Bearer <key>``, on every route.

    vLLM imports it by its name (``--middleware``) and gives it the application; it is the outermost layer of those that
    vLLM has, so that routes, CORS and vLLM's own checks see only who is allowed in.
    """

    def __init__(self, app: ASGIApp):
        self._app = app
        self._key = server_key().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._has_key(scope):  # lifespan is uvicorn's own, no request
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # on purpose (RFC 6455, section 7.4.1)
        else:
            refusal = JSONResponse({"error": "Unauthorized"}, status_code=401, headers={"WWW-Authenticate": "Bearer"})
            await refusal(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            scheme, _, token = value.partition(b" ")
            if name == b"authorization" and scheme.lower() == b"bearer" and secrets.compare_digest(token, self._key):
                return True
        return False


def require_key(args: argparse.Namespace) -> None:
    """Have vLLM's application ask for the key of this process.

    Args:
        args: vLLM's parsed server arguments, before ``build_app``. They stay in this process.
    """
    args.middleware = [*args.middleware, f"{RequireKey.__module__}.{RequireKey.__qualname__}"]
    # vLLM's own check, below /v1, reads the same header: a VLLM_API_KEY in the environment would ask for another key
    # there.
    args.api_key = [server_key()]


def loopback_address(replica_rank: int) -> str:
    """An address that only its own machine reaches: 127.0.0.1 for the first replica, the next ones of 127.0.0.0/8 for
    others.

    verl's load balancer tells replicas apart by address and port. On one shared address, servers on two nodes could
    have the same port, and one of the two replicas would get no requests.
    """
    return str(ipaddress.IPv4Address("127.0.0.1") + replica_rank)


def base_url(address: str, port: int) -> str:
    """``http://address:port``, with IPv6 in brackets."""
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def verify_refusal(address: str, port: int) -> None:
    """Ask a running server as an outsider, and once with the key of this process.

    Raises:
        FlashRLError: it answers somebody without its key, refuses the key, or does not answer.
    """
    status = _status(address, port, {})
    if status != 401:
        raise FlashRLError(
            f"the rollout's HTTP server at {base_url(address, port)} answers {status} to GET {_ROUTE} without its "
            "key: this vLLM does not run flashrl_verl's middleware; check `flashrl version`"
        )
    status = _status(address, port, {"Authorization": f"Bearer {server_key()}"})
    if status != 200:
        raise FlashRLError(
            f"the rollout's HTTP server at {base_url(address, port)} answers {status} to GET {_ROUTE} with its own "
            "key; look for a middleware under actor_rollout_ref.rollout.engine_kwargs.vllm, and check `flashrl version`"
        )


def _status(address: str, port: int, headers: dict[str, str]) -> int:
    connection = http.client.HTTPConnection(address, port, timeout=_PROBE_TIMEOUT_S)  # takes no notice of proxies
    try:
        connection.request("GET", _ROUTE, headers=headers)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise FlashRLError(
            f"the rollout's HTTP server at {base_url(address, port)} gives no answer to GET {_ROUTE}, so that it is "
            f"not known whether it asks for its key: {type(error).__name__}: {error}. Its own log says why; an address "
            "that this machine does not reach is changed by flashrl.server_address=loopback"
        ) from error
    finally:
        connection.close()
