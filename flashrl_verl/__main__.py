# SPDX-License-Identifier: Apache-2.0
"""``python -m flashrl_verl``: the ``flashrl`` command where the package is on the path but not installed."""

from flashrl_verl.cli import main

if __name__ == "__main__":
    main()
