# SPDX-License-Identifier: Apache-2.0
"""``python -m flashrl_verl``: the ``flashrl`` command where the package is on the path but not installed."""

from flashrl_verl.errors import environment_needed

if __name__ == "__main__":
    with environment_needed():
        from flashrl_verl.cli import main
    main()
