# SPDX-License-Identifier: Apache-2.0
"""A rollout's HTTP server answers nobody, and only its own machine reaches it.

verl starts vLLM's HTTP server with every engine, on the node's address and without a key, although the trainer speaks
to its engines through Ray alone: whoever reaches the port could sample from the policy, or make the training wait.
vLLM's own ``--api-key`` guards the routes below /v1 and a few other prefixes, and leaves the rest open (/invocations,
which samples too, /tokenize, /metrics, /scale_elastic_ep, and /collective_rpc in its developer mode).
"""

import argparse
import ipaddress

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send


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
