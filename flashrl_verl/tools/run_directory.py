# SPDX-License-Identifier: Apache-2.0
"""The directory that a command writes to."""

from pathlib import Path

from flashrl_verl.errors import ConfigError


def check_output(output: Path) -> None:
    """Refuse an output directory that cannot be made because a file is in its place.

    Raises:
        ConfigError: `--output` is a file, or lies below one.
    """
    for path in (output, *output.parents):
        if path.exists():
            if not path.is_dir():
                raise ConfigError(f"--output {output}: {path} is a file. Choose a directory, which need not exist yet.")
            return
