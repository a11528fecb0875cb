# SPDX-License-Identifier: Apache-2.0
"""Sockets that a run opens on this machine: loopback, the node's own address, named interfaces, and proxies in
between."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator, Mapping

from flashrl_verl.rollout.access import loopback_address
from flashrl_verl.tools.check.findings import Finding, fail, ok, warn

_CONNECT_S = 10.0
"""How long a connection to this very machine may take, seconds: it takes microseconds unless a firewall drops it."""

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that name the network interfaces of gloo and NCCL."""


def check_loopback(replicas: int) -> Iterator[Finding]:
    """The engines' servers listen on 127.0.0.1 and the addresses after it, one a replica.

    Args:
        replicas: of the rollout on this machine, at most one a GPU.
    """
    last = loopback_address(max(replicas, 1) - 1)
    for address in dict.fromkeys((loopback_address(0), last)):
        if error := _cannot_talk(address):
            remedy = "bring the loopback interface up (ip link set lo up); a firewall must leave 127.0.0.0/8 alone"
            yield fail("loopback", f"{address}: {error}; the engines' servers listen there", remedy)
            return
    yield ok("loopback", "127.0.0.1" if last == "127.0.0.1" else f"127.0.0.1 to {last}")


def check_node_address(address: str) -> Iterator[Finding]:
    """Ray, TransferQueue and torch.distributed listen on the node's address and call it from the node itself.

    Args:
        address: of this node, as Ray has it.
    """
    remedy = (
        "another address of this machine: ray start --node-ip-address=<address>; a firewall or a VPN that drops a "
        "machine's connections to itself"
    )
    if error := _cannot_talk(address):
        yield fail("node address", f"{address}: {error}", remedy)
    else:
        yield ok("node address", f"{address} can be reached from here")


def _cannot_talk(address: str) -> str | None:
    """Why nothing can listen at an address and be reached there from this machine; None if it can."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as listener:
            listener.bind((address, 0))
            listener.listen(1)
            with socket.create_connection(listener.getsockname()[:2], timeout=_CONNECT_S):
                return None
    except OSError as error:
        return f"{type(error).__name__}: {error}"


def check_host_name(host: str, address: str | None) -> Iterator[Finding]:
    """gloo listens on the address of the host's name.

    Args:
        host: this machine's name.
        address: of this node in its Ray cluster; None where there is none yet.
    """
    name, local = "host name", address is None or address.startswith("127.")
    remedy = "an entry of this name in /etc/hosts, or the interface by its name: GLOO_SOCKET_IFNAME=<interface>"
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except OSError as error:
        yield warn(
            name, f"{host} has no address ({error}): gloo takes loopback, which other nodes do not reach", remedy
        )
        return
    if all(_cannot_talk(address) for address in addresses):
        yield warn(name, f"{host} is {', '.join(addresses)}, which is not this machine: gloo takes loopback", remedy)
    elif not local and all(a.startswith("127.") or a == "::1" for a in addresses):
        text = f"{host} is {', '.join(addresses)}: gloo listens there, which other nodes do not reach"
        yield warn(
            name,
            text,
            "GLOO_SOCKET_IFNAME=<interface of the node's address> in the environment of this node's `ray start`",
        )
    else:
        yield ok(name, f"{host} is {', '.join(addresses)}")


def check_interfaces(environment: Mapping[str, str]) -> Iterator[Finding]:
    """The interfaces that gloo and NCCL are told to use exist.

    Args:
        environment: variables of the process.
    """
    there = [name for _, name in socket.if_nameindex()]
    told = [(variable, environment[variable]) for variable in INTERFACES if environment.get(variable)]
    wrong = False
    for variable, value in told:
        if not _matches(variable, value, there):
            wrong = True
            text = f"{variable}={value}, but this machine has {', '.join(there)}"
            yield fail(
                "network interface", text, f"{variable}=<one of them> in the environment of this node's `ray start`"
            )
    if told and not wrong:
        yield ok("network interface", ", ".join(f"{variable}={value}" for variable, value in told))


def _matches(variable: str, value: str, there: list[str]) -> bool:
    """gloo takes exact names; NCCL takes prefixes, exact names behind ``=``, and what is not to be used behind
    ``^``."""
    if variable.startswith("GLOO"):
        return all(name in there for name in value.split(","))
    names, exact = value.lstrip("^=").split(","), "=" in value[:2]
    hit = [name for name in there if any(name == n if exact else name.startswith(n) for n in names)]
    return len(hit) < len(there) if value.startswith("^") else bool(hit)


def check_proxy(environment: Mapping[str, str], address: str) -> Iterator[Finding]:
    """A proxy must not stand between a machine and itself.

    verl's and FlashRL's own calls (aiohttp, http.client, gRPC, ZMQ) take no notice of proxies. requests and httpx do:
    `ray job submit` and an OpenAI client of the engines' servers would ask the proxy for this machine's loopback.

    Args:
        environment: variables of the process.
        address: of this node.
    """
    variables = [name for name in environment if name.lower() in ("http_proxy", "all_proxy") and environment[name]]
    if not variables:
        yield ok("proxy", "none for HTTP")
        return
    proxies = {"no": environment.get("no_proxy") or environment.get("NO_PROXY") or ""}
    through = [host for host in ("127.0.0.1", "localhost", address) if not _bypassed(host, proxies)]
    if through:
        text = (
            f"{variables[0]} is set, and requests to {', '.join(through)} go there: `ray job submit` and HTTP clients "
            "fail"
        )
        yield warn("proxy", text, f"export no_proxy=localhost,127.0.0.1,{address}")
    else:
        yield ok("proxy", f"{variables[0]}, not for this machine")


def _bypassed(host: str, proxies: dict[str, str]) -> bool:
    return bool(urllib.request.proxy_bypass_environment(host, proxies))
