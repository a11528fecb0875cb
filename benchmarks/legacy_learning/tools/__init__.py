# SPDX-License-Identifier: Apache-2.0
"""The commands around a run. They import the core; the core imports none of them."""
