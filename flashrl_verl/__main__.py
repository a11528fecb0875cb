# SPDX-License-Identifier: Apache-2.0
"""The ``flashrl`` command, and ``python -m flashrl_verl`` where the package is on the path but not installed."""

from flashrl_verl.errors import environment_needed


def main() -> None:
    """Run it, or say which module the environment lacks."""
    with environment_needed():
        from flashrl_verl.cli import main as run
    run()


if __name__ == "__main__":
    main()
