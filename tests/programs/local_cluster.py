# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of several nodes on one machine: each has an address of its own on the loopback interface."""

import importlib.metadata
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import flashrl_verl
from flashrl_verl.tools.process_tree import ProcessTree

RAY = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
RESOURCES = ["--num-gpus=1", "--num-cpus=16", "--object-store-memory=500000000"]
"""A logical GPU, as verl's pools ask for one; more logical CPUs than there are, as in ``hardware=cpu``."""


class LocalCluster:
    """A head at 127.0.0.2, and nodes that ``join``; of this process's environment they have nothing but PATH.

    Their HOME is a folder of the cluster: in the user's may be a token, by which Ray would let nobody in. Within
    ``with``; every process is ended at its end.

    Attributes:
        folder: where Ray writes on all of its nodes (--temp-dir).
        address: for ``ray.init``.
    """

    def __init__(self):
        # Short: the path of a socket below it has to stay under 107 letters. Ray's default would mix it with other
        # clusters.
        self.folder = Path(tempfile.mkdtemp(prefix="flr-", dir="/tmp"))
        self._nodes: list[ProcessTree] = []
        self.address = f"127.0.0.2:{_free_port('127.0.0.2')}"

    def __enter__(self) -> "LocalCluster":
        host, port = self.address.split(":")
        words = ("--head", "--include-dashboard=false", f"--port={port}", f"--temp-dir={self.folder}")
        self._start(f"--node-ip-address={host}", *words)
        return self

    def join(self, hide: Sequence[Path] = (), variables: Mapping[str, str] | None = None) -> ProcessTree:
        """Another node.

        Args:
            hide: folders that are empty for its processes, as on a machine that does not have them (``can_hide``).
            variables: of its environment, beside PATH and HOME.
        """
        host = f"127.0.0.{2 + len(self._nodes)}"
        return self._start(f"--node-ip-address={host}", f"--address={self.address}", hide=hide, variables=variables)

    def _start(self, *words: str, hide: Sequence[Path] = (), variables: Mapping[str, str] | None = None) -> ProcessTree:
        elsewhere = self.folder / f"node{len(self._nodes)}"
        elsewhere.mkdir()
        env = {"PATH": os.environ["PATH"], "HOME": str(self.folder), **(variables or {})}
        node = ProcessTree([*self._hiding(hide), *RAY, *RESOURCES, *words], elsewhere / "log", env, elsewhere)
        self._nodes.append(node)
        deadline = time.monotonic() + 120
        while "Ray runtime started" not in (told := (elsewhere / "log").read_text(errors="replace")):
            if node.poll() is not None or time.monotonic() > deadline:
                self.__exit__()  # of a head that fails nobody else ends anything: ``with`` was not entered
                raise AssertionError(told)
            time.sleep(0.2)
        return node

    def _hiding(self, folders: Sequence[Path]) -> list[str]:
        if not folders:
            return []
        (empty := self.folder / "empty").mkdir(exist_ok=True)
        mounts = [f"mount --bind {shlex.quote(str(empty))} {shlex.quote(str(folder))}" for folder in folders]
        return ["unshare", "--mount", "sh", "-c", " && ".join([*mounts, 'exec "$@"']), "sh"]

    @staticmethod
    def kill(node: ProcessTree) -> None:
        """End a node as a power cut would: all of its processes at once, and those that a leader which failed has
        left."""
        node.end([(signal.SIGKILL, 10.0)])

    def __exit__(self, *_: object) -> None:
        for node in reversed(self._nodes):
            self.kill(node)
        shutil.rmtree(self.folder, ignore_errors=True)


def _free_port(host: str) -> int:
    with socket.socket() as listener:
        listener.bind((host, 0))
        return listener.getsockname()[1]


def can_hide() -> bool:
    """Whether this machine lets us give a process a view of the file system of its own."""
    if shutil.which("unshare") is None:
        return False
    return (
        subprocess.run(["unshare", "--mount", "mount", "--bind", "/tmp", "/tmp"], capture_output=True).returncode == 0
    )


def our_folders() -> list[Path]:
    """Where this package and its metadata lie."""
    found = [d for d in importlib.metadata.distributions() if d.name == "flashrl-verl"]
    metadata = {Path(d.locate_file(f"flashrl_verl-{d.version}.dist-info")) for d in found}
    return [Path(flashrl_verl.__file__).resolve().parent, *(folder for folder in sorted(metadata) if folder.is_dir())]
