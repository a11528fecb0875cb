# SPDX-License-Identifier: Apache-2.0
"""vLLM's real HTTP application, without an engine behind it: nobody gets past it without the key, on any route."""

import socket
import threading

import pytest
from starlette.routing import WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from flashrl_verl.errors import FlashRLError
from flashrl_verl.rollout import access

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


def requests_of(app) -> list[tuple[str, str]]:
    """(method, path) of every HTTP route, and of what is no route."""
    known = [
        (method, route.path.replace("{", "").replace("}", ""))
        for route in app.routes
        for method in sorted(getattr(route, "methods", None) or ())
    ]
    return [*known, ("GET", "/nowhere"), ("OPTIONS", "/v1/models"), ("TRACE", "/"), ("GET", "//v1/models")]


def test_no_route_answers_an_outsider(app):
    client = TestClient(app)
    asked = requests_of(app)
    paths = {path for _, path in asked}
    assert len(asked) > 40
    expected = {
        "/health",
        "/metrics",
        "/tokenize",
        "/invocations",
        "/collective_rpc",
        "/v1/completions",
        "/openapi.json",
    }
    assert expected <= paths, "the routes are those of a whole server"
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


@pytest.mark.parametrize("answer", [b"", b"no HTTP at all\r\n\r\n"])
def test_a_server_that_does_not_answer_in_http_is_one_error_that_says_which(answer):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer_one():
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        threading.Thread(target=answer_one, daemon=True).start()
        with pytest.raises(FlashRLError, match=f"http://127.0.0.1:{port} gives no answer to GET /health"):
            access.verify_refusal("127.0.0.1", port)
    with pytest.raises(FlashRLError, match=f"127.0.0.1:{port} gives no answer.*ConnectionRefusedError"):
        access.verify_refusal("127.0.0.1", port)


def test_every_replica_has_a_loopback_address_of_its_own():
    addresses = [access.loopback_address(rank) for rank in range(300)]
    assert addresses[:2] == ["127.0.0.1", "127.0.0.2"] and len(set(addresses)) == 300
    assert all(address.startswith("127.") for address in addresses)


@pytest.mark.parametrize("address, url", [("10.0.0.1", "http://10.0.0.1:80"), ("fd00::1", "http://[fd00::1]:80")])
def test_urls_hold_both_kinds_of_address(address, url):
    assert access.base_url(address, 80) == url
