# SPDX-License-Identifier: Apache-2.0
"""The old learning benchmark with the tools it was built on, as they were. It goes when ``learning.py`` has been run on a GPU."""
