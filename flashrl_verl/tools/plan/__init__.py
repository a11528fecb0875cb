# SPDX-License-Identifier: Apache-2.0
"""`flashrl plan`: what fits, and what was measured. In reading order: `shape`, `memory`, `measured`, `command`."""
