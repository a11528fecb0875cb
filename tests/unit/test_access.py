# SPDX-License-Identifier: Apache-2.0
"""vLLM's real HTTP application, without an engine behind it: nobody gets past it without the key, on any route."""

import contextlib
import importlib
import socket
import threading

import pytest
from starlette.routing import WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from vllm.entrypoints.openai.api_server import build_app
from vllm.utils.argparse_utils import FlexibleArgumentParser

from flashrl_verl.errors import FlashRLError
from flashrl_verl.rollout import access

for part in ("launchers", "common", "openai"):  # vLLM 0.31, 0.29, and before
    with contextlib.suppress(ModuleNotFoundError):
        make_arg_parser = importlib.import_module(f"vllm.entrypoints.{part}.cli_args").make_arg_parser
        break

TASKS = ("generate", "transcription", "realtime", "render")
"""More than verl's engines do, for the sake of the routes."""

OUTSIDERS = {
    "no key": {},
    "an empty one": {"Authorization": "Bearer "},
    "another one": {"Authorization": "Bearer x"},
    "half of it": {"Authorization": f"Bearer {access.server_key()[:-1]}"},
    "another scheme": {"Authorization": f"Basic {access.server_key()}"},
    "another header": {"X-Api-Key": access.server_key()},
    "bytes that are no text": {"Authorization": b"Bearer \xff\xfe"},
}
KEY = {"Authorization": f"Bearer {access.server_key()}"}


@pytest.fixture(scope="module")
def app():
    """As verl builds it, with vLLM's developer mode, in which /collective_rpc calls any method of the workers."""
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_SERVER_DEV_MODE", "1")
    patch.setenv("VLLM_API_KEY", "a key of vLLM's from the environment")
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    access.require_key(args)
    yield build_app(args, supported_tasks=TASKS)
    patch.undo()


def test_no_route_answers_an_outsider(app):
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
        answer = client.request(method, path)
        assert answer.status_code == 401, (method, path)
        assert access.server_key() not in answer.text


@pytest.mark.parametrize("outsider", OUTSIDERS)
def test_what_is_not_the_key_does_not_pass_for_it(app, outsider):
    for path in ("/v1/models", "/version", "/openapi.json"):
        assert TestClient(app).get(path, headers=OUTSIDERS[outsider]).status_code == 401, path


def test_whoever_has_the_key_gets_in_below_v1_and_beside_it(app):
    client = TestClient(app, raise_server_exceptions=False)
    for path in ("/version", "/openapi.json"):
        assert client.get(path, headers=KEY).status_code == 200, path
    assert client.get("/version", headers={"Authorization": f"bearer {access.server_key()}"}).status_code == 200
    assert client.get("/nowhere", headers=KEY).status_code == 404
    assert client.get("/v1/models", headers=KEY).status_code == 500, (
        "there is no engine, but vLLM's own check let it pass"
    )


def test_no_websocket_opens_for_an_outsider(app):
    sockets = [route.path for route in app.routes if isinstance(route, WebSocketRoute)]
    assert sockets
    for path in sockets:
        with pytest.raises(WebSocketDisconnect) as closed, TestClient(app).websocket_connect(path):
            pass
        assert closed.value.code == 1008


def test_a_server_that_answers_an_outsider_or_nobody_is_one_error_that_says_which():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer_one():
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        threading.Thread(target=answer_one, daemon=True).start()
        with pytest.raises(FlashRLError, match=f"127.0.0.1:{port} answers 200 to GET /health without its key"):
            access.verify_refusal("127.0.0.1", port)
    with pytest.raises(FlashRLError, match=f"127.0.0.1:{port} gives no answer.*ConnectionRefusedError"):
        access.verify_refusal("127.0.0.1", port)


def test_every_replica_has_a_loopback_address_of_its_own():
    addresses = {access.loopback_address(rank) for rank in range(300)}
    assert len(addresses) == 300 and all(address.startswith("127.") for address in addresses)
    assert access.base_url("fd00::1", 80) == "http://[fd00::1]:80"
