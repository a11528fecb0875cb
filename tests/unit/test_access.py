# SPDX-License-Identifier: Apache-2.0
"""vLLM's real HTTP application, without an engine behind it: it answers nobody, on any route."""

import contextlib
import importlib

import pytest
from starlette.routing import WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from vllm.entrypoints.openai.api_server import build_app
from vllm.utils.argparse_utils import FlexibleArgumentParser

from flashrl_verl.rollout import access

for part in ("launchers", "common", "openai"):  # vLLM 0.31, 0.29, and before
    with contextlib.suppress(ModuleNotFoundError):
        make_arg_parser = importlib.import_module(f"vllm.entrypoints.{part}.cli_args").make_arg_parser
        break

TASKS = ("generate", "transcription", "realtime", "render")
"""More than verl's engines do, for the sake of the routes."""


@pytest.fixture(scope="module")
def app():
    """As verl builds it, with vLLM's developer mode, in which /collective_rpc calls any method of the workers."""
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_SERVER_DEV_MODE", "1")
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    access.refuse_requests(args)
    yield build_app(args, supported_tasks=TASKS)
    patch.undo()


def test_no_route_answers(app):
    client = TestClient(app)
    asked = [
        (method, route.path.replace("{", "").replace("}", ""))
        for route in app.routes
        for method in sorted(getattr(route, "methods", None) or ())
    ]
    assert len(asked) > 40, "the routes are those of a whole server"
    assert {"/health", "/metrics", "/invocations", "/collective_rpc", "/v1/completions"} <= {path for _, path in asked}
    asked += [("GET", "/nowhere"), ("OPTIONS", "/v1/models"), ("TRACE", "/"), ("GET", "//v1/models")]
    for method, path in asked:
        assert client.request(method, path).status_code == 403, (method, path)


def test_no_websocket_opens(app):
    sockets = [route.path for route in app.routes if isinstance(route, WebSocketRoute)]
    assert sockets
    for path in sockets:
        with pytest.raises(WebSocketDisconnect) as closed, TestClient(app).websocket_connect(path):
            pass
        assert closed.value.code == 1008


def test_every_replica_has_a_loopback_address_of_its_own():
    addresses = {access.loopback_address(rank) for rank in range(300)}
    assert len(addresses) == 300 and all(address.startswith("127.") for address in addresses)
