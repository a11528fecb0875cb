# SPDX-License-Identifier: Apache-2.0
"""Look at a rollout server while a run is using it: as anybody on the machine, and as somebody whom Ray tells the key.

    python outsider.py <log of the run> <process id of the run>

Start it with the run: what Ray hands out has to be unpickled, and vLLM's import takes longer than a short run has left.

Writes one JSON object: where the port listens, the server's address and key, the status of a request with the key, and
in which command lines the key stands.
"""

import http.client
import json
import os
import re
import sys
import time
from pathlib import Path

import psutil


def status(port: int, key: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
    return connection.getresponse().status


def listens_at(port: int) -> list[str]:
    sockets = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port]
    return sorted({c.laddr.ip for c in sockets})


def command_lines_with(text: str) -> list[str]:
    processes = psutil.process_iter(["cmdline"])
    return [line for process in processes if text in (line := " ".join(process.info["cmdline"] or ()))]


def cluster_of(process: int) -> str:
    """Address of the Ray cluster that a run started; Ray's own "auto" takes whichever started last on this machine."""
    words = [word for child in psutil.Process(process).children(recursive=True) for word in child.cmdline()]
    return next(word.removeprefix("--gcs-address=") for word in words if word.startswith("--gcs-address="))


def main(log: str, process: str) -> dict:
    os.environ["RAY_AUTH_MODE"] = "token"  # a run's own Ray asks for the token that lies in its user's ~/.ray
    import ray

    import flashrl_verl.rollout.server  # noqa: F401 - what the actor's handle is unpickled with

    # Whoever waits for this program ends the wait.
    while not (found := re.search(r"LLMServerManager: \['[\d.]+:(\d+)'", Path(log).read_text(errors="replace"))):
        time.sleep(0.5)
    port = int(found[1])
    ray.init(address=cluster_of(int(process)), log_to_driver=False, logging_level="ERROR")
    [server] = [a for a in ray.util.list_named_actors(all_namespaces=True) if a["name"] == "flashrl_server_0_0"]
    url, key = ray.get(ray.get_actor(**server).flashrl_http_access.remote())
    told = {"listens_at": listens_at(port), "url": url, "key": key}
    return told | {"with_key": status(port, key), "command_lines": command_lines_with(key)}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
