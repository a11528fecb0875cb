# SPDX-License-Identifier: Apache-2.0
"""Whether Ray would let this machine into a cluster: token authentication without a token lets nobody in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from flashrl_verl.tools.check.findings import Finding, fail, ok, skipped, warn

GENERATE = "`ray get-auth-token --generate` once, then copy ~/.ray/auth_token to every node (docs/clusters.md)"


def check_token(environment: Mapping[str, str], home: Path, joins: bool) -> Iterator[Finding]:
    """Look whether there is a token where Ray looks for one; it is not read.

    Args:
        environment: variables of the process.
        home: the user's home folder.
        joins: whether a cluster that is already there is to be joined. One that a run starts for itself makes its
            token.
    """
    mode = environment.get("RAY_AUTH_MODE", "").lower()
    there = _there(environment, home)
    if mode == "token" and not there:
        text = "RAY_AUTH_MODE=token, and there is no token"
        if joins:
            yield fail("Ray token", f"{text}: the cluster lets nobody in without it", GENERATE)
        else:
            yield warn(
                "Ray token",
                f"{text}: `ray start` refuses; only a cluster that a run starts for itself makes one",
                GENERATE,
            )
    elif mode == "token":
        yield ok("Ray token", f"RAY_AUTH_MODE=token, {there}")
    elif not mode and there and joins:
        text = (
            f"RAY_AUTH_MODE is not set, and there is a token ({there}): `ray start --head` takes it, a node that joins "
            "does not"
        )
        yield warn(
            "Ray token", text, "export RAY_AUTH_MODE=token in every shell on every node, or disabled in all of them"
        )
    elif mode == "disabled" and joins:
        text = "RAY_AUTH_MODE=disabled: whoever reaches Ray's ports runs commands on every node"
        yield warn("Ray token", text, f"a private network, or RAY_AUTH_MODE=token: {GENERATE}")
    elif joins:
        yield warn(
            "Ray token", "no token authentication: whoever reaches Ray's ports runs commands on every node", GENERATE
        )
    else:
        yield skipped("Ray token", "a cluster that the run starts for itself makes its own")


def _there(environment: Mapping[str, str], home: Path) -> str | None:
    if environment.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or home / ".ray" / "auth_token")
    return str(path) if path.is_file() and path.stat().st_size else None
