# SPDX-License-Identifier: Apache-2.0
"""A rollout's HTTP server answers nobody, and only its own machine reaches it.

verl starts vLLM's HTTP server with every engine, on the node's address and without a key, although the trainer speaks
to its engines through Ray alone: whoever reaches the port could sample from the policy, or make the training wait.
vLLM's own ``--api-key`` guards the routes below /v1 and a few other prefixes, and leaves the rest open (/invocations,
which samples too, /tokenize, /metrics, /scale_elastic_ep, and /collective_rpc in its developer mode).
"""

import argparse
import http.client
import ipaddress

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from flashrl_verl.errors import FlashRLError

_ROUTE = "/health"
"""What a server that has started is asked for: vLLM's own key leaves it open, and ours is around all routes."""

_PROBE_TIMEOUT_S = 60
"""How long a server may take to answer such a question, seconds; the engine has just started, and its host may be
busy."""


class RefuseRequests:
    """ASGI middleware that answers 403 on every route.

    vLLM imports it by its name (``--middleware``) and gives it the application; it is the outermost layer of those that
    vLLM has.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":  # uvicorn's own, no request
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # on purpose (RFC 6455, section 7.4.1)
        else:
            await JSONResponse({"error": "a rollout answers its trainer alone"}, status_code=403)(scope, receive, send)


def refuse_requests(args: argparse.Namespace) -> None:
    """Have vLLM's application answer nobody.

    Args:
        args: vLLM's parsed server arguments, before ``build_app``.
    """
    args.middleware = [*args.middleware, f"{RefuseRequests.__module__}.{RefuseRequests.__qualname__}"]


def loopback_address(replica_rank: int) -> str:
    """An address that only its own machine reaches: 127.0.0.1 for the first replica, the next ones of 127.0.0.0/8 for
    others.

    verl's load balancer tells replicas apart by address and port. On one shared address, servers on two nodes could
    have the same port, and one of the two replicas would get no requests.
    """
    return str(ipaddress.IPv4Address("127.0.0.1") + replica_rank)


def verify_refusal(address: str, port: int) -> None:
    """Ask a running server.

    Raises:
        FlashRLError: it answers, or says nothing at all.
    """
    server = f"the rollout's HTTP server at http://{address}:{port}"
    connection = http.client.HTTPConnection(address, port, timeout=_PROBE_TIMEOUT_S)  # takes no notice of proxies
    try:
        connection.request("GET", _ROUTE)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise FlashRLError(
            f"{server} says nothing to GET {_ROUTE}, so that it is not known whether it refuses requests: "
            f"{type(error).__name__}: {error}. Its own log says why"
        ) from error
    finally:
        connection.close()
    if status != 403:
        raise FlashRLError(
            f"{server} answers {status} to GET {_ROUTE} and not 403: this vLLM does not run flashrl_verl's "
            "middleware; look for another one under actor_rollout_ref.rollout.engine_kwargs.vllm, and check "
            "`flashrl version`"
        )
