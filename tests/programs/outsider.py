# SPDX-License-Identifier: Apache-2.0
"""Ask a rollout server while a run is using it: as anybody on the machine, and then as somebody whom Ray tells the key.

    python outsider.py <log of the run> <process id of the run>

Start it with the run: what Ray hands out has to be unpickled, and vLLM's import takes longer than a short run has left.

Writes one JSON object: HTTP statuses by route, where the port listens, whether the node's address takes a connection,
and in which command lines the key stands.
"""

import http.client
import json
import os
import re
import socket
import sys
import time
from pathlib import Path

import psutil

GETS = ("/health", "/v1/models", "/metrics", "/version", "/openapi.json")
POSTS = {
    "/v1/completions": {"prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0},
    "/tokenize": {"prompt": "1 + 1"},
    "/invocations": {"prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0},
}


def statuses(host: str, port: int, headers: dict[str, str]) -> dict[str, int]:
    """Route -> status."""
    told = {}
    for route, body in {**dict.fromkeys(GETS), **POSTS}.items():
        connection = http.client.HTTPConnection(host, port, timeout=120)
        content = {} if body is None else {"Content-Type": "application/json"}
        connection.request("GET" if body is None else "POST", route, body and json.dumps(body), headers | content)
        told[route] = connection.getresponse().status
        connection.close()
    return told


def node_address() -> str | None:
    """The address other machines know this one by, None where it has none but loopback."""
    found = {a.address for them in psutil.net_if_addrs().values() for a in them if a.family == socket.AF_INET}
    return next((address for address in sorted(found) if not address.startswith("127.")), None)


def takes_connections(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=10).close()
    except ConnectionRefusedError:
        return False
    return True


def listens_at(port: int) -> list[str]:
    sockets = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port]
    return sorted({c.laddr.ip for c in sockets})


def command_lines_with(text: str) -> list[str]:
    return [str(file) for file in Path("/proc").glob("[0-9]*/cmdline") if text.encode() in _read(file)]


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # the process has ended
        return b""


def cluster_of(process: int) -> str:
    """Address of the Ray cluster that a run started; Ray's own "auto" takes whichever started last on this machine."""
    words = [word for child in psutil.Process(process).children(recursive=True) for word in child.cmdline()]
    return next(word.removeprefix("--gcs-address=") for word in words if word.startswith("--gcs-address="))


def first_server(log: Path) -> tuple[str, int]:
    """Host and port, as soon as verl has logged them; whoever waits for this program ends the wait."""
    while not (found := re.search(r"LLMServerManager: \['([\d.]+):(\d+)'", log.read_text(errors="replace"))):
        time.sleep(0.5)
    return found[1], int(found[2])


def main(log: str, process: str) -> dict:
    os.environ["RAY_AUTH_MODE"] = "token"  # a run's own Ray asks for the token that lies in its user's ~/.ray
    import ray

    import flashrl_verl.rollout.server  # noqa: F401 - what the actor's handle is unpickled with

    (host, port), node = first_server(Path(log)), node_address()
    told = {
        "without": statuses(host, port, {}),
        "guessed": statuses(host, port, {"Authorization": "Bearer x"}),
        "listens_at": listens_at(port),
        "node": node,
        "node_takes_connections": node is not None and takes_connections(node, port),
    }
    ray.init(address=cluster_of(int(process)), log_to_driver=False, logging_level="ERROR")
    servers = [
        actor for actor in ray.util.list_named_actors(all_namespaces=True) if actor["name"] == "flashrl_server_0_0"
    ]
    url, key = ray.get(ray.get_actor(**servers[0]).flashrl_http_access.remote())
    headers = {"Authorization": f"Bearer {key}"}
    return {
        **told,
        "url": url,
        "key": key,
        "with": statuses(host, port, headers),
        "command_lines": command_lines_with(key),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
